"""Every column of a batch, declared once: name, dtype, shape letters, who writes it.

Code uses the constants (`batch[LOSS_MASK]`), so that a slip is an import error and not a KeyError at step 40.
Shape letters: B rows, T packed tokens (a ragged column), E epochs.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """What a column holds."""

    name: str
    dtype: str  # a torch dtype's name, or "object"
    shape: str
    writer: str
    meaning: str


COLUMNS: dict[str, ColumnSpec] = {}


def declare(name: str, dtype: str, shape: str, writer: str, meaning: str) -> str:
    """Declare a column and return its name. Declaring a name twice is an error."""
    if name in COLUMNS:
        raise ValueError(f"column {name!r} is declared twice")
    COLUMNS[name] = ColumnSpec(name=name, dtype=dtype, shape=shape, writer=writer, meaning=meaning)
    return name


# Written by the rollout
INPUT_IDS: Final = declare("input_ids", "int64", "T", "rollout.generate", "prompt, turns and observations, in order")
LOSS_MASK: Final = declare("loss_mask", "bool", "T", "rollout.generate", "true exactly on sampled tokens")
ROLLOUT_LOG_PROBS: Final = declare("rollout_log_probs", "float32", "T", "rollout.generate", "the engine's log-probs")
TURN_IDS: Final = declare("turn_ids", "int32", "T", "rollout.generate", "turn of a sampled token, -1 elsewhere")
POLICY_VERSIONS: Final = declare("policy_versions", "int32", "T", "rollout.generate", "policy version, -1 elsewhere")
POSITION_IDS: Final = declare("position_ids", "int64", "T 3", "rollout.generate", "3-D positions, not for text models")
TOKEN_LEVEL_SCORES: Final = declare(
    "token_level_scores", "float32", "T", "rollout.generate", "turn rewards and score, on last sampled tokens"
)
PROMPT_LENGTH: Final = declare("prompt_length", "int64", "B", "rollout.generate", "tokens before the first turn")
SAMPLE_INDEX: Final = declare("sample_index", "int64", "B", "rollout.generate", "0..n-1 in the group")
GREEDY_SAMPLE: Final = -1  # sample_index of an episode that was run for a baseline
UID: Final = declare("uid", "object", "B", "rollout.generate", "the draw of a dataset row: the group")
ROW_ID: Final = declare("row_id", "object", "B", "rollout.generate", "the dataset row")
DATA_SOURCE: Final = declare("data_source", "object", "B", "rollout.generate", "names the reward and the metrics")
STOP_REASON: Final = declare("stop_reason", "object", "B", "rollout.generate", "why the episode ended")
IMAGE_KEYS: Final = declare("image_keys", "object", "B", "rollout.generate", "tuple of blob keys, in order")
PROMPT_TEXT: Final = declare("prompt_text", "object", "B", "rollout.generate", "rendered prompt, for people")
RESPONSE_TEXT: Final = declare("response_text", "object", "B", "rollout.generate", "decoded response, for people")
MESSAGES: Final = declare("messages", "object", "B", "rollout.generate", "the prompt as messages, not rendered")
GROUND_TRUTH: Final = declare("ground_truth", "object", "B", "rollout.generate", "what the reward compared with")
SCORE_EXTRA: Final = declare("score_extra", "object", "B", "rollout.generate", "parts of the score, a mapping")
RETRIES: Final = declare("retries", "int64", "B", "rollout.generate", "tries of the episode before this one")
TURN_REWARDS: Final = declare("turn_rewards", "object", "B", "rollout.generate", "tuple, a number a turn, or empty")
TURN_INFO: Final = declare("turn_info", "object", "B", "rollout.generate", "tuple, a mapping a turn, or empty")
TURN_STATES: Final = declare(
    "turn_states", "object", "B", "rollout.generate", "hash of what each turn answers, a tuple"
)
# Written by the learner
OLD_LOG_PROBS: Final = declare("old_log_probs", "float32", "T", "actor.log_probs", "before the first update of a step")
ENTROPY: Final = declare("entropy", "float32", "T", "actor.log_probs", "of the sampling distribution")
SUM_PI_SQUARED: Final = declare(
    "sum_pi_squared", "float32", "T", "actor.log_probs", "sum of p^2 over the vocabulary, where an estimator needs it"
)
REF_LOG_PROBS: Final = declare("ref_log_probs", "float32", "T", "reference.log_probs", "of the reference policy")
VALUES: Final = declare("values", "float32", "T", "critic.values", "value of the prefix before a token")
RM_SCORES: Final = declare("rm_scores", "float32", "B", "reward_model.score", "of the reward model, not weighted")
RM_CUT_TOKENS: Final = declare("rm_cut_tokens", "int64", "B", "reward_model.score", "what it could not read of a row")
# Written by the driver
RULE_SCORES: Final = declare("rule_scores", "float32", "B", "reward", "of the reward function, not weighted")
REWARD_BASELINES: Final = declare(
    "reward_baselines", "float32", "B", "baseline.beside", "score of the prompt's greedy episode"
)
TOKEN_LEVEL_REWARDS: Final = declare("token_level_rewards", "float32", "T", "rewards", "shaped scores less KL penalty")
ADVANTAGES: Final = declare("advantages", "float32", "T", "advantage", "0 where nothing was sampled")
RETURNS: Final = declare("returns", "float32", "T", "advantage", "target of the critic")
ROLLOUT_IS_WEIGHTS: Final = declare(
    "rollout_is_weights", "float32", "T", "rollout_correction", "importance of a token: learner over engine"
)
SELECTED: Final = declare("selected", "bool", "T", "trainer", "tokens that the policy loss treats apart")
GROUP: Final = declare("group", "int64", "B", "trainer", "rows of equal numbers stay in one micro-batch")
MINI_BATCH: Final = declare("mini_batch", "int64", "B E", "trainer", "which mini-batch a row is in, per epoch")


def missing_column_message(method: str, name: str) -> str:
    """Say which method lacks which column and who should have written it."""
    spec = COLUMNS.get(name)
    origin = f"it is written by {spec.writer}" if spec else "no such column is declared"
    return f"{method} needs column {name!r}, which the batch lacks; {origin}"
