"""3-D positions against golden values, the rule's example and the library."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from vrl.models.qwen2_5_vl.positions import mrope_positions
from vrl.protocol.errors import DataError

_GOLDEN = Path(__file__).parents[2] / "golden"


def test_golden_positions() -> None:
    golden = json.loads((_GOLDEN / "mrope.json").read_text(encoding="utf-8"))
    image_id, merge = golden["special_ids"]["image_pad"], golden["spatial_merge_size"]
    for case in golden["cases"]:
        grids = [tuple(grid) for grid in case["image_grid_thw"] or []]
        for row, mask in enumerate(case["attention_mask"]):
            kept = torch.tensor(mask, dtype=torch.bool)
            ids = torch.tensor(case["input_ids"][row])[kept].tolist()
            tokens = sum(token == image_id for token in ids)
            mine = []
            while sum(t * h * w // merge**2 for t, h, w in mine) < tokens:
                mine.append(grids.pop(0))
            wanted = torch.tensor(case["position_ids"])[:, row][:, kept].T
            found = mrope_positions(ids, mine, image_token_id=image_id, merge_size=merge)
            assert np.array_equal(found, wanted), case["id"]


def test_two_images_in_a_row() -> None:
    text, mark = 1, 9
    ids = [text, text, *[mark] * 6, text, text, text, text, text, *[mark] * 4, text, text, text]
    time, height, width = mrope_positions(ids, [(1, 4, 6), (1, 4, 4)], image_token_id=mark).T.tolist()
    assert time == [0, 1, *[2] * 6, 5, 6, 7, 8, 9, *[10] * 4, 12, 13, 14]
    assert height == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 10, 11, 11, 12, 13, 14]
    assert width == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 10, 11, 12, 13, 14]


def test_positions_equal_the_librarys(vision_folder: Path) -> None:
    model = AutoModel.from_pretrained(vision_folder)
    mark = model.config.image_token_id
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        grids = (torch.randint(1, 6, (3, 2), generator=generator) * 2).tolist()
        ids: list[int] = []
        for height, width in grids:
            ids += [5] * int(torch.randint(1, 4, (1,), generator=generator)) + [mark] * (height * width // 4)
        ids += [5]
        tensor = torch.tensor([ids])
        full = torch.tensor([[1, h, w] for h, w in grids])
        kinds = (tensor == mark).int()
        wanted, _ = model.get_rope_index(input_ids=tensor, mm_token_type_ids=kinds, image_grid_thw=full)
        found = mrope_positions(ids, [(1, h, w) for h, w in grids], image_token_id=mark)
        assert np.array_equal(found, wanted[:, 0].T)


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([1, 9, 9, 1], [(1, 4, 4)], "image 0 makes 4 visual tokens"),
        ([1, 9, 9, 9, 9], [(1, 4, 4), (1, 2, 2)], "image 1 makes 1 visual tokens"),
        ([1, 9, 9, 1], [(1, 2, 2)], "1 image tokens more than its 1 images"),
        ([1, 9], [], "1 image tokens more than its 0 images"),
    ],
)
def test_tokens_and_images_must_match(ids: list[int], grids: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        mrope_positions(ids, grids, image_token_id=9)
