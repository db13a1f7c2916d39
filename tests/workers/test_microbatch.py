"""Which rows of a micro-batch begin with the same prompt: compared by what the model sees, not by their group."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.workers.rig import build_tiny, config_of, context_of, png
from vrl.protocol.columns import IMAGE_KEYS, INPUT_IDS, LOSS_MASK, POSITION_IDS, UID
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.ragged import Ragged
from vrl.protocol.trajectory import content_key
from vrl.workers.building import BuildContext
from vrl.workers.microbatch import Packer, dummy_batch

Row = tuple[list[int], list[int], list[bytes]]  # ids, loss mask, images
RED, BLUE, WIDE = png(60, 90, 1), png(60, 90, 2), png(30, 200, 3)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> BuildContext:
    return context_of(config_of(build_tiny("qwen2_5_vl", Path(tmp_path_factory.mktemp("models")))))


def batch_of(context: BuildContext, rows: Sequence[Row], uids: Sequence[str]) -> DataProto:
    ids = Ragged.from_rows([row for row, _, _ in rows], torch.int64)
    positions = torch.cat([torch.tensor(context.renderer.positions(row, images)) for row, _, images in rows])
    columns = {
        INPUT_IDS: ids,
        LOSS_MASK: Ragged.from_rows([mask for _, mask, _ in rows], torch.bool),
        POSITION_IDS: Ragged(positions, ids.offsets),
    }
    keys = object_column(tuple(map(content_key, images)) for _, _, images in rows)
    blobs = {content_key(image): image for _, _, images in rows for image in images}
    return DataProto(columns, {IMAGE_KEYS: keys, UID: object_column(uids)}, blobs)


def shown(context: BuildContext, text: str, images: Sequence[bytes]) -> list[int]:
    return context.renderer.expand(context.renderer.render([{"role": "user", "content": text}]), images)


def answered(prompt: list[int], images: list[bytes], answer: list[int], later: Sequence[int] = (), *more: bytes) -> Row:
    """Return a row: a prompt, a sampled answer, and what comes later with its images."""
    mask = [0] * len(prompt) + [1] * len(answer) + [0] * len(later)
    return [*prompt, *answer, *later], mask, [*images, *more]


def test_prompts_are_compared_by_ids_and_images(context: BuildContext) -> None:
    one, other = shown(context, "see <image>", [RED]), shown(context, "see <image>?", [RED])
    two = shown(context, "<image> or <image>", [RED, BLUE])
    after = shown(context, "and <image>", [WIDE])
    rows = [
        answered(one, [RED], [5, 6]),
        answered(other, [RED], [5, 6]),  # another text
        answered(one, [BLUE], [5, 6]),  # the same ids and positions, another image
        answered(one, [RED], [7], after, WIDE),  # another image later on
        answered(two, [RED, BLUE], [5]),
        answered(two, [RED, RED], [5]),  # the second image is another one
        answered(two, [RED, BLUE], [6, 7]),
    ]
    batch = batch_of(context, rows, ["same"] * 4 + ["a", "a", "b"])
    packer = context.packer(share_prompts=True)
    numbers = [prompt.number for prompt in packer.prompts(batch)]
    assert numbers == [0, 1, 2, 0, 3, 4, 3]
    assert [prompt.length for prompt in packer.prompts(batch)] == [
        len(p) for p in (one, other, one, one, two, two, two)
    ]
    packed = packer.pack(batch, torch.device("cpu"))
    assert len(packed.input_ids) == len(batch.ragged(INPUT_IDS).values)
    assert len(packed.computed.input_ids) == len(packed.input_ids) - len(one) - len(two)
    assert context.packer().pack(batch, torch.device("cpu")).compact is None


def test_other_positions_are_another_prompt(context: BuildContext) -> None:
    prompt = shown(context, "no picture", [])
    batch = batch_of(context, [answered(prompt, [], [5])] * 3, ["a"] * 3)
    moved = batch.ragged(POSITION_IDS).values.clone()
    moved[1, 2] += 1
    batch = batch.with_columns(**{POSITION_IDS: Ragged(moved, batch.ragged(POSITION_IDS).offsets)})
    assert [prompt.number for prompt in context.packer(share_prompts=True).prompts(batch)] == [0, 1, 1]


def test_images_side_by_side_cannot_be_told_apart_and_count_together(context: BuildContext) -> None:
    token = context.renderer.image_token
    one = [t for t in shown(context, "<image>", [RED]) if t == token]
    prompt = [20, *one, *one, 21]
    rows = [
        answered(prompt, [RED, BLUE], [5]),
        answered(prompt, [RED, WIDE], [5]),
        answered(prompt, [RED, BLUE], [6]),
    ]
    ids = Ragged.from_rows([row for row, _, _ in rows], torch.int64)
    keys = object_column(tuple(map(content_key, images)) for _, _, images in rows)
    masks = Ragged.from_rows([mask for _, mask, _ in rows], torch.bool)
    positions = torch.arange(len(rows[0][0]))[:, None].expand(-1, 3).repeat(3, 1)
    batch = DataProto(
        {INPUT_IDS: ids, LOSS_MASK: masks, POSITION_IDS: Ragged(positions, ids.offsets)}, {IMAGE_KEYS: keys}
    )
    assert [prompt.number for prompt in context.packer(share_prompts=True).prompts(batch)] == [0, 1, 0]


def test_rows_where_nothing_was_sampled_are_prompts_altogether() -> None:
    ids = Ragged.from_rows([[5, 6, 7], [5, 6, 7], [8]], torch.int64)
    mask = Ragged.from_rows([[0, 0, 0], [0, 0, 0], [1]], torch.bool)
    packer = Packer(None, needs_positions=False, share_prompts=True)
    batch = DataProto({INPUT_IDS: ids, LOSS_MASK: mask})
    assert packer.prompts(batch) == [(0, 3), (0, 3), (1, 0)]
    packed = packer.pack(batch, torch.device("cpu"))
    assert packed.compact is not None
    assert packed.compact.place.tolist() == [1, 2, 3, 1, 2, 3, 0]
    assert packer.pack(dummy_batch(batch, needs_positions=False), torch.device("cpu")).compact is None
