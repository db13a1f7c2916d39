"""CPU time of a rollout against the bare engine on the same requests: `python benchmarks/generation.py [ROUNDS]`.

One process, one rank, model and data of the config `tiny_vl_grpo`, made here if missing. A round samples the same 16
prompts x 8 once by `LLM.generate` with images decoded beforehand, once by the rollout worker (rendering, turn loop,
rewards, rows), in turn, with caches dropped before each. CPU seconds of this process, which holds the engine.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from vrl.workers.process import RankPlace, environment

os.environ.update(environment("cpu", 1))

from vllm import SamplingParams

from vrl.agent.sources import FixedSource
from vrl.controller.commands import settings
from vrl.controller.prepare import prepare
from vrl.controller.resource_pool import free_port
from vrl.controller.run import load_data, training_sampling, with_image_limit
from vrl.models.images import decode_image
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.protocol.trajectory import Prompt, Sampling, content_key, request_seed
from vrl.workers.host import Colocated, RunLength, WorkerHost

PROMPTS = 16


def bare_requests(
    engine: Any, renderer: HFRenderer, prompts: Sequence[Prompt], sampling: Sampling, step: int
) -> tuple[list[Any], list[SamplingParams]]:
    """Return what a person would give `LLM.generate`: token prompts with decoded images, and the same sampling."""
    inputs: list[Any] = []
    params: list[SamplingParams] = []
    for prompt in prompts:
        one: dict[str, Any] = {"prompt_token_ids": renderer.render(prompt.messages)}
        if prompt.images:
            one["multi_modal_data"] = {"image": [decode_image(image) for image in prompt.images]}
            one["multi_modal_uuids"] = {"image": [content_key(image) for image in prompt.images]}
        for index in range(sampling.n):
            seeded = Sampling(max_tokens=sampling.max_tokens, seed=request_seed(sampling.seed, step, prompt.uid, index))
            inputs.append(one)
            params.append(engine._parameters(seeded))
    return inputs, params


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this process that a call takes."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    """Print the median ratio and its quartiles."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    given = ["--config-name", "tiny_vl_grpo", "trainer.n_gpus_per_node=1", "warm_start.enable=False"]
    read = settings.read("train", given, settings.machine())
    assert read is not None
    config = read[1].config
    prepare(config)
    renderer = load_renderer(config.tokenizer_path)
    data = load_data(config, renderer)
    config = with_image_limit(config, data.most_images)
    place = RankPlace(
        rank=0, world_size=1, local_rank=0, local_world_size=1, master_address="127.0.0.1", master_port=free_port(),
        device="cpu",
    )  # fmt: skip
    host = WorkerHost(place, config)
    host.build(["actor", "rollout"], RunLength(actor=1, critic=1), config)
    engine: Any = host._roles["rollout"]._engine
    sampling = training_sampling(config)
    ratios: list[float] = []
    for number in range(rounds + 2):
        prompts = data.loader.next_batch()[:PROMPTS]
        episodes = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        inputs, params = bare_requests(engine, renderer, prompts, sampling, number)
        outputs: list[Any] = []

        def bare(inputs: list[Any] = inputs, params: list[SamplingParams] = params, out: list[Any] = outputs) -> None:
            out.append(engine._llm.generate(inputs, params, use_tqdm=False))

        def ours(episodes: list[Any] = episodes, number: int = number, out: list[Any] = outputs) -> None:
            out.append(host.call("rollout", "generate", [FixedSource(episodes)], sampling, number))

        seconds: dict[str, float] = {}
        for name, run in (("bare", bare), ("ours", ours)) if number % 2 else (("ours", ours), ("bare", bare)):
            host.call("rollout", "sync_weights", Colocated("actor"), number)
            seconds[name] = cpu_seconds(run)
        if number >= 2:  # the first rounds warm up
            ratios.append(seconds["ours"] / seconds["bare"])
            print(f"bare {seconds['bare']:.3f} s, ours {seconds['ours']:.3f} s, ratio {ratios[-1]:.3f}")
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"rollout / bare engine, CPU time: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {rounds} rounds)")
    host.close()


if __name__ == "__main__":
    main()
