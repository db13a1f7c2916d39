"""Evaluation on the held-out rows: exactly those rows, sampled as `rollout.val_kwargs` says, and greedily beside it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from vrl.controller.data_metrics import row_sums
from vrl.controller.roles import Generated, NoRewardModel, Rollout, Scores
from vrl.controller.rollout_files import RolloutFiles
from vrl.controller.tracking import Sample
from vrl.controller.validation_metrics import validation_metrics
from vrl.protocol.columns import DATA_SOURCE, PROMPT_TEXT, RESPONSE_TEXT, SCORE_EXTRA, TOKEN_LEVEL_SCORES, UID
from vrl.protocol.errors import RewardError
from vrl.protocol.trajectory import Prompt, Sampling


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out prompts and how they are sampled. Without prompts it does nothing."""

    prompts: Sequence[Prompt]
    sampling: Sampling
    greedy_beside: bool
    files: RolloutFiles
    show: Callable[[Sequence[Sample], int], None]  # some of the episodes, with the step
    reward: Scores = field(default_factory=NoRewardModel)

    def run(self, rollout: Rollout, step: int) -> dict[str, float]:
        """Return `val-core/*`, `val-aux/*` and the seconds it took.

        Raises RewardError when no episode has a score.
        """
        if not self.prompts:
            return {}
        begin = time.perf_counter()
        # The step is left out of the seeds: the same weights give the same answers whenever they are asked.
        generated = self.reward.score(rollout.generate(self.prompts, self.sampling, 0))
        self.files.write(generated, step)
        check_scored(generated)
        self.show(_samples(generated), step)
        metrics = _metrics(generated)
        if self.greedy_beside and not self.sampling.greedy:
            sampling = replace(self.sampling, temperature=0.0, n=1)
            greedy = self.reward.score(rollout.generate(self.prompts, sampling, 0))
            metrics |= {
                _greedy_name(name): value for name, value in _metrics(greedy).items() if name.endswith("mean@1")
            }
        metrics["training/failed_val_rows"] = float(len(generated.failed))
        metrics["timing_s/testing"] = time.perf_counter() - begin
        return metrics


def check_scored(generated: Generated) -> None:
    """Raise RewardError when there were episodes, and all of them failed: without a score nothing was evaluated."""
    if len(generated.failed) and not len(generated.rows):
        raise RewardError(
            f"all {len(generated.failed)} episodes of the evaluation failed outside the model; the first: "
            f"{generated.failed.objects[SCORE_EXTRA][0].get('failure')}"
        )


def _samples(generated: Generated) -> list[Sample]:
    rows = generated.rows
    if not len(rows):
        return []
    texts = zip(rows.objects[PROMPT_TEXT], rows.objects[RESPONSE_TEXT], strict=True)
    scores = row_sums(rows, TOKEN_LEVEL_SCORES).tolist()
    return [Sample(prompt=prompt, response=text, score=x) for (prompt, text), x in zip(texts, scores, strict=True)]


def _metrics(generated: Generated) -> dict[str, float]:
    """Failed episodes keep their place among the samples of their prompt, without a score."""
    parts = [(rows, scored) for rows, scored in ((generated.rows, True), (generated.failed, False)) if len(rows)]
    scores: list[float | None] = []
    for rows, scored in parts:
        scores += [float(row.sum()) if scored else None for row in rows.ragged(TOKEN_LEVEL_SCORES).to_rows()]
    return validation_metrics(
        data_sources=[source for rows, _ in parts for source in rows.objects[DATA_SOURCE]],
        uids=[uid for rows, _ in parts for uid in rows.objects[UID]],
        scores=scores,
        extras=[extra for rows, _ in parts for extra in rows.objects[SCORE_EXTRA]],
    )


def _greedy_name(name: str) -> str:
    return name.removesuffix("mean@1") + "greedy"
