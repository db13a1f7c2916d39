"""A teacher's turns played through the run's environments: rows of several turns for supervised training.

The turn loop of the rollout runs them, so that a row is what an episode of the same turns would be. In place of the
model an engine answers that knows the turns.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from vrl.agent.environments.configured import environment_spec
from vrl.agent.environments.pool import EnvironmentPool
from vrl.agent.loop import EpisodeLoop, FixedSource, TrajectoryList, Unscored
from vrl.agent.tool_side import ToolSide
from vrl.models.renderer import HFRenderer
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import DataError
from vrl.protocol.ports import EngineOutput, EngineRequest
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory
from vrl.workers.rollout import episode_limits

_LOG = logging.getLogger(__name__)


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


def played(
    prompts: Sequence[Prompt], turns: Mapping[str, Sequence[str]], config: Config, renderer: HFRenderer
) -> dict[str, Trajectory]:
    """Return the conversation of each prompt, by row id: the turns of `turns`, and what the environments answered.

    Raises DataError when one failed, naming the row and the cause.
    """
    if not prompts:
        return {}
    rollout = config.actor_rollout_ref.rollout
    _LOG.info("playing the turns of %d rows through their environments", len(prompts))
    sink = TrajectoryList()
    most_images = max(len(prompt.images) for prompt in prompts) + rollout.agent.max_images
    with EnvironmentPool(rollout.agent.concurrent_workers, environment_spec(config)) as pool:
        loop = EpisodeLoop(
            TeacherEngine(renderer, turns),
            renderer,
            Unscored(),
            replace(episode_limits(config), max_retries=0, max_row_images=most_images),
            Sampling(max_tokens=config.data.max_response_length),
            ToolSide(pool, pool.schemas),
        )
        source = FixedSource([(replace(prompt, uid=prompt.row_id), 0) for prompt in prompts])
        loop.run(source, sink, step=0, version=0)
    for trajectory in sink.trajectories:
        if trajectory.stop_reason is StopReason.FAILED:
            raise DataError(f"row {trajectory.prompt.row_id}: its turns could not be played: {trajectory.failure}")
    return {trajectory.prompt.row_id: trajectory for trajectory in sink.trajectories}
