"""Batches of prompts for training, with a position that is saved, and the fixed batches of a validation.

The controller owns one loader for the training data and keeps its state in the checkpoint. Rows hold no tensors, so
this needs neither worker processes nor torch.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np

from vrl.data.dataset import RowDataset
from vrl.protocol.errors import DataError
from vrl.protocol.trajectory import Prompt


@final
class PromptLoader:
    """Endless seeded batches over a dataset, epoch after epoch.

    Each epoch is a new order drawn from (seed, epoch). The uid of a draw is `<epoch>-<position>-<row_id>`. The state
    counts rows, not batches: a loader that takes up the state of another goes on with the very next row, in the middle
    of an epoch and at its end.
    """

    def __init__(
        self, dataset: RowDataset, batch_size: int, *, seed: int = 1, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        """Start at the first batch of epoch 0.

        Raises:
            DataError: the batch size is below 1, the seed below 0, or the dataset does not fill one batch.
        """
        if batch_size < 1:
            raise DataError(f"data.train_batch_size={batch_size}: a batch must hold at least one prompt")
        if seed < 0:
            raise DataError(f"data.seed={seed}: give 0 or a positive number")
        if len(dataset) < (batch_size if drop_last else 1):
            raise DataError(
                f"the dataset has {len(dataset)} rows, less than one batch of data.train_batch_size={batch_size}; "
                "(data.gen_batch_size where groups are filtered); lower it or give more data"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self._dataset), self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0: also the number of epochs that are complete."""
        return self._epoch

    def next_batch(self) -> list[Prompt]:
        """Return the next batch; after the last one of an epoch the next epoch begins."""
        start, stop = self._position, min(self._position + self._batch_size, len(self._dataset))
        batch = [_draw(self._dataset[int(self._order[at])], str(self._epoch), at) for at in range(start, stop)]
        self._move_to(self._epoch, stop)
        return batch

    def __iter__(self) -> Iterator[list[Prompt]]:
        """Yield what is left of the current epoch."""
        epoch = self._epoch
        while self._epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, with what it depends on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._dataset),
            "row_ids_sha256": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: the rows, the seed or the shuffling are others than then, so that the batches would be others.
        """
        current = self.state_dict()
        fixed = [key for key in current if key not in ("epoch", "position")]
        changed = [
            f"{key} {state.get(key)!r} then, {current[key]!r} now" for key in fixed if state.get(key) != current[key]
        ]
        if changed:
            raise DataError(
                f"the data differs from the checkpoint's: {'; '.join(changed)}; use the same data settings, or start a "
                "new run (trainer.resume_mode=disable)"
            )
        self._move_to(int(state["epoch"]), int(state["position"]))

    def _move_to(self, epoch: int, position: int) -> None:
        """Stand before row `position` of `epoch`, or at the next epoch when no batch is left of this one."""
        left = len(self._dataset) - position
        if left < (self._batch_size if self._drop_last else 1):
            epoch, position = epoch + 1, 0
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
        self._epoch = epoch
        self._position = position

    def _order_of(self, epoch: int) -> np.ndarray:
        rows = len(self._dataset)
        return np.random.default_rng([self._seed, epoch]).permutation(rows) if self._shuffle else np.arange(rows)

    def _fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self._dataset.row_ids).encode()).hexdigest()


def ordered_batches(dataset: RowDataset, batch_size: int | None = None, name: str = "val") -> Iterator[list[Prompt]]:
    """Yield every row once, in order; None makes one batch of all. The last batch may be smaller.

    The uid of a draw is `<name>-<position>-<row_id>`, the same each time: equal steps sample equal tokens.
    """
    size = len(dataset) if batch_size is None else batch_size
    if size < 1:
        raise DataError(
            f"data.val_batch_size={batch_size} on {len(dataset)} rows: a batch must hold at least one prompt"
        )
    for start in range(0, len(dataset), size):
        yield [_draw(dataset[at], name, at) for at in range(start, min(start + size, len(dataset)))]


def _draw(prompt: Prompt, series: str, position: int) -> Prompt:
    return replace(prompt, uid=f"{series}-{position}-{prompt.row_id}")
