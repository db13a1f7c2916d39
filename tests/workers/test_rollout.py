"""Rows of a replica: their columns are those of the model, whatever became of its episodes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.rig import config_of, context_of, png
from vrl.agent.episode import failed_row
from vrl.protocol.columns import INPUT_IDS, POSITION_IDS
from vrl.protocol.dataproto import DataProto, Meta, concat
from vrl.protocol.trajectory import Prompt, StopReason, Trajectory
from vrl.workers.rollout import rows_of

IMAGE = png(60, 90, 1)
SHOWN = Prompt(row_id="7", uid="draw", messages=[{"role": "user", "content": "what is <image>"}], images=(IMAGE,))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_5_vl"])
def test_a_replica_whose_episodes_all_failed_gives_the_columns_of_the_others(
    kind: str, tiny_folder: Callable[[str], Path]
) -> None:
    context = context_of(config_of(tiny_folder(kind)))
    images = SHOWN.images if kind == "qwen2_5_vl" else ()
    before = context.renderer.expand(context.renderer.render(SHOWN.messages), images)
    mask = (*[0] * len(before), 1, 1)
    answered = Trajectory(
        prompt=SHOWN,
        sample_index=0,
        input_ids=(*before, 40, 41),
        loss_mask=mask,
        rollout_log_probs=tuple(-0.5 * bit for bit in mask),
        turn_ids=tuple(bit - 1 for bit in mask),
        policy_versions=tuple(bit - 1 for bit in mask),
        prompt_length=len(before),
        stop_reason=StopReason.ANSWER,
        prompt_text="",
        response_text="",
        images=images,
    )
    failed = failed_row(SHOWN, 1, "tool timed out")

    def replica(*trajectories: Trajectory) -> DataProto:
        needed = context.images is not None
        return rows_of(trajectories, context.renderer, Meta(), needs_positions=needed)

    batch = concat([replica(failed, failed), replica(), replica(answered, failed)])
    assert batch.ragged(INPUT_IDS).lengths.tolist() == [1, 1, len(mask), 1]
    assert (POSITION_IDS in batch) == (kind == "qwen2_5_vl")
    if kind == "qwen2_5_vl":
        rows = batch.ragged(POSITION_IDS).to_rows()
        assert [len(row) for row in rows] == [1, 1, len(mask), 1]
        assert rows[2].tolist() == context.renderer.positions(answered.input_ids, images).tolist()
        assert not rows[0].any()
