"""Workers whose episodes act in the environment of the tests, and a look at what they ask of their engine."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.workers.rig import LONG, Rig, png
from vrl.agent.environments.pool import EnvironmentPool
from vrl.agent.loop import Unscored
from vrl.protocol.ports import Engine, EngineOutput, EngineRequest
from vrl.protocol.trajectory import Prompt
from vrl.workers.rollout import RolloutWorker, SideProcesses

KIND = "tests.agent.environments.kinds:Kind"
Act = dict[str, Any]


def acting(uid: str, content: str, *script: Act, images: Sequence[bytes] = ()) -> Prompt:
    """Return a row whose environment follows a script, an act a turn."""
    return Prompt(
        row_id=uid,
        uid=uid,
        messages=[{"role": "user", "content": content}],
        images=tuple(images),
        env_name="scripted",
        tools_kwargs={"script": list(script)},
    )


def acting_rows(kind: str) -> list[Prompt]:
    """Return rows of three turns; for the vision-language model also rows whose tools bring images."""
    text = acting("text", "what is 3 + 4?", {"say": "go <|im_end|> on"}, {"say": LONG, "sleep": 0.1}, {"done": True})
    if kind == "qwen2":
        return [text]
    first, second, third = png(60, 90, 1), png(84, 56, 2), png(200, 112, 3)
    results = [{"role": "tool", "content": "here: <image>"}, {"role": "tool", "content": "and <image>"}]
    end: Act = {"done": True}
    return [
        text,
        acting("one", "<image>?", {"say": results, "images": [second, third]}, {"say": "so?"}, end, images=[first]),
        acting("none", "look", {"say": "<image>", "images": [third]}, {"say": "<image>!", "images": [first]}, end),
    ]


class Recorder:
    """An engine that keeps what it was asked and what it answered; another one does the work."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests: list[EngineRequest] = []
        self.outputs: dict[str, EngineOutput] = {}
        self.aborted: list[str] = []

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self._engine.add_request(request)

    def step(self) -> list[EngineOutput]:
        outputs = self._engine.step()
        self.outputs |= {output.request_id: output for output in outputs}
        return outputs

    def num_unfinished(self) -> int:
        return self._engine.num_unfinished()

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += list(request_ids)
        self._engine.abort(self.aborted)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self, tags: Sequence[str]) -> None:
        self._engine.wake(tags)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> int:
        return self._engine.load_weights(weights)

    def reset_caches(self) -> None:
        self._engine.reset_caches()

    def close(self) -> None:
        self._engine.close()


def with_tools(
    rig: Rig, pool: EnvironmentPool, response: int = 1000, deterministic: bool = False, **agent: Any
) -> tuple[Rig, Recorder]:
    """Return the rig with a worker that has tools, over the same engine, and the record of what the engine does."""
    config = rig.context.config
    policy = config.actor_rollout_ref
    settings = replace(policy.rollout.agent, **{"max_turns": 4, "environments": {"scripted": {"class": KIND}}, **agent})
    config = replace(
        config,
        actor_rollout_ref=replace(policy, rollout=replace(policy.rollout, agent=settings)),
        data=replace(config.data, max_response_length=response),
        trainer=replace(config.trainer, deterministic=deterministic),
    )
    context = replace(rig.context, config=config)
    engine = Recorder(rig.engine)
    rollout = RolloutWorker(engine, SideProcesses(Unscored(), pool, pool.schemas), context, rig.place)
    return replace(rig, context=context, engine=engine, rollout=rollout), engine
