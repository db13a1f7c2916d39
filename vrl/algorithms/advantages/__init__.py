"""Advantage estimators. Importing this package registers them all; `registry.get_advantage(name)` finds one."""

from vrl.algorithms.advantages import (  # noqa: F401  (each import registers an estimator)
    bi_level_gae,
    gae,
    gdpo,
    gigpo,
    gpg,
    grpo,
    grpo_passk,
    grpo_turn,
    opo,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
