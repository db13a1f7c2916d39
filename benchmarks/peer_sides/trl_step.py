"""TRL's side of a GRPO step: its own trainer and loop on the same model folder, prompts, reward and lengths.

Started as `python -m benchmarks.peer_sides.trl_step WORKLOAD CASE`. Runs in an environment of its own, without vrl.
"""

import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO, final

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer_sides.rounds import private_stdout, versions
from benchmarks.peer_sides.step_sizes import CAP, LEARNING_RATE, MICRO_BATCH_ROWS, ROWS, SAMPLES


@final
class OneStepARequest(TrainerCallback):
    """Stops the trainer's loop before each optimizer step until the driver asks for one.

    A step runs from here to the next call, so that it holds whatever the loop does between two steps.
    """

    def __init__(self, channel: TextIO) -> None:
        self._channel = channel
        self._begin: float | None = None
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:  # noqa: ARG002
        """Answer for the step that has ended, and wait."""
        if self._begin is None:
            facts = {"cases": ["step"], "versions": versions(["torch", "transformers", "trl", "accelerate"])}
            self._channel.write(json.dumps(facts) + "\n")
        else:
            logged = self.trainer.state.log_history[-1]
            answer = {
                "wall_s": time.perf_counter() - self._begin,
                "response_tokens": ROWS * logged["completions/mean_length"],
            }
            self._channel.write(json.dumps(answer) + "\n")
        if not sys.stdin.readline():
            raise SystemExit
        self._begin = time.perf_counter()


def main() -> None:
    """Train until the driver hangs up."""
    channel = private_stdout()
    torch.set_num_threads(1)
    workload, case = sys.argv[1:]
    score = runpy.run_path(str(Path(workload) / "reward.py"))["compute_score"]

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [score("digits", message[0]["content"], "") for message in completions]

    lines = (Path(workload) / "prompts.jsonl").read_text().splitlines()
    callback = OneStepARequest(channel)
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=False, fp16=False, per_device_train_batch_size=MICRO_BATCH_ROWS,
            gradient_accumulation_steps=ROWS // MICRO_BATCH_ROWS, num_generations=SAMPLES, beta=0.0,
            max_completion_length=CAP[case], max_steps=1_000_000, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
            temperature=1.0, top_k=0, gradient_checkpointing=False, dataloader_pin_memory=False, seed=0,
            generation_kwargs={"min_new_tokens": CAP[case]} if case == "fixed" else {},
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=str(Path(workload) / case),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines]),
            callbacks=[callback],
        )
        callback.trainer = trainer
        trainer.train()


if __name__ == "__main__":
    main()
