"""The learner: one sharded module with its optimizer, and the only place that micro-batches, accumulates and steps.

Actor, critic and reference differ in module and loss alone. A rank calls the same methods in the same order as all
others of its group; every micro-batch runs the same collectives on every rank, also where a rank holds no row.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor

from vrl.algorithms.aggregation import Counts
from vrl.models.packing import PackedBatch
from vrl.protocol.balance import in_order, micro_batches, prompt_units, rows_of, unit_sums, units_of
from vrl.protocol.columns import GROUP, INPUT_IDS
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.metrics import reduce_metrics
from vrl.protocol.ragged import Ragged, concat_ragged
from vrl.workers.microbatch import Packer, dummy_batch
from vrl.workers.offload import Offload

_SECONDS = "timing_s/"


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss returns for one micro-batch.

    `loss` is already divided by the mini-batch's global counts: the sum over micro-batches and ranks is its value.
    `sums` and `maxima` are detached scalars for metrics.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A role's loss."""

    def counts(self, rows: DataProto) -> Counts:
        """Return the local counts that the aggregation will divide by."""
        ...

    def __call__(self, module: nn.Module, packed: PackedBatch, rows: DataProto, totals: Counts) -> LossOutput:
        """Run `module` on one micro-batch. `rows` are the rows in `packed`, `totals` the mini-batch's global counts."""
        ...

    def metrics(self, sums: Mapping[str, float], maxima: Mapping[str, float], totals: Counts) -> dict[str, float]:
        """Turn global sums and maxima of one mini-batch into named metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How rows are cut into micro-batches: by token budget, or `rows` at a time when that is set.

    Rows of one group (column `group`) stay together; what is above the limit by itself, row or group, stands alone.
    A prompt that rows of a micro-batch share counts once where the packer shares prompts.
    """

    max_tokens: int = 16384
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """What steps a module: optimizer, schedule (optimizer steps taken -> factor of the base rate) and clipping."""

    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    grad_clip: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """What of a role waits in host memory: parameters and optimizer while it is idle, activations for backward."""

    parameters: bool = False
    optimizer: bool = False
    activations: bool = False

    def offload(self, module: nn.Module, stepper: OptimizerState | None, device: torch.device) -> Offload:
        """Return the module's offload. On a CPU there is one memory, and nothing to move."""
        moves = device.type != "cpu"
        optimizer = stepper.optimizer if stepper else None
        return Offload(module, optimizer, device, parameters=self.parameters and moves, state=self.optimizer and moves)

    def saved_activations(self, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context for a forward pass."""
        if not self.activations:
            return nullcontext
        return partial(save_on_cpu, pin_memory=device.type == "cuda")


class Stopwatch:
    """Adds up seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


class Learner:
    """Runs a module over rows. `stepper` is None for a frozen one.

    `data_ranks` hold every row once between them (None: all ranks do). Under sequence parallelism each of the ranks
    that share a batch holds the same rows and computes the same loss, and is among other `data_ranks` than its peers.
    """

    def __init__(
        self,
        module: nn.Module,
        packer: Packer,
        limits: BatchLimits,
        stepper: OptimizerState | None,
        data_ranks: dist.ProcessGroup | None = None,
        residence: Residence | None = None,
    ) -> None:
        residence = residence or Residence()
        self.module = module
        self._data_ranks = data_ranks
        self.packer = packer
        self.limits = limits
        self.stepper = stepper
        self.steps_taken = 0  # skipped ones included: the schedule goes on
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self._base_lrs = [group["lr"] for group in stepper.optimizer.param_groups] if stepper else []
        self._device = next(module.parameters()).device
        self._saved = residence.saved_activations(self._device)
        self.offload = residence.offload(module, stepper, self._device)

    # -- forward only -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def infer(
        self,
        batch: DataProto,
        run: Callable[[nn.Module, PackedBatch, DataProto], Sequence[Tensor]],
        limits: BatchLimits | None = None,
    ) -> tuple[list[Ragged], dict[str, float]]:
        """Return one or more per-token results `[T]` in the order of the rows, none for a batch without rows.

        `run` gives the tensors `[T]` of a micro-batch; `limits` cut it (None: those of the update). With them come the
        seconds of each stage.
        """
        watch = Stopwatch()
        plan = self._plan(batch, limits or self.limits)
        parts: list[list[Ragged]] = []
        with self.offload.loaded():
            watch.lap("offload")
            self.module.eval()
            for members in plan:
                rows = batch.rows(members) if members else dummy_batch(batch, self.packer.needs_positions)
                packed = self.packer.pack(rows, self._device)
                watch.lap("data")
                outputs = run(self.module, packed, rows)
                if members:
                    offsets = rows.ragged(INPUT_IDS).offsets
                    parts.append([Ragged(output.float().cpu(), offsets) for output in outputs])
                watch.lap("forward")
            self.module.train()
        watch.lap("offload")
        return self._in_order(parts, plan), watch.seconds

    @staticmethod
    def _in_order(parts: Sequence[Sequence[Ragged]], plan: Sequence[Sequence[int]]) -> list[Ragged]:
        if not parts:
            return []
        order = torch.tensor([i for members in plan for i in members])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        joined = [concat_ragged(column) for column in zip(*parts, strict=True)]
        return [DataProto({"x": column}).rows(back).ragged("x") for column in joined]

    # -- training -----------------------------------------------------------------------------------------------

    def update(self, batch: DataProto, steps: Sequence[Sequence[int]], loss: Loss) -> dict[str, float]:
        """Take one optimizer step for each entry of `steps` (rows of this rank's part of a mini-batch).

        Returns metrics that are equal on all ranks, apart from `timing_s/*`.
        """
        assert self.stepper is not None, "this module is frozen"
        watch = Stopwatch()
        with self.offload.loaded(optimizer=True):
            watch.lap("offload")
            merged = reduce_metrics([self._mini_batch(batch, members, loss, watch) for members in steps])
        watch.lap("offload")
        merged["skipped_steps"] = float(self.skipped_steps)
        merged["skipped_in_a_row"] = float(self.skipped_in_a_row)
        merged |= _device_memory(self._device)
        return merged | {f"{_SECONDS}{stage}": seconds for stage, seconds in watch.seconds.items()}

    def _mini_batch(self, batch: DataProto, members: Sequence[int], loss: Loss, watch: Stopwatch) -> dict[str, float]:
        rows = batch.rows(list(members))
        totals = self._global_counts(loss.counts(rows))
        outputs: list[LossOutput] = []
        # FSDP averages gradients over all ranks, and their sum is wanted: the loss is a share of the global one. That
        # holds for ranks that share a sequence, too. Each computes its rows' whole loss, but a backward pass starts
        # from the results of the rank's own tokens only (`SequenceGroup.join`), so that the ranks' gradients add up to
        # that of one loss; a vision tower, run whole on each of them, gets the gradient of their visual tokens.
        scale = float(dist.get_world_size())
        for part in self._plan(rows, self.limits):
            micro = rows.rows(part) if part else dummy_batch(rows, self.packer.needs_positions)
            packed = self.packer.pack(micro, self._device)
            watch.lap("data")
            with self._saved():
                output = loss(self.module, packed, micro, totals)
            watch.lap("forward")
            (output.loss * (scale if part else 0.0)).backward()
            watch.lap("backward")
            if part:
                outputs.append(output)
        grad_norm, lr = self._step()
        watch.lap("optimizer")
        sums, maxima = self._global_metrics(outputs)
        watch.lap("metrics")
        return loss.metrics(sums, maxima, totals) | {"grad_norm": grad_norm, "lr": lr}

    def _step(self) -> tuple[float, float]:
        """Clip and step, or skip on all ranks alike when the gradient is not finite. Returns gradient norm and rate."""
        assert self.stepper is not None
        optimizer = self.stepper.optimizer
        factor = self.stepper.schedule(self.steps_taken)
        for group, base in zip(optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * factor
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        total = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if math.isfinite(float(total)):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.stepper.grad_clip, total)
            optimizer.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
        optimizer.zero_grad(set_to_none=True)
        self.steps_taken += 1
        return float(total), self._base_lrs[0] * factor

    # -- plans and reductions -----------------------------------------------------------------------------------

    def _plan(self, batch: DataProto, limits: BatchLimits) -> list[list[int]]:
        """Cut rows into micro-batches; all ranks get the same number, empty lists fill up.

        Rows that share a prompt are neighbours. Under a token budget they are in one micro-batch as far as they fit in,
        and their prompt counts once.
        """
        lengths: list[int] = batch.ragged(INPUT_IDS).lengths.tolist() if len(batch) else []
        prompts = self.packer.prompts(batch) if lengths and self.packer.share_prompts else None
        if lengths and GROUP in batch:
            units = units_of(batch.dense(GROUP).tolist())
        elif prompts is not None and limits.rows is None:
            units = prompt_units(lengths, prompts, limits.max_tokens)
        elif prompts is not None:
            units = [[row] for unit in units_of([prompt.number for prompt in prompts]) for row in unit]
        else:
            units = [[row] for row in range(len(lengths))]
        tokens = unit_sums(units, lengths, prompts)
        if limits.rows is not None:
            plan = in_order([len(unit) for unit in units], limits.rows)
        else:
            plan = micro_batches(tokens, limits.max_tokens)
        count = self._global_max(max(1, len(plan)))
        if len(plan) < count and limits.rows is None:
            plan = micro_batches(tokens, limits.max_tokens, at_least=count)
        plan += [[] for _ in range(count - len(plan))]
        return rows_of(units, plan)

    def _global_max(self, value: int) -> int:
        tensor = torch.tensor([value], device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def _global_counts(self, local: Counts) -> Counts:
        tensor = torch.tensor([local.tokens, local.sequences], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, group=self._data_ranks)
        tokens, sequences = tensor.tolist()
        return Counts(int(tokens), int(sequences))

    def _global_metrics(self, outputs: Sequence[LossOutput]) -> tuple[dict[str, float], dict[str, float]]:
        """Reduce the sums and maxima over micro-batches and ranks. All ranks use the same loss, so the same names."""
        names = self._agree_names(outputs)
        sums = torch.zeros(len(names[0]), dtype=torch.float64, device=self._device)
        maxima = torch.full((len(names[1]),), -math.inf, dtype=torch.float64, device=self._device)
        for output in outputs:
            sums += torch.stack([output.sums[name].double() for name in names[0]]) if names[0] else 0
            if names[1]:
                maxima = torch.maximum(maxima, torch.stack([output.maxima[name].double() for name in names[1]]))
        dist.all_reduce(sums, group=self._data_ranks)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._data_ranks)
        return dict(zip(names[0], sums.tolist(), strict=True)), dict(zip(names[1], maxima.tolist(), strict=True))

    def _agree_names(self, outputs: Sequence[LossOutput]) -> tuple[list[str], list[str]]:
        # A rank whose whole share was empty learns the names from the others.
        mine = (sorted(outputs[0].sums), sorted(outputs[0].maxima)) if outputs else None
        everyone: list[tuple[list[str], list[str]] | None] = [None] * dist.get_world_size(self._data_ranks)
        dist.all_gather_object(everyone, mine, group=self._data_ranks)
        return next((names for names in everyone if names is not None), ([], []))


def under_role(metrics: Mapping[str, float], role: str) -> dict[str, float]:
    """Put the learner's own metrics under a role's name, and its seconds under that of the role's update."""
    out: dict[str, float] = {}
    for name, value in metrics.items():
        stage = name.removeprefix(_SECONDS)
        if stage != name:
            out[f"{_SECONDS}update_{role}/{stage}"] = value
        else:
            out[name if "/" in name else f"{role}/{name}"] = value
    return out


def timed(call: str, seconds: Mapping[str, float]) -> Meta:
    """Return the meta of a result: the seconds of its stages, under the name of the trainer's call."""
    return Meta(timing={f"{call}/{stage}": value for stage, value in seconds.items()})


def _device_memory(device: torch.device) -> dict[str, float]:
    """Return the peak of torch's own memory on a GPU since the last call, in GiB; the engine's is not part of it."""
    if device.type != "cuda":
        return {}
    found = {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 2**30,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return found
