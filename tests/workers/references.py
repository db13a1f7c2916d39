"""Greedy continuations by transformers' own `generate`, from a prompt's text and its decoded images."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from vrl.models.images import decode_image
from vrl.models.renderer import HFRenderer
from vrl.protocol.trajectory import Prompt


def greedy_by_transformers(
    folder: Path, kind: str, renderer: HFRenderer, prompts: Sequence[Prompt], count: int
) -> dict[str, tuple[int, ...]]:
    """Return `count` tokens for each prompt, one prompt at a time."""
    is_text = kind == "qwen2"
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # all rows to the same length
    encode = (AutoTokenizer if is_text else AutoProcessor).from_pretrained(folder)
    out = {}
    for prompt in prompts:
        text = renderer.decode(renderer.render(prompt.messages), keep_special=True)
        images = {"images": [decode_image(image) for image in prompt.images]} if prompt.images else {}
        inputs = encode(text=[text], return_tensors="pt", **images)
        ids = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=count,
            suppress_tokens=list(renderer.banned_ids) or None,
        )
        out[prompt.uid] = tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())
    return out
