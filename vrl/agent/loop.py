"""The turn loop: takes prompts, drives the engine by its own step, closes episodes, has them scored. Torch-free.

    prompt -> model turn -> observation -> model turn ... -> scored row

One loop runs in each rollout worker. Nothing waits for the slowest: a turn that ends goes to its environment, and an
episode that ends to a reward process, while all others keep decoding. Rows are token in, token out: ids are what the
engine sampled.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

from vrl.agent.environments.wire import StepOutcome
from vrl.agent.episode import Episode, EpisodeLimits, RenderedPrompt, failed_row
from vrl.agent.rewards.types import Score
from vrl.agent.tool_side import Running, ToolSide
from vrl.protocol.errors import ConfigError, DataError
from vrl.protocol.ports import Engine, EngineOutput, PromptSource, Renderer, TrajectorySink
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory

_STEPS_WITHOUT_PROGRESS = 1000  # engine steps in a row that finish nothing and admit nothing, beyond the token limits
_LIVE_PER_DECODING = 2  # episodes under way, with those that wait for tools, over those that may decode together


class Pending(Protocol):
    """A score that is being worked on."""

    def done(self) -> bool:
        """Return whether the score is there; never waits."""
        ...

    @property
    def score(self) -> Score:
        """The outcome, once `done()` is true."""
        ...


class Scorer(Protocol):
    """Where finished episodes are scored: a `RewardPool`, or nothing on ranks that only follow."""

    def submit(self, prompt: Prompt, response_text: str) -> Pending:
        """Ask for the score of one finished episode; returns at once."""
        ...

    def poll(self) -> None:
        """Take in what has been scored meanwhile, without waiting. Called between engine steps."""
        ...

    def wait(self) -> bool:
        """Wait for everything that was submitted; return whether all of it is scored."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSeconds:
    """Where the loop's time went."""

    engine: float
    tools: float  # waiting for environments while nothing decoded, and looking for their results
    waiting_for_rewards: float
    total: float


@final
@dataclass(frozen=True, slots=True)
class _Start:
    """An episode that is to start: a sample of a prompt, and which try it is."""

    prompt: Prompt
    index: int
    retry: int = 0


@final
class EpisodeLoop:
    """Runs episodes of one step. `sampling.max_tokens` bounds a turn. Rows without `env_name` have one turn."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        scorer: Scorer,
        limits: EpisodeLimits,
        sampling: Sampling,
        tools: ToolSide | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._scorer = scorer
        self._limits = limits
        self._sampling = sampling
        self._tools = tools or ToolSide()
        self._rendered: dict[str, RenderedPrompt] = {}
        self._running: dict[str, Running] = {}  # in the order in which they started
        self._decoding: dict[str, Running] = {}  # by request
        self._acting = 0  # running episodes that have an environment
        self._again: list[_Start] = []
        self._unscored: list[tuple[Trajectory, Pending]] = []
        self._failed: list[Trajectory] = []
        self._engine_seconds = 0.0
        self._tool_seconds = 0.0
        self._idle_steps = 0
        self._step = 0
        self._version = 0

    def run(self, source: PromptSource, sink: TrajectorySink, step: int, version: int) -> LoopSeconds:
        """Take prompts until none is left; put each finished, scored trajectory into the sink."""
        begin = time.perf_counter()
        self._engine_seconds, self._tool_seconds = 0.0, 0.0
        self._step, self._version = step, version
        open_source = True
        try:
            while open_source or self._running or self._again:
                open_source = self._admit(source, open_source)
                if self._decoding:
                    self._decode()
                if self._acting:
                    self._take_events()
                self._scorer.poll()
                self._hand_over(sink)
        finally:
            for entry in self._running.values():  # none, but after an error
                self._tools.close(entry)
        before = time.perf_counter()
        self._scorer.wait()
        waited = time.perf_counter() - before
        self._hand_over(sink)
        return LoopSeconds(
            engine=self._engine_seconds,
            tools=self._tool_seconds,
            waiting_for_rewards=waited,
            total=time.perf_counter() - begin,
        )

    # -- starting -----------------------------------------------------------------------------------------------

    def _admit(self, source: PromptSource, open_source: bool) -> bool:
        """Fill the engine up, with episodes that are tried again first; return False once the source is empty."""
        while self._again and self._room():
            self._start(self._again.pop(0))
        room = self._room()
        if not open_source or not room:
            return open_source
        taken = source.take(room)
        for prompt, index in taken:
            self._start(_Start(prompt, index))
        return bool(taken)

    def _room(self) -> int:
        running = self._limits.max_running
        return max(min(running - len(self._decoding), _LIVE_PER_DECODING * running - len(self._running)), 0)

    def _start(self, start: _Start) -> None:
        prompt = start.prompt
        try:
            rendered = self._rendered.get(prompt.uid) or self._render(prompt)
            episode = Episode(prompt, start.index, rendered, self._renderer, self._limits)
            entry = Running(
                name=f"{prompt.uid}/{start.index}",
                episode=episode,
                retry=start.retry,
                deadline=time.monotonic() + self._limits.max_seconds,
                environment=self._tools.start(prompt),
            )
            self._running[entry.name] = entry
            self._acting += entry.environment is not None
            self._request(entry)
        except DataError:
            # An image that cannot be used fails its own episode only.
            self._leave(f"{prompt.uid}/{start.index}")
            self._failed.append(failed_row(prompt, start.index, traceback.format_exc()))

    def _render(self, prompt: Prompt) -> RenderedPrompt:
        rendered = RenderedPrompt.of(prompt, self._renderer, self._tools.schemas_of(prompt))
        if self._limits.max_model_len - len(rendered.expanded) < 1:
            raise DataError(
                f"row {prompt.row_id}: its prompt has {len(rendered.expanded)} tokens and leaves no room in a context "
                f"of {self._limits.max_model_len}; raise rollout.max_model_len or lower data.max_prompt_length"
            )
        self._rendered[prompt.uid] = rendered
        return rendered

    # -- turns --------------------------------------------------------------------------------------------------

    def _request(self, entry: Running) -> None:
        request = entry.episode.request(self._sampling, self._step, entry.retry)
        before = time.perf_counter()
        self._engine.add_request(request)
        self._engine_seconds += time.perf_counter() - before
        entry.request_id = request.request_id
        self._decoding[request.request_id] = entry

    def _decode(self) -> None:
        before = time.perf_counter()
        outputs = self._engine.step()
        self._engine_seconds += time.perf_counter() - before
        self._idle_steps = 0 if outputs else self._idle_steps + 1
        if self._idle_steps > self._limits.max_model_len + _STEPS_WITHOUT_PROGRESS:
            raise RuntimeError(
                f"the engine made {self._idle_steps} steps without finishing any of {len(self._decoding)} requests"
            )
        for output in outputs:
            entry = self._decoding.pop(output.request_id, None)
            if entry is not None:  # else it was given up in this very moment
                entry.request_id = None
                self._end_turn(entry, output)

    def _end_turn(self, entry: Running, output: EngineOutput) -> None:
        episode = entry.episode
        try:
            episode.add_turn(output, self._version)
        except DataError:
            self._fail(entry, traceback.format_exc())
            return
        by_itself = StopReason.ANSWER if output.finish_reason == "stop" else StopReason.LENGTH
        entry.ended_by = by_itself
        if entry.environment is None or (by_itself is StopReason.LENGTH and episode.room < 1):
            self._finish(entry, by_itself)  # half a turn is no action: its environment does not see it
        else:
            self._tools.step(entry, episode.turn_text(self._sampling.stop))

    def _take_events(self) -> None:
        """Go on with episodes whose environment has answered, and end those that are over their time."""
        before = time.perf_counter()
        events = self._tools.events(self._running.values(), bool(self._decoding))
        self._tool_seconds += time.perf_counter() - before
        for event in events:
            entry = self._running[event.name]
            if event.outcome is None:
                self._time_over(entry)
            elif event.outcome.result is None:
                self._fail(entry, f"environment {event.outcome.failure}")
            else:
                self._go_on(entry, event.outcome)

    def _go_on(self, entry: Running, outcome: StepOutcome) -> None:
        try:
            reason = self._reason_to_end(entry, outcome)
        except (ConfigError, DataError):
            self._fail(entry, f"environment made an observation that cannot be used: {traceback.format_exc()}")
            return
        if reason is None:
            self._request(entry)
        else:
            self._finish(entry, reason)

    def _reason_to_end(self, entry: Running, outcome: StepOutcome) -> StopReason | None:
        """Take in a result; return why the episode ends with it, or None when another turn follows."""
        result, episode = outcome.result, entry.episode
        assert result is not None
        episode.add_outcome(result, outcome)
        if result.done:
            return StopReason.ENV_DONE
        if result.observation is None:
            return entry.ended_by
        if episode.turns >= self._limits.max_turns:
            return StopReason.MAX_TURNS
        return episode.observe(result.observation)

    # -- ending -------------------------------------------------------------------------------------------------

    def _time_over(self, entry: Running) -> None:
        """End an episode on the last turn that it finished; without one it has failed."""
        if entry.request_id is not None:
            self._engine.abort([entry.request_id])
        if entry.episode.turns:
            self._finish(entry, StopReason.TIME_LIMIT)
        else:
            seconds = self._limits.max_seconds
            self._fail(entry, f"time limit: no turn ended within {seconds:g} s (rollout.agent.episode_timeout)")

    def _finish(self, entry: Running, reason: StopReason) -> None:
        self._leave(entry.name)
        trajectory = entry.episode.trajectory(reason)
        pending = self._scorer.submit(entry.episode.reward_prompt(reason), trajectory.response_text)
        self._unscored.append((trajectory, pending))

    def _fail(self, entry: Running, failure: str) -> None:
        """Try an episode again that failed outside the model, with nothing left of this try; or give it up."""
        self._leave(entry.name)
        episode = entry.episode
        if entry.retry < self._limits.max_retries:
            self._again.append(_Start(episode.prompt, episode.sample_index, entry.retry + 1))
        else:
            tries = f" (the last of {entry.retry + 1} tries)" if entry.retry else ""
            self._failed.append(episode.failed(f"{failure}{tries}"))

    def _leave(self, name: str) -> None:
        entry = self._running.pop(name, None)
        if entry is not None:
            self._acting -= entry.environment is not None
            self._decoding.pop(entry.request_id or "", None)
            self._tools.close(entry)

    def _hand_over(self, sink: TrajectorySink) -> None:
        if self._failed:
            sink.put(self._failed)
            self._failed = []
        done = [entry for entry in self._unscored if entry[1].done()]
        if not done:
            return
        self._unscored = [entry for entry in self._unscored if not entry[1].done()]
        sink.put([_scored(trajectory, pending.score) for trajectory, pending in done])


@final
class FixedSource:
    """Prompts that belong to one replica, in order."""

    def __init__(self, episodes: Sequence[tuple[Prompt, int]]) -> None:
        self._left = list(reversed(episodes))

    def take(self, k: int) -> list[tuple[Prompt, int]]:
        """Return the next `k` episodes, or those that are left."""
        return [self._left.pop() for _ in range(min(k, len(self._left)))]


@final
class TrajectoryList:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Append; the list is in the order in which episodes were scored."""
        self.trajectories.extend(trajectories)


@final
class LockStepSource:
    """What all tensor-parallel ranks of an engine take from: the leader takes, the others are told.

    `share` sends the leader's list to its peers and returns it on each of them.
    """

    def __init__(
        self, source: PromptSource | None, share: Callable[[list[tuple[Prompt, int]] | None], list[tuple[Prompt, int]]]
    ) -> None:
        self._source = source
        self._share = share

    def take(self, k: int) -> list[tuple[Prompt, int]]:
        """Return what the leader took, the same on all ranks of the engine. A collective: all of them call it."""
        return self._share(self._source.take(k) if self._source is not None else None)


@final
class Unscored:
    """Every score is 0: where ranks only follow their engine's leader, or a reward model alone will score."""

    def submit(self, prompt: Prompt, response_text: str) -> "Unscored":  # noqa: ARG002  (part of the interface)
        """Return itself as the pending score."""
        return self

    def done(self) -> bool:
        """Return True: nothing is ever under way."""
        return True

    @property
    def score(self) -> Score:
        """Zero, whatever the answer was."""
        return Score(0.0)

    def poll(self) -> None:
        """Nothing arrives, so there is nothing to take in."""

    def wait(self) -> bool:
        """Return True without waiting."""
        return True


def _scored(trajectory: Trajectory, score: Score) -> Trajectory:
    if score.failure is not None:
        return replace(trajectory, stop_reason=StopReason.FAILED, failure=f"reward {score.failure}")
    return replace(trajectory, score=score.value, score_extra=score.extra)
