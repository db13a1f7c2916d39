"""The actor's exported folder, as others see it: transformers loads it and gives the same log-probs."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.learner_process import rows_of
from tests.workers.rig import config_of, context_of
from vrl.protocol.columns import INPUT_IDS, LOSS_MASK, OLD_LOG_PROBS
from vrl.workers.actor import ActorWorker

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("one_rank")]


def test_transformers_loads_the_exported_folder(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    context = context_of(config_of(tiny_folder("qwen2")))
    actor, rows = ActorWorker.build(context, 10), rows_of(context, "qwen2").rows(slice(0, 4))
    first = actor.log_probs(rows).ragged(OLD_LOG_PROBS).values
    actor.update(rows, [[0, 1, 2, 3]])
    found = actor.log_probs(rows).ragged(OLD_LOG_PROBS).values
    assert (found - first).abs().max() > 1e-2
    actor.export(tmp_path / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float32).eval()
    ids = rows.ragged(INPUT_IDS)
    wanted = torch.zeros(len(ids.values))
    for begin, end in pairwise(ids.offsets.tolist()):
        row = ids.values[begin:end]
        with torch.no_grad():
            logits = model(row[None]).logits[0]
        logits[:, list(context.renderer.banned_ids)] = -torch.inf
        wanted[begin + 1 : end] = logits[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
    wanted = torch.where(rows.ragged(LOSS_MASK).values, wanted, 0.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "huggingface")
    assert (
        tokens("what is 3 + 4").input_ids
        == AutoTokenizer.from_pretrained(tiny_folder("qwen2"))("what is 3 + 4").input_ids
    )
