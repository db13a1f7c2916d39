"""Tiny reward models from a seed, through transformers; for the tests of models, workers and controller."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification


def build_reward_model(like: Path, folder: Path, seed: int, **changes: object) -> Path:
    """Write a classifier with one label of the width, depth and tokenizer of the model folder `like`."""
    config = AutoConfig.from_pretrained(like)
    for name, value in ({"num_labels": 1} | changes).items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    return folder


def plain_score(folder: Path, ids: list[int]) -> float:
    """Return transformers' own score of one row, in float32."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])
