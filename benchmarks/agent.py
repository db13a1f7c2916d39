"""Wall time of episodes with slow tools: `python benchmarks/agent.py [ROUNDS]`.

64 episodes of 4 turns of 32 tokens on a tiny text model in vLLM, one process. Tool times are drawn from a log-normal
distribution (median 0.15 s, sigma 1.2, at most 5 s). Measured in turn: the turn loop; the same without tool times
("engine only"); a loop with a barrier a turn (all decode, then all act, then all decode); and the longest single
episode: its tool times, and decoding alone. The turn loop's wall time is to be at most 1.25 times the larger of the
engine's and the longest episode's, and 1.5 times less than the barrier's.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from vrl.workers.process import RankPlace, environment

os.environ.update(environment("cpu", 1))

import torch

from vrl.agent.environments.pool import EnvironmentPool
from vrl.agent.environments.wire import EnvironmentSpec, KindSpec
from vrl.agent.episode import Episode, EpisodeLimits, RenderedPrompt
from vrl.agent.loop import EpisodeLoop, Unscored
from vrl.agent.sources import FixedSource, TrajectoryList
from vrl.agent.tool_side import ToolSide
from vrl.controller.resource_pool import free_port
from vrl.models.renderer import load_renderer
from vrl.models.tiny import build_tiny_model
from vrl.protocol.config.builder import build
from vrl.protocol.ports import Engine, Renderer
from vrl.protocol.trajectory import Prompt, Sampling
from vrl.workers import process
from vrl.workers.building import BuildContext
from vrl.workers.engines import build_engine

EPISODES, TURNS, TOKENS = 64, 4, 32
MEDIAN_SECONDS, SIGMA, MOST_SECONDS = 0.15, 1.2, 5.0
TEXTS = ["<tool_response> go on </tool_response>", "user assistant", "play the game", "what comes next"]
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)
LIMITS = EpisodeLimits(max_response_tokens=768, max_model_len=1024, max_running=EPISODES, max_turns=TURNS)


@dataclass(frozen=True)
class Bench:
    """What the loops run over."""

    engine: Engine
    renderer: Renderer
    pool: EnvironmentPool

    def loop(self, prompts: Sequence[Prompt], number: int) -> float:
        """Return the wall seconds of the turn loop."""
        sink = TrajectoryList()
        tools = ToolSide(self.pool, {"waiting": ()})
        loop = EpisodeLoop(self.engine, self.renderer, Unscored(), LIMITS, SAMPLING, tools)
        total = loop.run(FixedSource([(prompt, 0) for prompt in prompts]), sink, number, 0).total
        assert sum(row.num_sampled for row in sink.trajectories) == len(prompts) * TURNS * TOKENS
        return total

    def barrier(self, prompts: Sequence[Prompt], number: int) -> float:
        """Return the wall seconds when all episodes wait for the slowest in every turn."""
        begin = time.perf_counter()
        rows = [
            Episode(prompt, 0, RenderedPrompt.of(prompt, self.renderer), self.renderer, LIMITS) for prompt in prompts
        ]
        homes = [self.pool.start(prompt) for prompt in prompts]
        for _ in range(TURNS):
            by_request: dict[str, Episode] = {}
            for row in rows:
                request = row.request(SAMPLING, number, 0)
                self.engine.add_request(request)
                by_request[request.request_id] = row
            while self.engine.num_unfinished():
                for output in self.engine.step():
                    by_request[output.request_id].add_turn(output, 0)
            pending = [self.pool.step(home, row.turn_text()) for home, row in zip(homes, rows, strict=True)]
            while not all(step.done() for step in pending):
                self.pool.poll(0.05)
            for row, step in zip(rows, pending, strict=True):
                result = step.outcome.result
                assert result is not None
                assert result.observation is not None
                row.observe(result.observation)
        for home in homes:
            self.pool.close_episode(home)
        return time.perf_counter() - begin


def prompts_with(seconds: Sequence[Sequence[float]], name: str) -> list[Prompt]:
    """Return a row for each episode's tool times."""
    message = {"role": "user", "content": "play the game"}
    return [
        Prompt(
            row_id=f"{name}{k}",
            uid=f"{name}{k}",
            messages=[message],
            env_name="waiting",
            tools_kwargs={"seconds": list(times)},
        )
        for k, times in enumerate(seconds)
    ]


def measure(bench: Bench, number: int) -> tuple[float, float]:
    """Return loop time over the larger bound, and barrier time over loop time."""
    random = Random(number)
    seconds = [
        [min(random.lognormvariate(0.0, SIGMA) * MEDIAN_SECONDS, MOST_SECONDS) for _ in range(TURNS)]
        for _ in range(EPISODES)
    ]
    nothing = [[0.0] * TURNS] * EPISODES
    engine_only = bench.loop(prompts_with(nothing, "a"), number)
    alone = bench.loop(prompts_with(nothing[:1], "b"), number)
    longest = alone + max(map(sum, seconds))
    ours = bench.loop(prompts_with(seconds, "c"), number)
    barrier = bench.barrier(prompts_with(seconds, "d"), number)
    print(
        f"turn loop {ours:.2f} s, engine only {engine_only:.2f} s, longest episode {longest:.2f} s "
        f"({alone:.2f} s of it decoding), barrier {barrier:.2f} s"
    )
    return ours / max(engine_only, longest), barrier / ours


def main() -> None:
    """Print a line a round, and the medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model("qwen2", Path(folder), TEXTS * 4, seed=1)
        config = build(
            {
                "actor_rollout_ref": {
                    "model": {"path": str(model)},
                    "rollout": {"max_model_len": LIMITS.max_model_len, "max_num_seqs": EPISODES, "kv_cache_gib": 0.5},
                },
                "data": {"max_prompt_length": 256, "max_response_length": LIMITS.max_response_tokens},
                "trainer": {"n_gpus_per_node": 1, "device": "cpu"},
            }
        )
        place = RankPlace(
            rank=0, world_size=1, local_rank=0, local_world_size=1, master_address="127.0.0.1",
            master_port=free_port(), device="cpu",
        )  # fmt: skip
        process.start(place)
        renderer = load_renderer(model)
        engine = build_engine(
            BuildContext(config=config, device=torch.device("cpu"), renderer=renderer, images=None), 0
        )
        spec = EnvironmentSpec(kinds={"waiting": KindSpec(factory="benchmarks.waiting:WaitingKind")})
        with EnvironmentPool(2, spec) as pool:
            bench = Bench(engine, renderer, pool)
            bench.loop(prompts_with([[0.0] * TURNS] * EPISODES, "warm"), 0)
            ratios = [measure(bench, number + 1) for number in range(rounds)]
        engine.close()
    over, faster = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"turn loop over its bound: {over:.2f} (at most 1.25); barrier over turn loop: {faster:.2f} (1.5 or more)")


if __name__ == "__main__":
    main()
