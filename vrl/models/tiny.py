"""Tiny Qwen2.5-VL and Qwen2 models with random weights, written as ordinary Hugging Face folders.

The default run on a machine without a GPU, the tests and the benchmarks build their model here. A folder holds
everything that `AutoProcessor`, `AutoTokenizer`, `AutoModel...from_pretrained` and vLLM load: configuration, weights,
a byte-level BPE tokenizer trained on the texts passed in, a chat template of Qwen2.5's form, and for `qwen2_5_vl` the
image processor. Heads divide by two everywhere, so that tensor parallelism over two ranks works.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

TINY_KINDS: Final = ("qwen2_5_vl", "qwen2")
VOCAB_SIZE: Final = 1024
PAD_TOKEN: Final = "<|endoftext|>"
EOS_TOKEN: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (
    PAD_TOKEN,
    "<|im_start|>",
    EOS_TOKEN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>")

PATCH_PIXELS: Final = 14
MERGE: Final = 2
CELL_PIXELS: Final = PATCH_PIXELS * MERGE
MIN_PIXELS: Final = 4 * CELL_PIXELS**2
MAX_PIXELS: Final = 64 * CELL_PIXELS**2
MAX_POSITIONS: Final = 4096

_HIDDEN: Final = 128
_HEADS: Final = 4
_KV_HEADS: Final = 2
_INTERMEDIATE: Final = 512
_LAYERS: Final = 2
_VISION_HIDDEN: Final = 64
_VISION_DEPTH: Final = 2
_EMBEDDING_STD: Final = 0.15
_ROPE_THETA: Final = 10000.0
_RESIDUAL_OUTPUTS: Final = ("o_proj.weight", "down_proj.weight", "attn.proj.weight")

# Words, contractions, single digits, punctuation with its line ends, blanks: where Qwen2's tokenizer cuts, too.
_WORD_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE: Final = r"""
{%- macro text_of(content) -%}
{%- if content is string %}{{ content }}{% elif content is not none %}{% for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools %}{{ '<|im_start|>system\n' }}{% if has_system %}{{ text_of(messages[0].content) + '\n\n' }}{% endif -%}
{{- '# Tools\n\nYou may call functions. Their signatures:\n<tools>' -}}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor -%}
{{- '\n</tools>\n\nFor a call return a json object with name and arguments:\n<tool_call>\n' -}}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif has_system %}{{ '<|im_start|>system\n' + text_of(messages[0].content) + '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{- '\n<tool_response>\n' + text_of(message.content) + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
{%- elif not (loop.first and message.role == 'system') -%}
{%- set body = text_of(message.content) -%}
{{- '<|im_start|>' + message.role + '\n' + body -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if body or not loop.first %}{{ '\n' }}{% endif -%}
{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
""".strip()


def build_tiny_model(kind: str, out_dir: Path, texts: Iterable[str], seed: int) -> Path:
    """Write a tiny model folder; equal arguments give equal bytes.

    Args:
        kind: "qwen2_5_vl" (vision-language) or "qwen2" (text).
        out_dir: the folder; made when missing.
        texts: what the tokenizer is trained on, such as conversations of the tasks the model is to learn.
        seed: of the weights.

    Returns:
        The folder.

    Raises:
        ValueError: an unknown kind, or no texts.
    """
    if kind not in TINY_KINDS:
        raise ValueError(f"kind={kind!r} is no tiny model; use one of {', '.join(TINY_KINDS)}")
    tokenizer = _build_tokenizer(texts)
    model = _build_vision_language(tokenizer) if kind == "qwen2_5_vl" else _build_text(tokenizer)
    _initialise(model, seed)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    if kind == "qwen2_5_vl":
        _build_processor(tokenizer).save_pretrained(out_dir)
    else:
        tokenizer.save_pretrained(out_dir)
    return out_dir


def _build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `VOCAB_SIZE` tokens; digits stay single, special tokens come last."""
    corpus = [text for text in texts if text]
    if not corpus:
        raise ValueError("texts is empty: the tokenizer of a tiny model needs at least one text to be trained on")
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(_quoted(token) for token in SPECIAL_TOKENS + TOOL_TOKENS)), "removed"),
            *_word_splitters(),
        ]
    )
    added = len(SPECIAL_TOKENS) + len(TOOL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - added,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(_word_splitters())
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in TOOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (EOS_TOKEN, PAD_TOKEN)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _word_splitters() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(_WORD_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _quoted(token: str) -> str:
    return token.replace("|", r"\|")


def _text_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _build_text(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    rope = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    return Qwen2ForCausalLM(Qwen2Config(**_text_settings(tokenizer), rope_parameters=rope, dtype="float32"))


def _build_vision_language(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    half = _HIDDEN // _HEADS // 2
    side = 3 * half // 8
    rope = {"rope_type": "default", "mrope_section": [half - 2 * side, side, side], "rope_theta": _ROPE_THETA}
    ids: dict[str, Any] = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={**_text_settings(tokenizer), "rope_parameters": rope},
        vision_config={
            "depth": _VISION_DEPTH,
            "hidden_size": _VISION_HIDDEN,
            "num_heads": _HEADS,
            "intermediate_size": 2 * _VISION_HIDDEN,
            "out_hidden_size": _HIDDEN,
            "patch_size": PATCH_PIXELS,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 2 * CELL_PIXELS,
            "fullatt_block_indexes": [_VISION_DEPTH - 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    limits: dict[str, Any] = {
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH_PIXELS,
        "merge_size": MERGE,
    }
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**limits),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**limits),
        chat_template=CHAT_TEMPLATE,
    )


def _initialise(model: PreTrainedModel, seed: int) -> None:
    """Draw all weights from one generator, in the order of their names, whatever the library's own defaults are.

    Matrices get variance 1 / fan-in, those that write into a residual stream less by the number of such writes; norms
    are one and biases zero. At widths of about 100 this is far more than the usual 0.02, and it learns far sooner.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                nn.init.normal_(parameter, std=_initial_std(name, parameter[0].numel()), generator=generator)


def _initial_std(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return _EMBEDDING_STD
    std = 1.0 / math.sqrt(fan_in)
    if name.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * (_VISION_DEPTH if ".visual." in name else _LAYERS))
    return std
