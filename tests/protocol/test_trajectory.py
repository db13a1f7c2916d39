"""Prompts, sampling settings, trajectories and their identities. Stays torch-free, as its subject does."""

import hashlib
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory, content_key, request_seed

TORCH_FREE = ("trajectory", "columns", "metrics", "balance", "errors", "ports")


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "prompt": Prompt(
            row_id="7", uid="draw-3", messages=[{"role": "user", "content": "<image>?"}], images=(b"png",)
        ),
        "sample_index": 2,
        "input_ids": (5, 6, 7, 8),
        "loss_mask": (0, 0, 1, 1),
        "rollout_log_probs": (0.0, 0.0, -0.5, -0.25),
        "turn_ids": (-1, -1, 0, 0),
        "policy_versions": (-1, -1, 4, 4),
        "prompt_length": 2,
        "stop_reason": StopReason.ANSWER,
        "prompt_text": "?",
        "response_text": "!",
    }
    return Trajectory(**(fields | changes))


def test_modules_that_reward_processes_import_leave_torch_out() -> None:
    imports = "; ".join(f"import vrl.protocol.{name}" for name in TORCH_FREE)
    code = f"import sys; {imports}; sys.exit(','.join({{'torch', 'numpy', 'ray'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_episode_is_named_by_its_draw_and_sample() -> None:
    names = {
        trajectory(sample_index=i, prompt=Prompt(row_id="7", uid=uid, messages=[])).traj_uid
        for uid in "ab"
        for i in (0, 1)
    }
    assert len(names) == 4
    assert trajectory().num_sampled == 2


@pytest.mark.parametrize("name", ["loss_mask", "rollout_log_probs", "turn_ids", "policy_versions"])
def test_per_token_lists_of_other_lengths_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        trajectory(**{name: (0, 0, 1)})
    assert "draw-3/2" in str(caught.value)


def test_records_are_frozen_and_pickle() -> None:
    record = trajectory()
    for value, name in ((record, "score"), (record.prompt, "uid"), (Sampling(), "n")):
        with pytest.raises((FrozenInstanceError, TypeError)):
            setattr(value, name, 1)
        assert pickle.loads(pickle.dumps(value)) == value
    changed = replace(record, score=1.0)
    assert (record.score, changed.score) == (0.0, 1.0)


def test_sampling_is_neutral_unless_set() -> None:
    sampling = Sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, -1, ())
    assert not sampling.greedy
    assert Sampling(temperature=0.0).greedy


def test_stop_reasons_are_readable_words() -> None:
    assert StopReason("failed") is StopReason.FAILED
    assert f"{StopReason.MAX_TURNS}" == "max_turns"
    with pytest.raises(ValueError, match="tired"):
        StopReason("tired")


def test_request_seeds_repeat_and_differ_in_every_part() -> None:
    base = (1, 2, "draw", 3, 4, 5)
    assert request_seed(*base) == request_seed(*base)
    variants = [(9, 2, "draw", 3, 4, 5), (1, 9, "draw", 3, 4, 5), (1, 2, "other", 3, 4, 5)]
    variants += [(1, 2, "draw", 9, 4, 5), (1, 2, "draw", 3, 9, 5), (1, 2, "draw", 3, 4, 9)]
    assert len({request_seed(*parts) for parts in [base, *variants]}) == 7
    # A function of its arguments alone: the same number in every process and in every version.
    assert request_seed(0, 1, "a", 0) == int.from_bytes(hashlib.sha256(b"0/1/a/0/0/0").digest()[:4], "little") % 2**31


def test_request_seeds_fit_and_rarely_collide() -> None:
    seeds = [
        request_seed(0, step, f"draw-{uid}", sample) for step in range(10) for uid in range(50) for sample in range(8)
    ]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) >= len(seeds) - 2


def test_blobs_are_keyed_by_content() -> None:
    assert content_key(b"png") == hashlib.sha256(b"png").hexdigest()
    assert content_key(b"png") != content_key(b"jpg")
