"""Losses. Importing this package registers all policy losses; `registry.get_policy_loss(name)` finds one."""

from vrl.algorithms.losses import (  # noqa: F401  (each import registers a loss)
    cispo,
    geo_mean,
    gspo,
    reinforce,
    sapo,
    vanilla,
)
