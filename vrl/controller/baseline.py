"""The baseline of ReMax (arXiv 2310.10505): the score of one greedy episode a prompt. A role of the training loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, final

import torch

from vrl.controller.credit import Shaping, shaped_row_sums
from vrl.controller.roles import Generated, Rollout
from vrl.protocol.columns import GREEDY_SAMPLE, REWARD_BASELINES, SAMPLE_INDEX, UID
from vrl.protocol.dataproto import DataProto, concat
from vrl.protocol.trajectory import Prompt, Sampling


class Baseline(Protocol):
    """Adds what the scores of a step are compared with, as far as that has to be generated."""

    def beside(self, generated: Generated, prompts: Sequence[Prompt], step: int) -> Generated:
        """Return what was generated, with column `reward_baselines` where the estimator needs it.

        The engines must be awake and hold the weights that sampled the rows.
        """
        ...


@final
class NoBaseline:
    """For estimators that find their baseline in the rows themselves, or in a critic."""

    def beside(self, generated: Generated, prompts: Sequence[Prompt], step: int) -> Generated:  # noqa: ARG002  (part of the interface)
        """Return what was generated, as it is."""
        return generated


@final
class GreedyBaseline:
    """One greedy episode a prompt, scored and shaped as the others are."""

    def __init__(self, rollout: Rollout, sampling: Sampling, shaping: Sequence[Shaping]) -> None:
        self._rollout = rollout
        self._shaping = tuple(shaping)
        self._sampling = replace(sampling, temperature=0.0, n=1)

    def beside(self, generated: Generated, prompts: Sequence[Prompt], step: int) -> Generated:
        """Run the greedy episodes of all prompts that have a usable row; see `with_baselines`."""
        sampled = set(generated.rows.objects[UID])
        asked = [prompt for prompt in prompts if prompt.uid in sampled]
        if not asked:
            return generated
        greedy = self._rollout.generate(asked, self._sampling, step)
        return with_baselines(generated, greedy, self._shaping)


def with_baselines(generated: Generated, greedy: Generated, shaping: Sequence[Shaping] = ()) -> Generated:
    """Return the rows with the reward of their prompt's greedy episode in column `reward_baselines`.

    That is its score after the same reward shaping as that of the rows: rewards are compared with their like.

    Where that episode failed outside the model, the prompt's rows are left out, and the failed episode joins the failed
    ones (its `sample_index` is -1). A baseline of 0 in its place would be unbiased as well, but it gives these rows the
    variance of plain REINFORCE, in a batch whose other rows have less: with scores of 0 and 1 all that such a prompt
    can do is to push its successes up. Whether the greedy episode fails does not depend on the samples, so that what
    is left out adds no bias for any prompt that stays.
    """
    scores = shaped_row_sums(greedy.rows, shaping).tolist() if len(greedy.rows) else []
    baseline = dict(zip(greedy.rows.objects[UID], scores, strict=True)) if scores else {}
    has_one = [uid in baseline for uid in generated.rows.objects[UID]]
    rows = generated.rows.rows(torch.tensor(has_one, dtype=torch.bool))
    column = torch.tensor([baseline[uid] for uid in rows.objects[UID]], dtype=torch.float32)
    rows = rows.with_columns(**{REWARD_BASELINES: column})
    return replace(generated, rows=rows, failed=_joined(generated.failed, greedy.failed))


def _joined(failed: DataProto, greedy: DataProto) -> DataProto:
    if not len(greedy):
        return failed
    marks = torch.full((len(greedy),), GREEDY_SAMPLE, dtype=torch.int64)
    return concat([failed, greedy.with_columns(**{SAMPLE_INDEX: marks})])
