"""Trajectories to rows of a batch. Called by the rollout worker when its episodes have ended."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vrl.protocol.balance import RowPrompt
from vrl.protocol.columns import (
    DATA_SOURCE,
    GROUND_TRUTH,
    IMAGE_KEYS,
    INPUT_IDS,
    LOSS_MASK,
    MESSAGES,
    POLICY_VERSIONS,
    POSITION_IDS,
    PROMPT_LENGTH,
    PROMPT_TEXT,
    RESPONSE_TEXT,
    RETRIES,
    ROLLOUT_LOG_PROBS,
    ROW_ID,
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
from vrl.protocol.dataproto import DataProto, Meta, object_column
from vrl.protocol.ragged import Ragged, as_array, offsets_of
from vrl.protocol.trajectory import Trajectory, content_key


def batch_of(trajectories: Sequence[Trajectory], positions: Sequence[Tensor] | None, meta: Meta) -> DataProto:
    """Return one row a trajectory.

    `positions` holds the `[T, 3]` positions of each row for models that need them. A turn's reward stands on its last
    sampled token, the score on that of the row, where they add up; a row without one gets none.
    """
    keys = {image: content_key(image) for image in dict.fromkeys(image for t in trajectories for image in t.images)}
    columns: dict[str, Tensor | Ragged] = {
        INPUT_IDS: Ragged.from_rows([t.input_ids for t in trajectories], torch.int64),
        LOSS_MASK: Ragged.from_rows([t.loss_mask for t in trajectories], torch.bool),
        ROLLOUT_LOG_PROBS: Ragged.from_rows([t.rollout_log_probs for t in trajectories], torch.float32),
        TURN_IDS: Ragged.from_rows([t.turn_ids for t in trajectories], torch.int32),
        POLICY_VERSIONS: Ragged.from_rows([t.policy_versions for t in trajectories], torch.int32),
        TOKEN_LEVEL_SCORES: Ragged.from_rows([_score_row(t) for t in trajectories], torch.float32),
        PROMPT_LENGTH: torch.tensor([t.prompt_length for t in trajectories], dtype=torch.int64),
        SAMPLE_INDEX: torch.tensor([t.sample_index for t in trajectories], dtype=torch.int64),
        RETRIES: torch.tensor([t.retries for t in trajectories], dtype=torch.int64),
    }
    if positions is not None:
        columns[POSITION_IDS] = _positions(trajectories, positions)
    objects = {
        UID: object_column(t.prompt.uid for t in trajectories),
        ROW_ID: object_column(t.prompt.row_id for t in trajectories),
        DATA_SOURCE: object_column(t.prompt.data_source for t in trajectories),
        GROUND_TRUTH: object_column(t.prompt.ground_truth for t in trajectories),
        STOP_REASON: object_column(str(t.stop_reason) for t in trajectories),
        IMAGE_KEYS: object_column(tuple(keys[image] for image in t.images) for t in trajectories),
        MESSAGES: object_column(t.prompt.messages for t in trajectories),
        PROMPT_TEXT: object_column(t.prompt_text for t in trajectories),
        RESPONSE_TEXT: object_column(t.response_text for t in trajectories),
        TURN_REWARDS: object_column(t.turn_rewards for t in trajectories),
        TURN_INFO: object_column(t.turn_info for t in trajectories),
        SCORE_EXTRA: object_column(dict(t.score_extra) | _failure(t) for t in trajectories),
        TURN_STATES: object_column(t.turn_states or seen_by_turns(t) for t in trajectories),
    }
    return DataProto(columns, objects, {key: image for image, key in keys.items()}, meta)


def _positions(trajectories: Sequence[Trajectory], positions: Sequence[Tensor]) -> Ragged:
    lengths = [len(t.input_ids) for t in trajectories]
    if [len(p) for p in positions] != lengths:
        raise ValueError(f"rows have {lengths} tokens, but their positions are {[len(p) for p in positions]} long")
    flat = torch.cat([torch.zeros(0, 3, dtype=torch.int64), *positions])
    return Ragged(flat, offsets_of(torch.tensor(lengths, dtype=torch.int64)))


def _score_row(trajectory: Trajectory) -> list[float]:
    row = [0.0] * len(trajectory.input_ids)
    if trajectory.num_sampled:
        row[_last(trajectory.loss_mask, 1)] = trajectory.score
    for turn, reward in enumerate(trajectory.turn_rewards):
        row[_last(trajectory.turn_ids, turn)] += reward
    return row


def _last(values: Sequence[int], value: int) -> int:
    """Return the last place of a value, counted from the end."""
    return -1 - values[::-1].index(value)


def seen_by_turns(trajectory: Trajectory) -> tuple[str, ...]:
    """Return for each turn a hash of what the model saw since the one before: the prompt first, then observations.

    By token ids, and for the prompt by its images. Which image belongs to which observation, ids do not say: the later
    images of a row count in each of its later turns, so that turns never look equal when they are not.
    """
    first = len(trajectory.prompt.images)
    states: list[str] = []
    seen_to = 0
    for at, turn in enumerate(trajectory.turn_ids):
        if turn < 0:
            continue
        if turn >= len(states):
            states += [""] * (turn - len(states))  # turns without a sampled token answer nothing
            images = trajectory.images[first:] if seen_to else trajectory.images[:first]
            ids = ",".join(map(str, trajectory.input_ids[seen_to:at]))
            states.append(content_key("/".join([ids, *map(content_key, images)]).encode()))
        seen_to = at + 1
    return tuple(states)


def group_numbers(batch: DataProto) -> Tensor:
    """Return int64 `[B]`: the number of each row's group (uid), in the order in which groups first appear."""
    number = {uid: i for i, uid in enumerate(dict.fromkeys(batch.objects[UID]))}
    return torch.tensor([number[uid] for uid in batch.objects[UID]], dtype=torch.int64)


def group_prompts(batch: DataProto) -> list[RowPrompt]:
    """Return how each row begins, as its group says: rows of a draw with prompts of equal length have the same one."""
    begins = list(zip(batch.objects[UID], map(int, as_array(batch.dense(PROMPT_LENGTH))), strict=True))
    number = {begin: i for i, begin in enumerate(dict.fromkeys(begins))}
    return [RowPrompt(number[begin], begin[1]) for begin in begins]


def _failure(trajectory: Trajectory) -> dict[str, str]:
    return {"failure": trajectory.failure} if trajectory.failure else {}
