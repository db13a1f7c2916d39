"""The rows that the advantage estimators and the balancing get on both sides. Needs torch and numpy only."""

from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

GROUP: Final = 8
SIZES: Final = ((1024, 8), (1024, 64), (8192, 64), (8192, 512))  # rows and parts of the balancing


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Responses of log-normal length with a score on the last token, as padded tensors `[B, L]` and row lengths."""

    lengths: Tensor
    mask: Tensor
    scores: Tensor
    values: Tensor
    group: Tensor

    @classmethod
    def drawn(cls, rows: int, width: int) -> "Rows":
        """Of `rows` rows in groups of 8, at most `width` tokens long; the median is a third of that."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.exp(torch.randn(rows, generator=generator) * 0.8) * width / 3
        lengths = drawn.long().clamp(min(8, width), width)
        mask = torch.arange(width) < lengths[:, None]
        scores = torch.zeros(rows, width)
        scores[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=generator).float()
        values = torch.randn(rows, width, generator=generator) * mask
        return cls(lengths, mask, scores, values, torch.arange(rows) // GROUP)


def token_counts(rows: int) -> list[int]:
    """Return log-normal row lengths between 32 and 16384 tokens."""
    rng = np.random.default_rng(rows)
    return np.clip(np.exp(rng.normal(7.0, 1.0, rows)).astype(int), 32, 16384).tolist()


def imbalance(lengths: list[int], parts: list[list[int]]) -> float:
    """Return the heaviest part over the mean part, in tokens."""
    loads = [sum(lengths[i] for i in part) for part in parts]
    return max(loads) * len(loads) / sum(loads)
