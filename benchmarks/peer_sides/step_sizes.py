"""Sizes of the GRPO step that all who take part know. Imports nothing."""

from typing import Final

PROMPTS: Final = 8
SAMPLES: Final = 8
ROWS: Final = PROMPTS * SAMPLES
PROMPT_TOKENS: Final = 64
CAP: Final = {"fixed": 64, "longtail": 256}  # new tokens; `fixed` samples all of them
MEAN_TOKENS: Final = 41  # of `longtail`, near enough
LEARNING_RATE: Final = 1e-9  # every computation of a step is done, but lengths stay as they are
MICRO_BATCH_ROWS: Final = 8  # TRL's default
MICRO_BATCH_TOKENS: Final = 2048
