"""Trajectories to rows: dtypes, where the score stands, images kept once, versions of model tokens."""

from typing import Any

import pytest
import torch

from vrl.protocol.columns import (
    COLUMNS,
    GROUND_TRUTH,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    POLICY_VERSIONS,
    POSITION_IDS,
    PROMPT_LENGTH,
    ROLLOUT_LOG_PROBS,
    SAMPLE_INDEX,
    SCORE_EXTRA,
    STOP_REASON,
    TOKEN_LEVEL_SCORES,
    TURN_IDS,
    TURN_INFO,
    TURN_REWARDS,
    TURN_STATES,
    UID,
)
from vrl.protocol.dataproto import DataProto, Meta
from vrl.protocol.rows import batch_of, group_numbers, group_prompts
from vrl.protocol.trajectory import Prompt, StopReason, Trajectory, content_key

PNG, JPG = b"\x89PNG", b"\xff\xd8"
ROLLOUT_COLUMNS = {name for name, spec in COLUMNS.items() if spec.writer == "rollout.generate"}


def trajectory(mask: tuple[int, ...], **changes: Any) -> Trajectory:
    """Return an episode whose sampled tokens are given by the mask."""
    turns, turn = [], -1
    for k, sampled in enumerate(mask):
        turn += sampled and (k == 0 or not mask[k - 1])
        turns.append(turn if sampled else -1)
    fields: dict[str, Any] = {
        "prompt": Prompt(row_id="7", uid="draw", messages=[], data_source="sums", ground_truth={"style": "rule"}),
        "sample_index": 0,
        "input_ids": tuple(range(100, 100 + len(mask))),
        "loss_mask": mask,
        "rollout_log_probs": tuple(-0.5 * m for m in mask),
        "turn_ids": tuple(turns),
        "policy_versions": tuple(4 if m else -1 for m in mask),
        "prompt_length": 1,
        "stop_reason": StopReason.ANSWER,
        "prompt_text": "?",
        "response_text": "!",
        "score": 2.5,
    }
    return Trajectory(**(fields | changes))


def rows_of(batch: DataProto, name: str) -> list[list[Any]]:
    return [row.tolist() for row in batch.ragged(name).to_rows()]


def test_one_row_a_trajectory_with_declared_columns() -> None:
    trajectories = [trajectory((0, 1, 1)), trajectory((0, 0, 1, 0, 1, 0), sample_index=1, prompt_length=2)]
    batch = batch_of(trajectories, None, Meta(global_step=3, policy_version=4))
    assert batch.names() == ROLLOUT_COLUMNS - {POSITION_IDS}
    assert (len(batch), batch.meta.policy_version) == (2, 4)
    assert rows_of(batch, INPUT_IDS) == [[100, 101, 102], [100, 101, 102, 103, 104, 105]]
    assert rows_of(batch, LOSS_MASK) == [[False, True, True], [False, False, True, False, True, False]]
    assert rows_of(batch, ROLLOUT_LOG_PROBS) == [[0, -0.5, -0.5], [0, 0, -0.5, 0, -0.5, 0]]
    assert rows_of(batch, TURN_IDS) == [[-1, 0, 0], [-1, -1, 0, -1, 1, -1]]
    assert batch.dense(PROMPT_LENGTH).tolist() == [1, 2]
    assert batch.dense(SAMPLE_INDEX).tolist() == [0, 1]
    assert batch.objects[UID].tolist() == ["draw", "draw"]
    assert batch.objects[GROUND_TRUTH].tolist() == [{"style": "rule"}] * 2
    assert batch.objects[STOP_REASON].tolist() == [StopReason.ANSWER] * 2


def test_the_score_stands_on_the_last_sampled_token() -> None:
    masks = [(0, 1, 1), (0, 1, 0, 1, 0), (0, 1, 0, 0), (0, 0), (1,)]
    batch = batch_of([trajectory(mask) for mask in masks], None, Meta())
    assert rows_of(batch, TOKEN_LEVEL_SCORES) == [[0, 0, 2.5], [0, 0, 0, 2.5, 0], [0, 2.5, 0, 0], [0, 0], [2.5]]


def test_rewards_of_turns_stand_where_their_turns_end() -> None:
    row = trajectory((0, 1, 1, 0, 1, 0, 0, 1, 1), turn_rewards=(0.5, 0.0, -1.0), turn_info=({"calls": 1}, {}, {}))
    batch = batch_of([row, trajectory((0, 1))], None, Meta())
    assert rows_of(batch, TOKEN_LEVEL_SCORES) == [[0, 0, 0.5, 0, 0, 0, 0, 0, 1.5], [0, 2.5]]
    assert batch.objects[TURN_REWARDS].tolist() == [(0.5, 0.0, -1.0), ()]
    assert batch.objects[TURN_INFO][0][0] == {"calls": 1}


def test_versions_of_a_sample_are_those_of_model_tokens() -> None:
    row = trajectory((0, 0, 1, 1, 0, 1), policy_versions=(-1, -1, 4, 4, -1, 5))
    batch = batch_of([trajectory((0, 1)), row], None, Meta()).rows([1])
    versions = batch.ragged(POLICY_VERSIONS).row(0)[batch.ragged(LOSS_MASK).row(0)]
    assert (int(versions[0]), int(versions[-1])) == (4, 5)
    assert rows_of(batch, POLICY_VERSIONS) == [[-1, -1, 4, 4, -1, 5]]


def test_samples_of_a_prompt_share_its_images_and_keep_their_own() -> None:
    rows = [
        trajectory((0, 1), images=(PNG,)),
        trajectory((0, 1), images=(PNG, JPG, PNG), sample_index=1),
        trajectory((0, 1), sample_index=2),
    ]
    batch = batch_of(rows, None, Meta())
    assert dict(batch.blobs) == {content_key(PNG): PNG, content_key(JPG): JPG}
    assert [[batch.blobs[key] for key in keys] for keys in batch.objects[IMAGE_KEYS]] == [[PNG], [PNG, JPG, PNG], []]


def test_positions_follow_the_rows() -> None:
    rows = [trajectory((0, 1)), trajectory((0, 1, 1))]
    positions = [torch.arange(6).reshape(2, 3), torch.arange(9).reshape(3, 3)]
    batch = batch_of(rows, positions, Meta())
    assert rows_of(batch, POSITION_IDS) == [p.tolist() for p in positions]
    for wrong in (positions[:1], [torch.zeros(3, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)]):
        with pytest.raises(ValueError, match="position"):
            batch_of(rows, wrong, Meta())


def test_a_failure_is_recorded_beside_the_parts_of_the_score() -> None:
    extra = {"format": 1.0}
    rows = [
        trajectory((0, 1), score_extra=extra),
        trajectory((0,), stop_reason=StopReason.FAILED, failure="Timeout", score=0.0),
    ]
    batch = batch_of(rows, None, Meta())
    assert batch.objects[SCORE_EXTRA].tolist() == [{"format": 1.0}, {"failure": "Timeout"}]
    assert batch.objects[STOP_REASON].tolist() == ["answer", "failed"]
    assert extra == {"format": 1.0}


@pytest.mark.parametrize("positions", [None, []])
def test_no_trajectory_gives_a_batch_of_no_rows_with_all_columns(positions: list[torch.Tensor] | None) -> None:
    batch = batch_of([], positions, Meta())
    assert len(batch) == 0
    assert batch.names() == ROLLOUT_COLUMNS - ({POSITION_IDS} if positions is None else set())


def states_of(*trajectories: Trajectory) -> list[tuple[str, ...]]:
    return batch_of(trajectories, None, Meta()).objects[TURN_STATES].tolist()


def test_turns_answer_the_same_state_when_they_saw_the_same_tokens() -> None:
    mask = (0, 0, 1, 0, 1, 1, 0, 0, 1)
    base = trajectory(mask, input_ids=(1, 2, 30, 4, 50, 51, 6, 7, 80), prompt_length=2)
    other = trajectory(mask, input_ids=(1, 2, 31, 4, 52, 53, 6, 8, 80), prompt_length=2)
    longer = trajectory((0, 0, 1, 1, 0, 0, 1, 0, 1), input_ids=(1, 2, 30, 33, 6, 7, 50, 4, 9), prompt_length=2)
    one, two, three = states_of(base, other, longer)
    assert len({*one}) == 3
    assert two[:2] == one[:2]  # what the model answered is no part of the state
    assert two[2] != one[2]
    assert three == (one[0], one[2], one[1])  # wherever the turn stands in its episode
    (given,) = states_of(trajectory(mask, turn_states=("a", "b", "a")))
    assert given == ("a", "b", "a")
    assert states_of(trajectory((0, 0))) == [()]


def test_images_tell_states_apart() -> None:
    def seen(prompt_image: bytes, *later: bytes) -> tuple[str, ...]:
        prompt = Prompt(row_id="7", uid="draw", messages=[], images=(prompt_image,))
        return states_of(trajectory((0, 1, 0, 1), prompt=prompt, images=(prompt_image, *later)))[0]

    assert seen(PNG, JPG) == seen(PNG, JPG)
    assert seen(PNG, JPG)[0] != seen(JPG, JPG)[0]
    assert seen(PNG, JPG)[0] == seen(PNG, PNG)[0]
    assert seen(PNG, JPG)[1] != seen(PNG, PNG)[1]


def test_groups_are_numbered_by_first_appearance() -> None:
    prompts = [Prompt(row_id="7", uid=uid, messages=[]) for uid in "bab"]
    batch = batch_of([trajectory((0, 1), prompt=prompt) for prompt in prompts], None, Meta())
    assert group_numbers(batch).tolist() == [0, 1, 0]


def test_rows_of_a_draw_begin_alike_where_their_prompts_are_equally_long() -> None:
    lengths = [("a", 2), ("b", 2), ("a", 2), ("a", 3)]
    rows = [
        trajectory((0, 0, 0, 1), prompt=Prompt(row_id="7", uid=uid, messages=[]), prompt_length=n) for uid, n in lengths
    ]
    assert group_prompts(batch_of(rows, None, Meta())) == [(0, 2), (1, 2), (0, 2), (2, 3)]
