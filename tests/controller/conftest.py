"""Trajectories as a rollout worker hands them over. Torch-free."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vrl.protocol.trajectory import Prompt, StopReason, Trajectory


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """Make a trajectory: `prompt` tokens, then a turn of so many sampled tokens for each entry of `turns`.

    Between two turns stands one observation token. Sampled tokens have the probability 0.5.
    """

    def make(
        uid: str = "u0",
        prompt: int = 3,
        turns: Sequence[int] = (2,),
        score: float = 0.0,
        images: Sequence[bytes] = (),
        failure: str | None = None,
        **fields: Any,
    ) -> Trajectory:
        mask, turn_ids = [0] * prompt, [-1] * prompt
        for number, length in enumerate(turns):
            between = 1 if number else 0
            mask += [0] * between + [1] * length
            turn_ids += [-1] * between + [number] * length
        return Trajectory(
            prompt=Prompt(
                row_id=f"row-{uid}",
                uid=uid,
                messages=(),
                images=tuple(images),
                data_source=fields.pop("data_source", "tiny/visual"),
                ground_truth=fields.pop("ground_truth", "red"),
            ),
            sample_index=fields.pop("sample_index", 0),
            input_ids=tuple(range(len(mask))),
            loss_mask=tuple(mask),
            rollout_log_probs=tuple(-0.6931471805599453 * bit for bit in mask),
            turn_ids=tuple(turn_ids),
            policy_versions=tuple(0 if bit else -1 for bit in mask),
            prompt_length=prompt,
            stop_reason=fields.pop("stop_reason", StopReason.FAILED if failure else StopReason.ANSWER),
            prompt_text=fields.pop("prompt_text", "What colour?"),
            response_text=fields.pop("response_text", "red"),
            images=tuple(images),
            score=score,
            failure=failure,
            **fields,
        )

    return make
