"""Advantage estimators. Importing this package registers them all; `registry.get_advantage(name)` finds one."""

from vrl.algorithms.advantages import (  # noqa: F401  (each import registers an estimator)
    gae,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
