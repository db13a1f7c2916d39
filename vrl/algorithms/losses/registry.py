"""Policy losses by name: what they take and give, how one is registered. The actor calls one for each micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

DPO_LOSS_TYPES = ("sigmoid", "ipo")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch: `log_probs` carry the gradient, all else is data. Anything may stand on masked tokens.

    `rollout_is_weights` multiply the loss of each token (importance weights between the engine and the trainer).
    `selected` are the tokens that `PolicyLoss.select` chose from the whole mini-batch. `group` holds any integer ids;
    equal ids are one group (one draw of a prompt). `scores` are the rewards of whole rows.
    """

    log_probs: Float[Tensor, " T"]
    old_log_probs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    offsets: Int64[Tensor, " B1"]
    rollout_is_weights: Float[Tensor, " T"] | None = None
    ref_log_probs: Float[Tensor, " T"] | None = None
    selected: Bool[Tensor, " T"] | None = None
    group: Int64[Tensor, " B1-1"] | None = None
    scores: Float[Tensor, " B1-1"] | None = None

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {self.mask.dtype}")
        shapes = {tuple(x.shape) for x in (self.log_probs, self.old_log_probs, self.advantages, self.mask)}
        if len(shapes) > 1:
            raise ValueError(f"log_probs, old_log_probs, advantages and mask must have one shape, got {sorted(shapes)}")
        rows = self.offsets.numel() - 1
        for name, x, size in (
            ("ref_log_probs", self.ref_log_probs, self.mask.numel()),
            ("selected", self.selected, self.mask.numel()),
            ("group", self.group, rows),
            ("scores", self.scores, rows),
        ):
            if x is not None and x.numel() != size:
                raise ValueError(f"{name} must have {size} entries here, got {x.numel()}")

    def without_masked(self) -> "LossInputs":
        """The same with 0 on masked tokens, so that what stood there reaches neither value nor gradient."""
        weights, ref, selected = self.rollout_is_weights, self.ref_log_probs, self.selected
        return replace(
            self,
            log_probs=torch.where(self.mask, self.log_probs, 0.0),
            old_log_probs=torch.where(self.mask, self.old_log_probs, 0.0),
            advantages=torch.where(self.mask, self.advantages, 0.0),
            rollout_is_weights=None if weights is None else torch.where(self.mask, weights, 1.0),
            ref_log_probs=None if ref is None else torch.where(self.mask, ref, 0.0),
            selected=None if selected is None else selected & self.mask,
        )

    def weighted(self, per_token: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Times the importance weights, where there are any."""
        return per_token if self.rollout_is_weights is None else per_token * self.rollout_is_weights


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossParams:
    """Settings of the losses in verl's names; each reads what its formula has.

    For dppo_tv and dppo_kl `clip_ratio_low/high` bound a divergence and `clip_ratio_c` the ratio. `tba_beta` is the KL
    coefficient, for the caller to anneal.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 2e-4
    ppo_kl_coef: float = 0.1
    dro_beta: float = 0.1
    tba_beta: float = 0.012
    dpo_beta: float = 0.1
    dpo_loss_type: str = "sigmoid"
    dpo_label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1.0:
            raise ValueError(
                f"actor.clip_ratio_c must be above 1, got {self.clip_ratio_c}: the dual clip bounds the loss of "
                "negative advantages from ratio c on; 3.0 is usual"
            )
        if self.clip_ratio_low < 0 or self.clip_ratio_high < 0:
            raise ValueError(
                "actor.clip_ratio_low and clip_ratio_high must not be negative, "
                f"got {self.clip_ratio_low} and {self.clip_ratio_high}"
            )
        if self.tau_pos <= 0 or self.tau_neg <= 0:
            raise ValueError(f"actor.tau_pos and tau_neg must be positive, got {self.tau_pos} and {self.tau_neg}")
        self._check_covariance()
        self._check_pairs()

    def _check_covariance(self) -> None:
        for name, ratio in (("clip_cov_ratio", self.clip_cov_ratio), ("kl_cov_ratio", self.kl_cov_ratio)):
            if not 0.0 <= ratio <= 1.0:
                raise ValueError(f"actor.policy_loss.{name} is a share of the tokens from 0 to 1, got {ratio}")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                "actor.policy_loss.clip_cov_lb must be below clip_cov_ub, "
                f"got {self.clip_cov_lb} and {self.clip_cov_ub}"
            )

    def _check_pairs(self) -> None:
        for name, beta in (("dro_beta", self.dro_beta), ("tba_beta", self.tba_beta), ("dpo_beta", self.dpo_beta)):
            if beta <= 0:
                raise ValueError(f"actor.policy_loss.{name} must be positive, got {beta}")
        if self.dpo_loss_type not in DPO_LOSS_TYPES:
            known = ", ".join(DPO_LOSS_TYPES)
            raise ValueError(f"unknown actor.policy_loss.dpo_loss_type {self.dpo_loss_type!r}; known: {known}")
        if not 0.0 <= self.dpo_label_smoothing < 0.5:
            raise ValueError(
                "actor.policy_loss.dpo_label_smoothing is the share of flipped preferences, from 0 to below 0.5, "
                f"got {self.dpo_label_smoothing}"
            )
        if self.dpo_loss_type == "ipo" and self.dpo_label_smoothing:
            raise ValueError(
                f"actor.policy_loss.dpo_label_smoothing={self.dpo_label_smoothing} has no effect with "
                "dpo_loss_type=ipo: set it to 0 or dpo_loss_type to sigmoid"
            )


@final
@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Loss per token, and metrics per token: `aggregation` sums and divides both.

    A loss over whole rows also gives `per_row` and `row_metrics`, whose value is their mean over all rows of the
    mini-batch. `per_token` then holds the row's loss on each of its sampled tokens, so that seq-mean-token-mean gives
    the same loss wherever every row has a sampled token.
    """

    per_token: Float[Tensor, " T"]
    metrics: Mapping[str, Float[Tensor, " T"]]
    per_row: Float[Tensor, " B"] | None = None
    row_metrics: Mapping[str, Float[Tensor, " B"]] = field(default_factory=dict)


Compute = Callable[[LossInputs, LossParams], LossOutputs]
Select = Callable[[LossInputs, LossParams, torch.Generator], Bool[Tensor, " T"]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A registered loss: what it needs from the run, and the function that computes it.

    `aggregation` is the mode its paper fixes; None leaves the choice to `actor.loss_agg_mode`. `needs_whole_groups`:
    all rows of a group in one micro-batch, and `group` and `scores` with them. `compares_pairs`: a group is two rows of
    unequal score. `needs_selection`: `selected`, which `select` chooses.
    """

    name: str
    compute: Compute
    aggregation: str | None
    chooses: Select | None
    needs_whole_groups: bool
    needs_ref_log_probs: bool
    compares_pairs: bool

    @property
    def needs_selection(self) -> bool:
        """Whether the loss treats some tokens of the mini-batch apart."""
        return self.chooses is not None

    def __call__(self, inputs: LossInputs, params: LossParams) -> LossOutputs:
        """Loss and metrics per token, both 0 on masked tokens. ValueError where an input it needs is missing."""
        self._check(inputs)
        return self.compute(inputs.without_masked(), params)

    def select(self, inputs: LossInputs, params: LossParams, generator: torch.Generator) -> Bool[Tensor, " T"]:
        """The tokens this loss treats apart, chosen from all rows of a mini-batch; none where it treats all alike.

        One call with the rows of all ranks and micro-batches makes the choice independent of how they are cut. A
        random choice draws from `generator` (on the CPU) in the order of the rows.
        """
        if self.chooses is None:
            return torch.zeros_like(inputs.mask)
        with torch.no_grad():
            return self.chooses(inputs.without_masked(), params, generator)

    def _check(self, inputs: LossInputs) -> None:
        for needed, given, remedy in (
            (self.needs_selection, inputs.selected, "selected: call select on all rows of the mini-batch"),
            (self.needs_ref_log_probs, inputs.ref_log_probs, "ref_log_probs: give the run a reference policy"),
            (self.needs_whole_groups, inputs.group, "group: give the group ids of whole groups in one micro-batch"),
            (self.needs_whole_groups, inputs.scores, "scores: give the rewards of the rows"),
        ):
            if needed and given is None:
                raise ValueError(f"policy loss {self.name} needs {remedy}")
        if self.needs_whole_groups and inputs.rollout_is_weights is not None:
            raise ValueError(
                f"policy loss {self.name} has no place for importance weights: "
                "set algorithm.rollout_correction.rollout_is=null"
            )


_LOSSES: dict[str, PolicyLoss] = {}


def register_policy_loss(
    name: str,
    *,
    aggregation: str | None = None,
    chooses: Select | None = None,
    needs_whole_groups: bool = False,
    needs_ref_log_probs: bool = False,
    compares_pairs: bool = False,
) -> Callable[[Compute], Compute]:
    """Decorator that makes a function available as `actor.policy_loss.loss_mode=name`.

    It is called with 0 on masked tokens. A name taken twice is a ValueError.
    """

    def register(compute: Compute) -> Compute:
        if name in _LOSSES:
            raise ValueError(f"policy loss {name!r} is already registered; choose another name")
        _LOSSES[name] = PolicyLoss(
            name=name,
            compute=compute,
            aggregation=aggregation,
            chooses=chooses,
            needs_whole_groups=needs_whole_groups,
            needs_ref_log_probs=needs_ref_log_probs,
            compares_pairs=compares_pairs,
        )
        return compute

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss of that name; ValueError with the known names otherwise."""
    if name not in _LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known: {', '.join(known_policy_losses())}")
    return _LOSSES[name]


def known_policy_losses() -> tuple[str, ...]:
    """Names of all registered losses, sorted."""
    return tuple(sorted(_LOSSES))
