"""Next-token logits with cached keys and values against the plain Hugging Face model over whole rows."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from vrl.models.decoding import Decoder, RowCache, Segment
from vrl.models.loading import load_policy
from vrl.models.renderer import load_renderer

_CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def _sliding(folder: Path) -> dict[str, object]:
    """Return overrides that let every second layer see 8 tokens only."""
    count = AutoConfig.from_pretrained(folder).num_hidden_layers
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(count)]
    return {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}


def _rows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(20, 200, (n,), generator=generator).tolist() for n in lengths]


def _plain_logits(folder: Path, rows: Sequence[Sequence[int]], **overrides: object) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **overrides)
    with torch.no_grad():
        return [model.eval()(torch.tensor([row])).logits[0] for row in rows]


@pytest.mark.parametrize("windows", ["full", "sliding"])
def test_rows_that_come_and_go(text_folder: Path, windows: str) -> None:
    """Prompts of different length, whole or in two pieces, beside rows that decode: all equal the plain model."""
    overrides = _sliding(text_folder) if windows == "sliding" else {}
    rows = _rows(30, 12, 25)
    expected = _plain_logits(text_folder, rows, **overrides)
    decoder = Decoder(load_policy(text_folder, torch.float32, override_config=overrides))
    caches = [RowCache(len(row)) for row in rows]
    # Row by row: how many tokens each step brings; a row that is not there brings none.
    plan = [[20, 5, 1, 1, 1, 1, 1], [0, 9, 1, 1, 1, 0, 0], [0, 0, 6, 11, 1, 1, 1]]
    for step in range(7):
        present = [i for i in range(3) if plan[i][step]]
        begins = {i: sum(plan[i][:step]) for i in present}
        segments = [Segment(cache=caches[i], ids=rows[i][begins[i] : begins[i] + plan[i][step]]) for i in present]
        logits = decoder.logits(segments)
        for i, got in zip(present, logits, strict=True):
            torch.testing.assert_close(got, expected[i][begins[i] + plan[i][step] - 1], **_CLOSE)


def test_sliding_windows_matter(text_folder: Path) -> None:
    row = _rows(30)
    full, sliding = (_plain_logits(text_folder, row, **overrides)[0] for overrides in ({}, _sliding(text_folder)))
    torch.testing.assert_close(full[:8], sliding[:8], **_CLOSE)
    assert (full[-1] - sliding[-1]).abs().max() > 1e-3


def test_rows_with_images(vision_folder: Path, png: Callable[..., bytes]) -> None:
    """Rows with no, one and two images decode together: prompt, then four tokens one by one."""
    renderer = load_renderer(vision_folder)
    cache = renderer.image_cache(2**28)
    assert cache is not None
    pictures = [png(60, 90, 1), png(84, 56, 2)]
    contents = [("no picture", []), ("see <image>", pictures[:1]), ("<image> or <image>?", pictures)]
    model = AutoModelForImageTextToText.from_pretrained(vision_folder, dtype=torch.float32).eval()
    decoder = Decoder(load_policy(vision_folder, torch.float32))
    segments, following = [], []
    for content, images in contents:
        prompt = renderer.expand(renderer.render([{"role": "user", "content": content}]), images)
        row = [*prompt, 70, 71, 72, 73]
        positions = torch.tensor(renderer.positions(row, images))
        pixels, grids = cache.batch(images)
        kinds = (torch.tensor([row]) == model.config.image_token_id).int()
        media = {} if pixels is None else {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
        with torch.no_grad():
            following.append((row, positions, model(torch.tensor([row]), **media).logits[0]))
        segments.append(
            Segment(
                cache=RowCache(len(row)),
                ids=prompt,
                positions=positions[: len(prompt)],
                images=None if pixels is None or grids is None else (pixels, grids),
            )
        )
    for _ in range(5):
        for segment, (_, _, expected), got in zip(segments, following, decoder.logits(segments), strict=True):
            torch.testing.assert_close(got, expected[segment.cache.length - 1], **_CLOSE)
        places = [segment.cache.length for segment in segments]
        segments = [
            Segment(cache=segment.cache, ids=row[place : place + 1], positions=positions[place : place + 1])
            for segment, (row, positions, _), place in zip(segments, following, places, strict=True)
            if place < len(row)
        ]


def test_bad_segments_are_refused(text_folder: Path) -> None:
    decoder = Decoder(load_policy(text_folder, torch.float32))
    with pytest.raises(ValueError, match="0 tokens and 5 new ones outgrows its cache of 4"):
        decoder.logits([Segment(cache=RowCache(4), ids=[30] * 5)])
    with pytest.raises(ValueError, match="needs a token"):
        decoder.logits([Segment(cache=RowCache(4), ids=[])])
    patches = (torch.zeros(4, 1176), torch.tensor([[1, 2, 2]]))
    with pytest.raises(ValueError, match="takes text only"):
        decoder.logits([Segment(cache=RowCache(4), ids=[30], images=patches)])
