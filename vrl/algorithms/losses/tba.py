"""Trajectory balance (TBA, arXiv 2503.18929), in the VarGrad form that estimates the log-partition from the group."""

from vrl.algorithms.losses.registry import LossInputs, LossOutputs, LossParams, register_policy_loss
from vrl.algorithms.losses.whole_rows import row_log_probs, row_outputs
from vrl.algorithms.segments import Groups


@register_policy_loss("tba", aggregation="seq-mean-token-mean", needs_whole_groups=True, needs_ref_log_probs=True)
def tba(inputs: LossInputs, params: LossParams) -> LossOutputs:
    """(logZ + log pi - log ref - score / beta)^2 of each row, mean over all rows; beta is `tba_beta`.

    log pi [B] and log ref [B] are sums over the row's sampled tokens. logZ [G] is the mean over the rows of a group of
    log ref - log pi + score / beta, without gradient. Off-policy as it stands: neither advantages nor old log-probs
    are read, and importance weights are refused. A group of one has loss 0 and gradient 0. A row without a sampled
    token is one with log pi = log ref = 0: it counts in logZ and in `per_row`, and trains nothing.

    Deviation from the paper's code: scores and groups belong to the rows given, wherever they stand (the code takes
    scores by position in the whole batch, so that later mini-batches train on wrong ones). Row metrics: tba_log_z,
    tba_residual (absolute).
    """
    assert inputs.group is not None  # the registry refuses a call without them
    assert inputs.scores is not None
    assert inputs.ref_log_probs is not None
    log_pi = row_log_probs(inputs.log_probs, inputs.offsets)
    target = row_log_probs(inputs.ref_log_probs, inputs.offsets) + inputs.scores.double() / params.tba_beta
    groups = Groups.of(inputs.group)
    log_z = (groups.sum(target - log_pi.detach()) / groups.sizes)[groups.index]
    residual = log_z + log_pi - target
    return row_outputs(inputs, residual.square(), {"tba_log_z": log_z, "tba_residual": residual.abs()})
