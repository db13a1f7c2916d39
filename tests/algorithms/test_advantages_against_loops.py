"""Every registered advantage estimator against slow float64 loops in plain Python, on random ragged batches.

The batches have groups of one row, rows of equal score, rows without a sampled token, several turns, turns that lost
some or all of their tokens from the mask, rewards on tokens that nobody sampled, and garbage wherever nobody may look.
"""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vrl.algorithms.advantages.registry import AdvantageInputs, AdvantageParams, get_advantage, known_advantages
from vrl.algorithms.segments import place_on_last_sampled

TURN = st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2))  # observed before, sampled, observed after


def dropped(mask, draw):
    """The mask with some sampled tokens taken out, as rejection by rollout correction does."""
    share = draw(st.sampled_from([0.0, 0.0, 0.3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return mask & (torch.rand(mask.shape, generator=generator) >= share)


@st.composite
def ragged_batches(draw):
    """Random rows in float64 with every input that an estimator may need."""
    rows = draw(st.lists(st.lists(TURN, max_size=4), min_size=1, max_size=6))
    mask, turn_ids, lengths = [], [], []
    for row in rows:
        before = len(mask)
        for k, (observed, sampled, after) in enumerate(row):
            mask += [False] * observed + [True] * sampled + [False] * after
            turn_ids += [-1] * observed + [k] * sampled + [-1] * after
        lengths.append(len(mask) - before)
    mask, offsets = dropped(torch.tensor(mask, dtype=torch.bool), draw), torch.tensor([0, *lengths]).cumsum(0)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def only_sampled(x):
        return torch.where(mask, x, math.nan)

    scores = torch.tensor([draw(st.sampled_from([0.0, 0.7, 1.0, -0.3])) for _ in rows], dtype=torch.float64)
    rewards = place_on_last_sampled(scores, mask, offsets)
    if draw(st.booleans()):
        rewards = rewards + normal(*mask.shape)  # also off the mask
    probabilities = normal(mask.numel(), 5).softmax(-1)
    states = [draw(st.integers(-1, 1)) for _ in range(4 * len(rows))]
    row_of = torch.repeat_interleave(torch.arange(len(rows)), offsets.diff()).tolist()
    return AdvantageInputs(
        token_level_rewards=rewards,
        mask=mask,
        group=torch.tensor([draw(st.integers(-2, 2)) for _ in rows]),
        offsets=offsets,
        values=only_sampled(normal(*mask.shape)),
        reward_baselines=normal(len(rows)),
        turn_ids=torch.tensor(turn_ids, dtype=torch.int32),
        state_ids=torch.tensor(
            [states[4 * b + max(k, 0)] for b, k in zip(row_of, turn_ids, strict=True)], dtype=torch.int64
        ),
        reward_components=torch.tensor(
            [[draw(st.sampled_from([0.0, 0.1, 1.0])) for _ in range(3)] for _ in rows], dtype=torch.float64
        ),
        old_log_probs=only_sampled(probabilities[:, 0].log()),
        sum_pi_squared=only_sampled(probabilities.square().sum(-1)),
        rollout_is_weights=only_sampled(normal(*mask.shape).exp()) if draw(st.booleans()) else None,
    )


def rows_of(inputs):
    """Per row: [flat index, reward, value] of its sampled tokens; a stray reward goes to the sampled token before."""
    rows = []
    for start, end in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True):
        row = []
        for t in range(start, end):
            reward = inputs.token_level_rewards[t].item()
            if inputs.mask[t]:
                row.append([t, reward, inputs.values[t].item()])
            elif row:
                row[-1][1] += reward
        rows.append(row)
    return rows


def turns_of(inputs):
    """Per row: its turns in order, each a list as in `rows_of`."""
    rows = []
    for row in rows_of(inputs):
        turns = defaultdict(list)
        for token in row:
            turns[inputs.turn_ids[token[0]].item()].append(token)
        rows.append([turns[k] for k in sorted(turns)])
    return rows


def mean(xs):
    return sum(xs) / len(xs)


def standing(x, xs, params):
    """x in a group of values xs, itself among them. One value alone has mean 0 and std 1."""
    if len(xs) == 1:
        return x / (1.0 + params.eps) if params.norm_adv_by_std else x
    std = math.sqrt(sum((y - mean(xs)) ** 2 for y in xs) / (len(xs) - 1))
    return (x - mean(xs)) / ((std + params.eps) if params.norm_adv_by_std else 1.0)


def whitened(per_token):
    """{flat index: value} whitened over its values."""
    xs = list(per_token.values())
    if len(xs) < 2:
        return dict.fromkeys(per_token, 0.0)
    variance = sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)
    return {t: (x - mean(xs)) / math.sqrt(variance + 1e-8) for t, x in per_token.items()}


def gae_of(tokens, gamma, lam):
    """[(flat index, advantage)], last token first, of one stretch of time."""
    out, later, next_value = [], 0.0, 0.0
    for t, reward, value in reversed(tokens):
        later = reward + gamma * next_value - value + gamma * lam * later
        next_value = value
        out.append((t, later))
    return out


def slow_gae(inputs, params):
    advantages = dict(pair for row in rows_of(inputs) for pair in gae_of(row, params.gamma, params.lam))
    return whitened(advantages), {t: a + inputs.values[t].item() for t, a in advantages.items()}


def slow_bi_level_gae(inputs, params):
    advantages = {}
    for turns in turns_of(inputs):
        of_turn = dict(gae_of([turn[-1] for turn in turns], params.high_level_gamma, params.lam))
        for turn in turns:
            last, _, value = turn[-1]
            # A reward of A_k + V_k on the turn's last token and no value behind it: the turn as an episode of its own.
            advantages |= dict(gae_of([*turn[:-1], [last, of_turn[last] + value, value]], params.gamma, params.lam))
    return whitened(advantages), {t: a + inputs.values[t].item() for t, a in advantages.items()}


def slow_returns(inputs, gamma):
    returns = {}
    for row in rows_of(inputs):
        later = 0.0
        for t, reward, _ in reversed(row):
            later = reward + gamma * later
            returns[t] = later
    return returns


def slow_turn_returns(inputs, gamma):
    """{(row, turn id): (return, flat indices of its tokens)}."""
    out = {}
    for i, turns in enumerate(turns_of(inputs)):
        rewards = [sum(reward for _, reward, _ in turn) for turn in turns]
        for k, turn in enumerate(turns):
            value = sum(gamma**j * reward for j, reward in enumerate(rewards[k:]))
            out[i, inputs.turn_ids[turn[0][0]].item()] = (value, [t for t, _, _ in turn])
    return out


def slow_grpo_turn(inputs, params):
    turns, advantages = slow_turn_returns(inputs, params.gamma), {}
    for (i, k), (value, tokens) in turns.items():
        mates = {key: g for key, (g, _) in turns.items() if inputs.group[key[0]] == inputs.group[i]}
        same = [g for (_, other), g in mates.items() if other == k]
        pool = list(mates.values()) if params.over_all_turns or len(same) < 2 else same
        advantages |= dict.fromkeys(tokens, standing(value, pool, params))
    return advantages, {t: g for g, tokens in turns.values() for t in tokens}


def slow_gigpo(inputs, params):
    turns, advantages = slow_turn_returns(inputs, params.gamma), {}
    scores, _, members = slow_groups(inputs)
    state = {key: inputs.state_ids[tokens[0]].item() for key, (_, tokens) in turns.items()}
    for (i, k), (value, tokens) in turns.items():
        episodes = [scores[j] for j in members[i]]
        steps = [g for key, (g, _) in turns.items() if key[0] in members[i] and state[key] == state[i, k]]
        advantage = standing(scores[i], episodes, params) if len(episodes) > 1 else 0.0
        advantage += params.step_advantage_w * (standing(value, steps, params) if len(steps) > 1 else 0.0)
        advantages |= dict.fromkeys(tokens, advantage)
    return advantages, {t: g for g, tokens in turns.values() for t in tokens}


def slow_optimal_token_baseline(inputs, params):
    returns, advantages = slow_returns(inputs, 1.0), {}
    at = defaultdict(list)  # (group, position) -> (flat index, return, weight) of every row that gets there
    for i, row in enumerate(rows_of(inputs)):
        energy = 0.0
        for n, (t, _, _) in enumerate(row):
            weight = 1.0 if inputs.rollout_is_weights is None else inputs.rollout_is_weights[t].item() ** 2
            pi = math.exp(inputs.old_log_probs[t].item())
            energy += weight * (1 - 2 * pi + inputs.sum_pi_squared[t].item())
            at[inputs.group[i].item(), n].append((t, returns[t], energy))
    for there in at.values():
        baseline = sum(g * w for _, g, w in there) / sum(w for _, _, w in there) if len(there) > 1 else 0.0
        advantages |= {t: g - baseline for t, g, _ in there}
    return advantages, returns


def slow_groups(inputs):
    """Per row: its score, length in sampled tokens, and the rows of its group."""
    scores, lengths = [], []
    for start, end in zip(inputs.offsets[:-1].tolist(), inputs.offsets[1:].tolist(), strict=True):
        scores.append(sum(inputs.token_level_rewards[start:end].tolist()))
        lengths.append(int(inputs.mask[start:end].sum()))
    members = [[j for j, other in enumerate(inputs.group) if other == g] for g in inputs.group]
    return scores, lengths, members


def slow_gdpo(inputs, params):
    parts = inputs.reward_components.tolist()
    _, _, members = slow_groups(inputs)
    total = [
        sum(
            weight * standing(parts[i][c], [parts[j][c] for j in group], params)
            for c, weight in enumerate(params.component_weights or (1.0, 1.0, 1.0))
        )
        for i, group in enumerate(members)
    ]
    return [standing(x, total, AdvantageParams()) for x in total]


def slow_row_advantages(name, inputs, params):
    if name == "gdpo":
        return slow_gdpo(inputs, params)
    scores, lengths, members = slow_groups(inputs)
    out = []
    for i, group in enumerate(members):
        alone, s = len(group) == 1, [scores[j] for j in group]
        base = 0.0 if alone else mean(s)
        if name == "grpo":
            out.append(standing(scores[i], s, params))
        elif name == "rloo":
            others = [scores[j] for j in group if j != i]
            out.append(scores[i] - (mean(others) if others else 0.0))
        elif name == "opo":
            total = sum(lengths[j] for j in group)
            weighted = sum(lengths[j] * scores[j] for j in group) / total if total else 0.0
            out.append(scores[i] - (0.0 if alone else weighted))
        elif name in ("gpg", "reinforce_plus_plus_baseline"):
            out.append(scores[i] - base)
        else:
            std = math.sqrt(sum((x - mean(s)) ** 2 for x in s) / (len(s) - 1))
            best, second = sorted(s)[-1], sorted(s)[-2]
            lead = (best - second) / ((std + params.eps) if params.norm_adv_by_std else 1.0)
            out.append(lead if i == max(group, key=scores.__getitem__) else 0.0)
    if name == "gpg":
        still = [all(abs(out[j]) < 1e-12 for j in group) for group in members]
        out = [x * len(out) / max(still.count(False), 1) for x in out]
    return out


def slow_reinforce_plus_plus(inputs, params):
    returns = slow_returns(inputs, params.gamma)
    return whitened(returns), returns


def slow_remax(inputs, params):
    returns = slow_returns(inputs, 1.0)
    owner = {t: i for i, row in enumerate(rows_of(inputs)) for t, _, _ in row}
    return {t: g - inputs.reward_baselines[owner[t]].item() for t, g in returns.items()}, returns


OVER_TIME = {
    "bi_level_gae": slow_bi_level_gae,
    "gae": slow_gae,
    "gigpo": slow_gigpo,
    "grpo_turn": slow_grpo_turn,
    "optimal_token_baseline": slow_optimal_token_baseline,
    "reinforce_plus_plus": slow_reinforce_plus_plus,
    "remax": slow_remax,
}
OVER_ROWS = ("gdpo", "gpg", "grpo", "grpo_passk", "opo", "reinforce_plus_plus_baseline", "rloo")


def slow(name, inputs, params):
    """(advantages, returns) of every sampled token, by loops."""
    if name in OVER_TIME:
        return OVER_TIME[name](inputs, params)
    per_row = slow_row_advantages(name, inputs, params)
    advantages = {t: per_row[i] for i, row in enumerate(rows_of(inputs)) for t, _, _ in row}
    advantages = whitened(advantages) if name == "reinforce_plus_plus_baseline" else advantages
    return advantages, advantages


def dense(per_token, total):
    out = torch.zeros(total, dtype=torch.float64)
    for t, value in per_token.items():
        out[t] = value
    return out


SETTINGS = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([1.0, 0.9, 0.0]),
        "lam": st.sampled_from([1.0, 0.95, 0.0]),
        "norm_adv_by_std": st.booleans(),
        "high_level_gamma": st.sampled_from([1.0, 0.8]),
        "step_advantage_w": st.sampled_from([1.0, 0.5]),
        "component_weights": st.sampled_from([None, (1.0, 0.5, -2.0)]),
        "over_all_turns": st.booleans(),
    }
)


def test_every_registered_estimator_has_a_reference():
    assert sorted([*OVER_TIME, *OVER_ROWS]) == list(known_advantages())


@pytest.mark.parametrize("name", known_advantages())
@settings(max_examples=40, deadline=None, derandomize=True)
@given(inputs=ragged_batches(), chosen=SETTINGS)
def test_estimator_equals_slow_loops(name, inputs, chosen):
    params = AdvantageParams(**chosen)
    if name == "grpo_passk" and any(inputs.group.tolist().count(g) == 1 for g in inputs.group.tolist()):
        with pytest.raises(ValueError, match="at least 2 rows"):
            get_advantage(name)(inputs, params)
        return
    outputs = get_advantage(name)(inputs, params)
    advantages, returns = slow(name, inputs, params)
    torch.testing.assert_close(outputs.advantages, dense(advantages, inputs.mask.numel()), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(outputs.returns, dense(returns, inputs.mask.numel()), rtol=1e-8, atol=1e-8)
