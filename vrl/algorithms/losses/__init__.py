"""Losses. Importing this package registers all policy losses; `registry.get_policy_loss(name)` finds one."""

from vrl.algorithms.losses import (  # noqa: F401  (each import registers a loss)
    cispo,
    clip_cov,
    dpo,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gspo,
    kl_cov,
    reinforce,
    sapo,
    tba,
    vanilla,
)
