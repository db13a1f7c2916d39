"""Rows that begin with the same prompt: it is computed once, and what follows it in each row attends to it.

    rows      p p p a a | p p p b b b | q q c     T tokens, in terms of which losses and heads go on
    computed  p p p | a a | b b b | q q c         U tokens in segments: a prompt, a remainder, or a row alone
    keys      p p p | p p p a a | p p p b b b | q q c

`packing.pack` applies the layout, `attention` gathers the keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from vrl.protocol.balance import RowPrompt


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """Which tokens are computed. Segments of equal widths are neighbours, so that they are attended to in one call.

    `kept[u]` is a row token that computed token u is, `place[t]` the computed token that stands for row token t, and
    `keys` are the computed tokens that the segments look at, one segment's after another's: the last ones of each are
    its own.
    """

    kept: Int[Tensor, " U"]
    place: Int[Tensor, " T"]
    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    keys: Int[Tensor, " K"]


class _Segment(NamedTuple):
    begin: int  # among row tokens
    length: int
    prompt: int  # where the prompt before it begins among row tokens
    prompt_length: int  # 0: nothing stands before it


def lay_out(offsets: Sequence[int], prompts: Sequence[RowPrompt]) -> Layout | None:
    """Return the layout of rows `offsets[i]` to `offsets[i + 1]`, or None when no two of them share a prompt."""
    members: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        members.setdefault(prompt.number, []).append(row)
    segments: list[_Segment] = []
    place = torch.arange(offsets[-1])  # first the row token, then the computed one
    for rows in members.values():
        first, shared = offsets[rows[0]], prompts[rows[0]].length if len(rows) > 1 else 0
        if shared:
            segments.append(_Segment(first, shared, first, 0))
        for row in rows:
            begin = offsets[row]
            place[begin : begin + shared] = place[first : first + shared].clone()
            segments.append(_Segment(begin + shared, offsets[row + 1] - begin - shared, first, shared))
    if all(segment.prompt_length == 0 for segment in segments):
        return None
    segments = sorted((s for s in segments if s.length), key=lambda s: (s.length, s.prompt_length))
    kept = _ranges((s.begin, s.length) for s in segments)
    computed = torch.empty_like(place)
    computed[kept] = torch.arange(len(kept))
    looked_at = _ranges(part for s in segments for part in ((s.prompt, s.prompt_length), (s.begin, s.length)))
    return Layout(
        kept=kept,
        place=computed[place],
        lengths=tuple(s.length for s in segments),
        key_lengths=tuple(s.prompt_length + s.length for s in segments),
        keys=computed[looked_at],
    )


def _ranges(parts: Iterable[tuple[int, int]]) -> Int[Tensor, " N"]:
    """Return the numbers of ranges given by begin and length, one range after another."""
    return torch.cat([torch.arange(begin, begin + length) for begin, length in parts])
