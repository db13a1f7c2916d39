"""The turn loop: takes prompts, drives the engine by its own step, closes episodes, has them scored. Torch-free.

    prompt -> model turn -> observation -> model turn ... -> scored row

One loop runs in each rollout worker. Nothing waits for the slowest: a turn that ends goes to its environment, and an
episode that ends to a reward process, while all others keep decoding. Rows are token in, token out: ids are what the
engine sampled.
"""

import time
import traceback
from dataclasses import dataclass, replace
from typing import Protocol, final

from vrl.agent.environments.types import StepResult
from vrl.agent.environments.wire import StepOutcome
from vrl.agent.episode import Episode, EpisodeLimits, RenderedPrompt, failed_row
from vrl.agent.retries import Retries, Start
from vrl.agent.rewards.types import Score
from vrl.agent.tool_side import Running, ToolSide
from vrl.protocol.errors import ConfigError, DataError
from vrl.protocol.ports import Engine, EngineOutput, PromptSource, Renderer, TrajectorySink
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory

_STEPS_WITHOUT_PROGRESS = 1000  # engine steps in a row that finish nothing and admit nothing, beyond the token limits
_LAST_CALL_SECONDS = 30.0  # for the reward of the whole, when the time of an episode is over
_ROUNDS_A_LOOK = 64  # of the loop, between looks at the clock while only plain rows run; each tells all ranks
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
        self._retries = Retries(limits.max_retries)
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
        open_source, rounds = True, 0
        try:
            while open_source or self._running or self._retries:
                open_source = self._admit(source, open_source)
                if self._decoding:
                    self._decode()
                rounds += 1
                look = bool(self._decoding) and rounds % _ROUNDS_A_LOOK == 0
                if self._acting or self._retries.resting or look:
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
        while self._retries.ready and self._room():
            self._start(self._retries.ready.pop(0))
        room = self._room()
        if not open_source or not room:
            return open_source
        taken = source.take(room)
        for prompt, index in taken:
            self._start(Start(prompt, index))
        return bool(taken)

    def _room(self) -> int:
        running = self._limits.max_running
        return max(min(running - len(self._decoding), _LIVE_PER_DECODING * running - len(self._running)), 0)

    def _start(self, start: Start) -> None:
        prompt = start.prompt
        try:
            rendered = self._rendered.get(prompt.uid) or self._render(prompt)
            episode = Episode(prompt, start.index, rendered, self._renderer, self._limits)
            entry = Running(
                start=start,
                episode=episode,
                deadline=time.monotonic() + self._limits.seconds_of(prompt),
                environment=self._tools.start(prompt, start.most_calls),
            )
            self._running[entry.name] = entry
            self._acting += entry.environment is not None
            self._request(entry)
        except DataError:
            # An image that cannot be used fails its own episode only.
            self._leave(start.name)
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
        request = entry.episode.request(self._sampling, self._step, entry.start.retry)
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
        if not output.ids:
            self._fail(entry, f"engine: it returned no token, finish_reason is {output.finish_reason!r}")
            return
        try:
            episode.add_turn(output, self._version)
        except DataError:
            self._fail(entry, traceback.format_exc())
            return
        entry.ended_by = StopReason.LENGTH if episode.was_cut else StopReason.ANSWER
        if entry.environment is None:
            self._finish(entry, entry.ended_by)
        elif episode.was_cut and episode.room < 1:
            self._end(entry, entry.ended_by)  # half a turn is no action: its environment does not see it
        else:
            self._tools.step(entry, episode.turn_text(self._sampling.stop), episode.was_cut)

    def _take_events(self) -> None:
        """Go on with episodes whose environment has answered or whose pause is over; end those over their time."""
        before = time.perf_counter()
        events = self._tools.events(self._running.values(), self._retries.resting.values(), bool(self._decoding))
        self._tool_seconds += time.perf_counter() - before
        for event in events:
            if event.name in self._retries.resting:
                self._retries.rested(event.name)
                continue
            entry, outcome = self._running[event.name], event.outcome
            if outcome is None:
                self._time_over(entry)
            elif outcome.result is None:
                failure = f"environment {outcome.failure}"
                self._fail(entry, failure, charged=outcome.charged, suspect=outcome.suspect)
            else:
                self._go_on(entry, outcome, outcome.result)

    def _go_on(self, entry: Running, outcome: StepOutcome, result: StepResult) -> None:
        episode = entry.episode
        if entry.ending is not None:
            episode.add_final_reward(result.reward)
            self._finish(entry, entry.ending)
            return
        episode.add_outcome(result, outcome)
        if result.done or result.observation is None:
            self._finish(entry, StopReason.ENV_DONE if result.done else entry.ended_by)
            return
        try:
            last = episode.turns >= self._limits.max_turns
            reason = StopReason.MAX_TURNS if last else episode.observe(result.observation)
        except (ConfigError, DataError):
            self._fail(entry, f"environment made an observation that cannot be used: {traceback.format_exc()}")
            return
        if reason is None:
            self._request(entry)
        else:
            self._end(entry, reason)

    # -- ending -------------------------------------------------------------------------------------------------

    def _time_over(self, entry: Running) -> None:
        """End an episode that decodes on the last turn that it finished.

        Without one, as every plain row is, it has failed, and so it has while its environment works: what a model said
        before a call that hangs is no reason for a score.
        """
        limit = f"{self._limits.seconds_of(entry.start.prompt):g} s (rollout.agent.episode_timeout)"
        if entry.request_id is None:
            self._fail(entry, f"time limit: a tool call was still under way after {limit}")
            return
        self._engine.abort([entry.request_id])
        self._decoding.pop(entry.request_id)
        entry.request_id = None
        if entry.episode.turns:
            entry.deadline = time.monotonic() + _LAST_CALL_SECONDS
            self._end(entry, StopReason.TIME_LIMIT)
        else:
            self._fail(entry, f"time limit: no turn ended within {limit}")

    def _end(self, entry: Running, reason: StopReason) -> None:
        """End an episode that its environment does not end; that is asked for the reward of the whole first."""
        entry.ending = reason
        self._tools.finish(entry)

    def _finish(self, entry: Running, reason: StopReason) -> None:
        self._leave(entry.name)
        trajectory = replace(entry.episode.trajectory(reason), retries=entry.start.retry + entry.start.reruns)
        pending = self._scorer.submit(entry.episode.reward_prompt(reason), trajectory.response_text)
        self._unscored.append((trajectory, pending))

    def _fail(self, entry: Running, failure: str, *, charged: bool = True, suspect: bool = False) -> None:
        """Try an episode again that failed outside the model, with nothing left of this try; or give it up."""
        self._leave(entry.name)
        start = entry.start
        if not self._retries.again(start, failure, charged=charged, suspect=suspect):
            tries = f" (the last of {start.retry + 1} tries)" if start.retry else ""
            failed = entry.episode.failed(f"{failure}{tries}")
            self._failed.append(replace(failed, retries=start.retry + start.reruns))

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
