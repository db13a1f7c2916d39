"""The roles alone in a group of one: how passes are cut into micro-batches, updates that teach nothing, the export."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.learner_process import rows_of as mixed_rows
from tests.workers.rig import alone, config_of, context_of
from vrl.algorithms.advantages.registry import AdvantageParams, get_advantage
from vrl.controller.credit import Advantage
from vrl.models.packing import PackedBatch
from vrl.protocol.columns import (
    ADVANTAGES,
    INPUT_IDS,
    LOSS_MASK,
    OLD_LOG_PROBS,
    REF_LOG_PROBS,
    RETURNS,
    ROLLOUT_LOG_PROBS,
    TOKEN_LEVEL_REWARDS,
    TURN_IDS,
    UID,
    VALUES,
)
from vrl.protocol.config.builder import fill
from vrl.protocol.config.schema import Config
from vrl.protocol.dataproto import DataProto, object_column
from vrl.protocol.ragged import Ragged
from vrl.workers.actor import ActorWorker, InferenceLimits, ReferenceWorker
from vrl.workers.critic import CriticWorker

ROWS, LENGTH, ANSWER = 12, 10, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("qwen2")


def rows() -> DataProto:
    """Rows of equal length: three groups of four, each of equal rewards."""
    draw = torch.Generator().manual_seed(2)
    ids = Ragged.from_rows(torch.randint(30, 200, (ROWS, LENGTH), generator=draw).tolist(), torch.int64)
    mask = ([0] * (LENGTH - ANSWER) + [1] * ANSWER) * ROWS
    rewards = torch.zeros(ROWS, LENGTH)
    rewards[:, -1] = torch.tensor([0.7, 1.0, -0.3]).repeat_interleave(4)
    return DataProto(
        {
            INPUT_IDS: ids,
            LOSS_MASK: Ragged(torch.tensor(mask, dtype=torch.bool), ids.offsets),
            TURN_IDS: Ragged(torch.tensor(mask, dtype=torch.int32) - 1, ids.offsets),
            ROLLOUT_LOG_PROBS: Ragged(torch.zeros(ROWS * LENGTH), ids.offsets),
            TOKEN_LEVEL_REWARDS: Ragged(rewards.flatten(), ids.offsets),
        },
        {UID: object_column(f"u{row // 4}" for row in range(ROWS))},
    )


def settings(folder: Path, **sections: dict[str, Any]) -> Config:
    policy = {name: values for name, values in sections.items() if name != "critic"}
    return fill(config_of(folder), {"actor_rollout_ref": policy, "critic": sections.get("critic", {})})


@contextmanager
def packed_rows() -> Iterator[list[int]]:
    """Yield a list that fills with the rows of each micro-batch that a model of ours is called with."""
    seen: list[int] = []

    def note(_module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], PackedBatch):
            seen.append(len(given[0].cu_seqlens) - 1)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def sizes(call: Callable[[], object]) -> list[int]:
    with packed_rows() as seen:
        call()
    return seen


def test_every_pass_is_cut_by_its_own_rows_or_by_the_actors(folder: Path) -> None:
    batch = rows()
    by_rows = {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 4}
    rollout = {"log_prob_micro_batch_size_per_gpu": 6}
    context = context_of(settings(folder, actor=by_rows, rollout=rollout))
    actor = ActorWorker.build(context, total_steps=1)
    assert sizes(lambda: actor.log_probs(batch)) == [6, 6]
    assert sizes(lambda: actor.base_log_probs(batch)) == [4, 4, 4]
    assert sizes(lambda: ReferenceWorker.build(context).log_probs(batch)) == [4, 4, 4]
    critic = CriticWorker.build(context, total_steps=1)
    assert sizes(lambda: critic.values(batch)) == [4, 4, 4]
    learnt = batch | critic.values(batch)
    learnt |= DataProto({RETURNS: learnt.ragged(VALUES), ADVANTAGES: learnt.ragged(TOKEN_LEVEL_REWARDS)})
    assert sizes(lambda: critic.update(learnt, [list(range(ROWS))])) == [4, 4, 4]
    assert sizes(lambda: actor.update(learnt, [list(range(ROWS))])) == [4, 4, 4]
    own = context_of(
        settings(
            folder,
            actor=by_rows,
            ref={"log_prob_micro_batch_size_per_gpu": 12},
            critic={"ppo_micro_batch_size_per_gpu": 3},
        )
    )
    actor = ActorWorker.build(own, total_steps=1)
    assert sizes(lambda: actor.log_probs(batch)) == [4, 4, 4]
    assert sizes(lambda: actor.base_log_probs(batch)) == [12]
    assert sizes(lambda: ReferenceWorker.build(own).log_probs(batch)) == [12]
    assert sizes(lambda: CriticWorker.build(own, total_steps=1).values(batch)) == [3, 3, 3, 3]


def test_budgets_of_tokens_cut_the_passes_and_change_no_number(folder: Path) -> None:
    batch = rows()
    wide = ActorWorker.build(context_of(settings(folder)), total_steps=1)
    budgets = {
        "rollout": {"log_prob_max_token_len_per_gpu": 6 * LENGTH},
        "ref": {"log_prob_max_token_len_per_gpu": 3 * LENGTH},
    }
    narrow = ActorWorker.build(context_of(settings(folder, **budgets)), total_steps=1)
    assert sizes(lambda: wide.log_probs(batch)) == [ROWS]
    assert sorted(sizes(lambda: narrow.log_probs(batch))) == [6, 6]
    assert sorted(sizes(lambda: narrow.base_log_probs(batch))) == [3, 3, 3, 3]
    found, wanted = (actor.log_probs(batch).ragged(OLD_LOG_PROBS).values for actor in (narrow, wide))
    torch.testing.assert_close(found, wanted, **CLOSE)
    found, wanted = (actor.base_log_probs(batch).ragged(REF_LOG_PROBS).values for actor in (narrow, wide))
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_ranks_that_share_rows_have_room_for_so_many_times_the_tokens(folder: Path) -> None:
    config = settings(
        folder,
        actor={"ulysses_sequence_parallel_size": 2},
        rollout={"log_prob_max_token_len_per_gpu": 100},
        ref={"log_prob_max_token_len_per_gpu": 300},
    )
    limits = InferenceLimits.of(context_of(config))
    assert (limits.log_probs.max_tokens, limits.base.max_tokens) == (200, 600)


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk", "rloo", "gpg"])
def test_groups_of_equal_rewards_have_a_gradient_of_exactly_zero(folder: Path, estimator: str, loss: str) -> None:
    optim = {"lr": 1e-3, "lr_warmup_steps": 0, "weight_decay": 0.0}
    policy_loss = {"loss_mode": loss}
    context = context_of(settings(folder, actor={"optim": optim, "policy_loss": policy_loss}))
    actor = ActorWorker.build(context, total_steps=1)
    before = {name: tensor.clone() for name, tensor in actor.full_weights()}
    batch = rows()
    batch |= Advantage(get_advantage(estimator), AdvantageParams())(batch)
    metrics = actor.update(batch, [list(range(ROWS))])
    assert metrics["actor/grad_norm"] == 0.0
    assert metrics["actor/skipped_steps"] == 0.0
    assert {name: value for name, value in metrics.items() if not math.isfinite(value)} == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.full_weights())
    uneven = batch.ragged(ADVANTAGES).values.clone()
    uneven[LENGTH - 1] = 1.0  # one row that differs, and there is something to learn
    taught = batch.with_columns(**{ADVANTAGES: Ragged(uneven, batch.ragged(ADVANTAGES).offsets)})
    assert actor.update(taught, [list(range(ROWS))])["actor/grad_norm"] > 0.0


def test_transformers_loads_the_exported_folder(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    context = context_of(config_of(tiny_folder("qwen2")))
    actor, batch = ActorWorker.build(context, 10), mixed_rows(context, "qwen2").rows(slice(0, 4))
    first = actor.log_probs(batch).ragged(OLD_LOG_PROBS).values
    actor.update(batch, [[0, 1, 2, 3]])
    found = actor.log_probs(batch).ragged(OLD_LOG_PROBS).values
    assert (found - first).abs().max() > 1e-2
    actor.export(tmp_path / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float32).eval()
    ids = batch.ragged(INPUT_IDS)
    wanted = torch.zeros(len(ids.values))
    for begin, end in pairwise(ids.offsets.tolist()):
        row = ids.values[begin:end]
        with torch.no_grad():
            logits = model(row[None]).logits[0]
        logits[:, list(context.renderer.banned_ids)] = -torch.inf
        wanted[begin + 1 : end] = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    wanted = torch.where(batch.ragged(LOSS_MASK).values, wanted, 0.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "huggingface")
    assert (
        tokens("what is 3 + 4").input_ids
        == AutoTokenizer.from_pretrained(tiny_folder("qwen2"))("what is 3 + 4").input_ids
    )
