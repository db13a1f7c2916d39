"""Images in a batch: shared by the samples of a prompt, pruned and counted with the rows."""

import torch

from vrl.protocol.columns import IMAGE_KEYS, INPUT_IDS
from vrl.protocol.dataproto import DataProto, concat, object_column
from vrl.protocol.ragged import Ragged

BLOBS = {"k0": b"zero", "k1": b"one", "k2": b"two"}


def images_of(batch: DataProto) -> list[list[bytes]]:
    """Return the images of each row."""
    return [[batch.blobs[key] for key in keys] for keys in batch.objects[IMAGE_KEYS]]


def test_the_samples_of_a_prompt_share_its_images() -> None:
    prompts = DataProto({}, {IMAGE_KEYS: object_column([("k0",), ("k1", "k2")])}, BLOBS)
    batch = prompts.repeat(3)
    assert dict(batch.blobs) == BLOBS
    assert batch.nbytes() == sum(len(blob) for blob in BLOBS.values())
    shuffled, _ = batch.reorder([5, 0, 3, 1, 4, 2])
    assert sum(len(keys) for keys in shuffled.objects[IMAGE_KEYS]) == 9
    assert images_of(shuffled)[:2] == [[b"one", b"two"], [b"zero"]]
    parts = shuffled.split(1)
    assert [set(part.blobs) for part in parts[:2]] == [{"k1", "k2"}, {"k0"}]
    assert dict(concat(parts).blobs) == BLOBS


def test_nbytes_counts_tensors() -> None:
    ids = Ragged.from_rows([[0, 1], [10, 11]], torch.int64)
    batch = DataProto({INPUT_IDS: ids})
    assert batch.nbytes() == 4 * 8 + 3 * 8  # four ids and three offsets
    assert batch.rows([0]).nbytes() == 2 * 8 + 2 * 8
