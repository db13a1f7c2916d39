"""The names that settings may have, and what some of them imply for other settings.

The things themselves are in registries of other layers, which import torch; `tests/controller/test_launch.py` compares.
Here they are known at once: a mistyped name is refused before anything is made.
"""

from collections.abc import Mapping

ADV_ESTIMATORS = (
    *("gae", "bi_level_gae", "remax", "reinforce_plus_plus"),
    *("grpo", "grpo_passk", "grpo_turn", "gdpo", "gigpo"),
    *("rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "optimal_token_baseline"),
)
VALUE_ESTIMATORS = frozenset({"gae", "bi_level_gae"})  # need a critic
GROUP_ESTIMATORS = frozenset(ADV_ESTIMATORS) - VALUE_ESTIMATORS - {"remax", "reinforce_plus_plus"}  # compare samples
PEER_ESTIMATORS = frozenset({"grpo_passk"})  # refuse a row alone in its group: it gets no advantage
# Give a group of equal rewards advantage 0, and other groups what they had without it (gpg: up to a factor). Others
# compare turns or parts of the score, or whiten over the batch.
ZERO_VARIANCE_ESTIMATORS = ("grpo", "grpo_passk", "rloo", "opo", "gpg")
SUM_PI_SQUARED_ESTIMATORS = frozenset({"optimal_token_baseline"})  # need squared probabilities of the vocabulary

POLICY_LOSSES = (
    *("vanilla", "gspo", "sapo", "geo_mean", "cispo", "clip_cov", "kl_cov"),
    *("dppo_tv", "dppo_kl", "dro", "gpg", "reinforce", "tba", "dpo"),
)
_ROW_MEANS = ("gspo", "sapo", "geo_mean", "tba", "dpo")
FIXED_AGGREGATION: Mapping[str, str] = dict.fromkeys(_ROW_MEANS, "seq-mean-token-mean")  # whatever loss_agg_mode says
GROUP_LOSSES = frozenset({"tba", "dpo"})  # over whole groups and against the reference

LOSS_AGG_MODES = (
    *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    *("seq-mean-token-mean", "seq-mean-turn-mean-token-mean"),
)
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_ESTIMATORS = (*_KL, *(f"{name}+" for name in _KL))  # +: value of the one, gradient of k2
LOGGERS = ("console", "tensorboard", "wandb")
