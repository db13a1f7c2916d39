"""A teacher's turns played through the run's environments: rows of several turns for supervised training.

The turn loop of the rollout runs them, so that a row is what an episode of the same turns would be. In place of the
model an engine answers that knows the turns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from vrl.agent.environments.configured import environment_spec
from vrl.agent.environments.pool import EnvironmentPool
from vrl.agent.loop import EpisodeLoop, Unscored
from vrl.agent.sources import FixedSource, TrajectoryList
from vrl.agent.tool_side import ToolSide
from vrl.models.renderer import HFRenderer
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import DataError
from vrl.protocol.ports import EngineOutput, EngineRequest
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory
from vrl.workers.rollout import episode_limits


@final
class TeacherEngine:
    """See `protocol.ports.Engine`. Each request is answered by the next turn of its row; log-probs are 0."""

    def __init__(self, renderer: HFRenderer, turns: Mapping[str, Sequence[str]]) -> None:
        self._renderer = renderer
        self._turns = turns  # by uid
        self._waiting: list[EngineOutput] = []

    def add_request(self, request: EngineRequest) -> None:
        """Look up the turn. Raises DataError when the environment goes on after the teacher's last one."""
        uid, _, turn, _ = request.request_id.rsplit("/", 3)
        turns = self._turns[uid]
        if int(turn) >= len(turns):
            raise DataError(f"row {uid}: its environment goes on after the {len(turns)} turns that the row has")
        ids = tuple(self._renderer.answer_ids(turns[int(turn)]))
        self._waiting.append(
            EngineOutput(request_id=request.request_id, ids=ids, log_probs=(0.0,) * len(ids), finish_reason="stop")
        )

    def step(self) -> list[EngineOutput]:
        """Return all turns that were asked for."""
        done, self._waiting = self._waiting, []
        return done

    def num_unfinished(self) -> int:
        """Return how many turns were asked for since the last step."""
        return len(self._waiting)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""
        dropped = set(request_ids)
        self._waiting = [output for output in self._waiting if output.request_id not in dropped]

    def sleep(self) -> None:
        """There is nothing to give back."""

    def wake(self, tags: Sequence[str]) -> None:
        """There is nothing to take."""

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> int:  # noqa: ARG002  (part of the interface)
        """There are no weights."""
        return 0

    def reset_caches(self) -> None:
        """There are none."""

    def close(self) -> None:
        """There is nothing to end."""


@final
class Playback:
    """Plays conversations, each once. The tool processes start with the first one and end with `close`."""

    def __init__(self, config: Config, renderer: HFRenderer) -> None:
        self._config = config
        self._renderer = renderer
        self._pool: EnvironmentPool | None = None
        self._played: dict[str, Trajectory] = {}

    def rows(self, prompts: Sequence[Prompt], turns_of: Callable[[Prompt], list[str]]) -> dict[str, Trajectory]:
        """Return the conversation of each prompt by row id: its turns, and what the environment answered to them.

        Raises DataError when one failed, naming the row and the cause.
        """
        new = {prompt.row_id: prompt for prompt in prompts if prompt.row_id not in self._played}
        if new:
            for trajectory in self._play(list(new.values()), turns_of):
                if trajectory.stop_reason is StopReason.FAILED:
                    name = trajectory.prompt.row_id
                    raise DataError(f"row {name}: its turns could not be played: {trajectory.failure}")
                self._played[trajectory.prompt.row_id] = trajectory
        return {prompt.row_id: self._played[prompt.row_id] for prompt in prompts}

    def close(self) -> None:
        """End the tool processes."""
        if self._pool is not None:
            self._pool.close()

    def _play(self, prompts: Sequence[Prompt], turns_of: Callable[[Prompt], list[str]]) -> list[Trajectory]:
        agent = self._config.actor_rollout_ref.rollout.agent
        if self._pool is None:
            self._pool = EnvironmentPool(agent.concurrent_workers, environment_spec(self._config))
        most_images = max(len(prompt.images) for prompt in prompts) + agent.max_images
        sink = TrajectoryList()
        loop = EpisodeLoop(
            TeacherEngine(self._renderer, {prompt.row_id: turns_of(prompt) for prompt in prompts}),
            self._renderer,
            Unscored(),
            replace(episode_limits(self._config), max_retries=0, max_row_images=most_images),
            Sampling(max_tokens=self._config.data.max_response_length),
            ToolSide(self._pool, self._pool.schemas),
        )
        source = FixedSource([(replace(prompt, uid=prompt.row_id), 0) for prompt in prompts])
        loop.run(source, sink, step=0, version=0)
        return sink.trajectories
