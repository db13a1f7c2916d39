"""Groups that teach nothing are left out; with DAPO's dynamic sampling (arXiv 2503.14476) more prompts are drawn.

A group whose samples all have the same reward has advantage 0. The trainer applies `Groups` after each generation,
while the engines hold the weights that sampled the rows.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import torch
from torch import Tensor

from vrl.controller.credit import Shaping, reward_shaping, shaped_row_sums
from vrl.controller.data_metrics import row_sums
from vrl.controller.roles import Generated
from vrl.controller.score_parts import score_parts
from vrl.protocol.columns import SCORE_EXTRA, TOKEN_LEVEL_SCORES, UID
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto, concat
from vrl.protocol.metrics import as_number
from vrl.protocol.trajectory import Prompt, Sampling

_LOG = logging.getLogger(__name__)

Metric = Callable[[DataProto], Tensor]  # rows -> a number for each, float64 [B]


class Groups(Protocol):
    """Decides which groups of what was generated are trained on, and whether more are needed."""

    def complete(
        self, generated: Generated, prompts: Sequence[Prompt], step: int
    ) -> tuple[Generated, Sequence[Prompt]]:
        """Return what to train on, with the prompts it came from. The engines must be awake."""
        ...


@final
class AllGroups:
    """Every group is trained on."""

    def complete(
        self,
        generated: Generated,
        prompts: Sequence[Prompt],
        step: int,  # noqa: ARG002  (part of the interface)
    ) -> tuple[Generated, Sequence[Prompt]]:
        """Return both as they are."""
        return generated, prompts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBounds:
    """How many groups a step wants, with how few it is content, and how often it draws prompts for them."""

    wanted: int
    at_least: int
    draws: int


@final
class DifferingGroups:
    """Only groups are trained on whose samples differ in `metric`; prompts are drawn until enough of them are there.

    Kept are the first `wanted` ones in the order of prompts: an order of finishing would favour short answers. What is
    left over is dropped, as in verl. It could not wait for the next step: new weights will have come by then, so that
    its samples would be of an older policy than the loss takes them for; and a checkpoint would have to hold them.

    When the draws are used up, the step trains on what is there, with a warning, if that fills one mini-batch, else on
    nothing. A draw without a usable row ends the drawing: something other than the groups is wrong then. The draws move
    the loader on, so a run of so many epochs' worth of steps goes through its rows more often.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[Prompt], Sampling, int], Generated],
        sampling: Sampling,
        next_prompts: Callable[[], Sequence[Prompt]],
        metric: Metric,
        bounds: GroupBounds,
    ) -> None:
        self._generate = generate
        self._sampling = sampling
        self._next_prompts = next_prompts
        self._metric = metric
        self._bounds = bounds

    def complete(
        self, generated: Generated, prompts: Sequence[Prompt], step: int
    ) -> tuple[Generated, Sequence[Prompt]]:
        """Draw and generate more as long as groups are missing; return kept, dropped and failed rows of all draws."""
        draws, all_prompts = [generated], list(prompts)
        differing = _differing(generated.rows, self._metric)
        while len(differing) < self._bounds.wanted and len(draws) < self._bounds.draws and len(draws[-1].rows):
            more = self._next_prompts()
            draws.append(self._generate(more, self._sampling, step))
            all_prompts += more
            differing |= _differing(draws[-1].rows, self._metric)
        kept = [prompt.uid for prompt in all_prompts if prompt.uid in differing][: self._bounds.wanted]
        if len(kept) < self._bounds.wanted:
            kept = self._short(kept, len(draws), step)
        return _joined(draws, set(kept), len(differing), self._metric), all_prompts

    def _short(self, kept: list[str], draws: int, step: int) -> list[str]:
        enough = len(kept) >= self._bounds.at_least
        outcome = "the step trains on these" if enough else "too few for a mini-batch: the step trains on nothing"
        _LOG.warning(
            "step %d: after %d draws of prompts %d groups of %d differ in their reward; %s (see "
            "algorithm.filter_groups.max_num_gen_batches and data.gen_batch_size)",
            step, draws, len(kept), self._bounds.wanted, outcome,
        )  # fmt: skip
        return kept if enough else []


@final
class ZeroVarianceFilter:
    """Only groups are trained on whose samples differ in `metric`, however few; no further prompts are drawn for them.

    A step then costs what teaches: the rows left out are generated and scored, but have no log-probs and no update. It
    is another update than that of all rows, whose advantages there are 0:

    - what divides by tokens or rows (token-mean) divides by those left, so that a step is larger by as much;
    - what does not vanish with the advantage (entropy bonus, KL loss, the penalties of dro and kl_cov) is taken over
      those left; so are metrics such as `critic/score/mean` and `response_length/mean`;
    - mini-batches still hold `ppo_mini_batch_size` groups: there are fewer of them, and schedules go on more slowly.

    A row whose group's other episodes failed has nothing to differ from, and is left out too. When no group differs the
    step trains on nothing, with a warning, and the run goes on; `trainer.max_steps_without_samples` of them in a row
    end it.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def complete(
        self, generated: Generated, prompts: Sequence[Prompt], step: int
    ) -> tuple[Generated, Sequence[Prompt]]:
        """Return kept, dropped and failed rows of what was generated, and the prompts as they are."""
        kept = _differing(generated.rows, self._metric)
        if len(generated.rows) and not kept:
            _LOG.warning("step %d: no group differs in its reward; the step trains on nothing", step)
        return _joined([generated], kept, len(kept), self._metric), prompts


def _differing(rows: DataProto, metric: Metric) -> set[str]:
    """Return the groups that differ: exactly, as a standard deviation of equal numbers may round to more than 0."""
    if not len(rows):
        return set()
    values: dict[str, set[float]] = {}
    for uid, value in zip(rows.objects[UID], metric(rows).tolist(), strict=True):
        values.setdefault(uid, set()).add(value)
    return {uid for uid, found in values.items() if len(found) > 1}


def _joined(draws: Sequence[Generated], kept: Collection[str], differing: int, metric: Metric) -> Generated:
    rows = concat([draw.rows for draw in draws])
    chosen = torch.tensor([uid in kept for uid in rows.objects[UID]], dtype=torch.bool)
    groups = len(set(rows.objects[UID]))
    values = metric(rows) if len(rows) else torch.zeros(0)
    metrics = {
        "train/num_gen_batches": float(len(draws)),
        "training/groups_generated": float(groups),
        "training/groups_kept": float(len(kept)),
        "training/groups_dropped_equal": float(groups - differing),
        "training/groups_dropped_surplus": float(differing - len(kept)),
        "training/rows_dropped": float((~chosen).sum()),
        **({"training/filter_metric_of_all_rows/mean": float(values.mean())} if len(rows) else {}),
    }
    stages = dict.fromkeys(name for draw in draws for name in draw.timing)
    return Generated(
        rows=rows.rows(chosen),
        failed=concat([draw.failed for draw in draws]),
        policy_version=draws[0].policy_version,
        timing={name: sum(draw.timing.get(name, 0.0) for draw in draws) for name in stages},
        dropped=rows.rows(~chosen),
        metrics=metrics,
    )


def row_metric(name: str | None, shaping: Sequence[Shaping]) -> Metric:
    """Return what is compared in a group, in verl's names.

    score (and null): what the reward function gave. seq_reward and seq_final_reward: the same after reward shaping
    (overlong penalty, clipping). acc: the part `acc` of the score, the score itself where there is none. Any other
    name: that part of the score, a RewardError where a row lacks it.
    """
    if name in (None, "score"):
        return lambda rows: row_sums(rows, TOKEN_LEVEL_SCORES)
    if name in ("seq_reward", "seq_final_reward"):
        return lambda rows: shaped_row_sums(rows, shaping)
    if name == "acc":
        return _accuracy
    return lambda rows: score_parts(rows, [name], "algorithm.filter_groups.metric")[:, 0]


def _accuracy(rows: DataProto) -> Tensor:
    """Return `acc` of each row, or its score where the reward gave no such number."""
    found = [as_number(extra.get("acc")) for extra in rows.objects[SCORE_EXTRA]]
    scores = row_sums(rows, TOKEN_LEVEL_SCORES).tolist()
    values = [score if acc is None else acc for acc, score in zip(found, scores, strict=True)]
    return torch.tensor(values, dtype=torch.float64)


def group_filter(
    config: Config,
    generate: Callable[[Sequence[Prompt], Sampling, int], Generated],
    sampling: Sampling,
    next_prompts: Callable[[], Sequence[Prompt]],
) -> Groups:
    """Return the filter that `algorithm.filter_groups` or `algorithm.zero_variance_filter` asks for."""
    settings, shaping = config.algorithm.filter_groups, reward_shaping(config)
    if config.algorithm.zero_variance_filter:
        return ZeroVarianceFilter(row_metric("seq_reward", shaping))
    if not settings.enable:
        return AllGroups()
    bounds = GroupBounds(
        wanted=config.data.train_batch_size,
        at_least=config.actor_rollout_ref.actor.ppo_mini_batch_size,
        draws=settings.draws,
    )
    return DifferingGroups(generate, sampling, next_prompts, row_metric(settings.metric, shaping), bounds)


def all_rows(generated: Generated) -> Generated:
    """Return what was generated with the dropped rows among the others, for the files that people read."""
    if not len(generated.dropped):
        return generated
    kept = generated.rows.select(generated.dropped.names())
    return replace(generated, rows=concat([kept, generated.dropped]))
