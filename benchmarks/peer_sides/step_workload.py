"""What both trainers of a GRPO step get: a model folder, prompts as chat messages, a reward, lengths.

Qwen2 with 4 layers of width 256 and random weights. `fixed`: every sample has as many tokens as the others.
`longtail`: samples end on their own, with the same small probability at every token.
"""

import json
import random
import sys
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.peer_sides.step_sizes import MEAN_TOKENS, PROMPT_TOKENS, PROMPTS
from vrl.models.tiny import build_tiny_model

_WORDS: Final = tuple("tom has apples and gives some to ann who then buys more at the shop today".split())  # noqa: SIM905
_STEADY: Final = 1.0  # one embedding channel is equal for all tokens, so that the head can have a bias


def write_workload(folder: Path) -> None:
    """Write `fixed` and `longtail` model folders, `prompts.jsonl` and `reward.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = _questions(200)
    for case, mean_length in (("fixed", None), ("longtail", MEAN_TOKENS)):
        build_tiny_model("qwen2", folder / case, questions, seed=0)
        tokenizer = AutoTokenizer.from_pretrained(folder / case)
        model = _model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        rows = [_exactly(question, tokenizer) for question in questions[:PROMPTS]]
        if mean_length:
            _end_after(model, mean_length, tokenizer, rows)
        model.save_pretrained(folder / case)
    with (folder / "prompts.jsonl").open("w") as lines:
        for row in rows:
            messages = [{"role": "user", "content": row}]
            ground = {"style": "rule", "ground_truth": ""}
            lines.write(json.dumps({"data_source": "digits", "prompt": messages, "reward_model": ground}) + "\n")
    (folder / "reward.py").write_text(REWARD)


REWARD: Final = '''"""Share of ASCII digits in the response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c in "0123456789" for c in solution_str) / max(1, len(solution_str))
'''


def _questions(count: int) -> list[str]:
    rng = random.Random(0)
    return [
        f"{rng.randint(10, 99)}+{rng.randint(10, 99)}=? " + " ".join(rng.choices(_WORDS, k=60)) for _ in range(count)
    ]


def _rendered(text: str, tokenizer: object) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(  # pyright: ignore[reportAttributeAccessIssue]
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def _exactly(question: str, tokenizer: object) -> str:
    """Cut a question so that it is `PROMPT_TOKENS` tokens long with the template, or as near below as characters go."""
    while len(_rendered(question, tokenizer)) > PROMPT_TOKENS:
        question = question[:-1]
    return question


def _model(vocabulary: int, eos: int, pad: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=eos,
        pad_token_id=pad, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@torch.no_grad()
def _end_after(model: Qwen2ForCausalLM, tokens: int, tokenizer: object, questions: list[str]) -> None:
    """Give the end token the probability 1 / tokens, near enough, everywhere.

    The head has no bias. A channel that is the same in all embeddings is one, after the last norm.
    """
    model.model.embed_tokens.weight[:, 0] = _STEADY
    head, end = model.lm_head.weight, model.generation_config.eos_token_id
    head[:, 0] = 0.0
    ids = torch.tensor([_rendered(questions[0], tokenizer) + list(range(20, 120))])
    hidden = model.model(input_ids=ids).last_hidden_state[0, PROMPT_TOKENS:]
    wanted = torch.logit(torch.tensor(1.0 / tokens))
    logits = hidden @ head.T
    others = torch.cat([logits[:, :end], logits[:, end + 1 :]], 1).logsumexp(1)
    head[end, 0] = ((wanted + others - logits[:, end]) / hidden[:, 0]).mean()


if __name__ == "__main__":
    write_workload(Path(sys.argv[1]))
