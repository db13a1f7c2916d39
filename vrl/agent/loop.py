"""The turn loop: takes prompts, drives the engine by its own step, closes episodes, has them scored. Torch-free.

One loop runs in each rollout worker. Nothing waits for the slowest: an episode that ends is handed to a reward process
at once while all others keep decoding. Rows are token in, token out: ids are what the engine sampled.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

from vrl.agent.rewards.types import Score
from vrl.protocol.errors import DataError
from vrl.protocol.ports import Engine, EngineOutput, EngineRequest, PromptSource, Renderer, TrajectorySink
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory, request_seed

_STEPS_WITHOUT_PROGRESS = 1000  # engine steps in a row that finish nothing and admit nothing, beyond the token limits


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
class EpisodeLimits:
    """Token limits of an episode, and how many run together."""

    max_response_tokens: int
    max_model_len: int
    max_running: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSeconds:
    """Where the loop's time went."""

    engine: float
    waiting_for_rewards: float
    total: float


@final
@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt's ids, made once for all its samples."""

    ids: tuple[int, ...]
    expanded: tuple[int, ...]
    text: str


@final
class EpisodeLoop:
    """Runs episodes of one step. `sampling.max_tokens` bounds a turn."""

    def __init__(
        self, engine: Engine, renderer: Renderer, scorer: Scorer, limits: EpisodeLimits, sampling: Sampling
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._scorer = scorer
        self._limits = limits
        self._sampling = sampling
        self._rendered: dict[str, _Rendered] = {}
        self._running: dict[str, tuple[Prompt, int]] = {}
        self._unscored: list[tuple[Trajectory, Pending]] = []
        self._engine_seconds = 0.0

    def run(self, source: PromptSource, sink: TrajectorySink, step: int, version: int) -> LoopSeconds:
        """Take prompts until none is left; put each finished, scored trajectory into the sink."""
        begin = time.perf_counter()
        self._engine_seconds = 0.0
        open_source = True
        idle = 0
        while open_source or self._running:
            if open_source:
                open_source = self._admit(source, sink, step)
            if not self._running:
                continue
            before = time.perf_counter()
            outputs = self._engine.step()
            self._engine_seconds += time.perf_counter() - before
            idle = 0 if outputs else idle + 1
            if idle > self._limits.max_model_len + _STEPS_WITHOUT_PROGRESS:
                raise RuntimeError(
                    f"the engine made {idle} steps without finishing any of {len(self._running)} requests"
                )
            for output in outputs:
                self._close(output, version)
            self._scorer.poll()
            self._hand_over(sink)
        before = time.perf_counter()
        self._scorer.wait()
        waited = time.perf_counter() - before
        self._hand_over(sink)
        return LoopSeconds(engine=self._engine_seconds, waiting_for_rewards=waited, total=time.perf_counter() - begin)

    def _admit(self, source: PromptSource, sink: TrajectorySink, step: int) -> bool:
        """Fill the engine up; return False once the source is empty."""
        room = self._limits.max_running - len(self._running)
        if room <= 0:
            return True
        taken = source.take(room)
        for prompt, index in taken:
            try:
                self._start(prompt, index, step)
            except DataError:
                # An image that cannot be used fails its own episode only.
                sink.put([_failed(prompt, index, traceback.format_exc())])
        return bool(taken)

    def _start(self, prompt: Prompt, index: int, step: int) -> None:
        rendered = self._rendered.get(prompt.uid) or self._render(prompt)
        room = min(
            self._sampling.max_tokens,
            self._limits.max_response_tokens,
            self._limits.max_model_len - len(rendered.expanded),
        )
        if room < 1:
            raise DataError(
                f"row {prompt.row_id}: its prompt has {len(rendered.expanded)} tokens and leaves no room in a context "
                f"of {self._limits.max_model_len}; raise rollout.max_model_len or lower data.max_prompt_length"
            )
        request_id = f"{prompt.uid}/{index}"
        seed = request_seed(self._sampling.seed, step, prompt.uid, index)
        sampling = replace(self._sampling, max_tokens=room, seed=seed)
        request = EngineRequest(request_id=request_id, ids=rendered.ids, images=prompt.images, sampling=sampling)
        before = time.perf_counter()
        self._engine.add_request(request)
        self._engine_seconds += time.perf_counter() - before
        self._running[request_id] = (prompt, index)

    def _render(self, prompt: Prompt) -> _Rendered:
        ids = tuple(self._renderer.render(prompt.messages))
        rendered = _Rendered(
            ids, tuple(self._renderer.expand(ids, prompt.images)), self._renderer.decode(ids, keep_special=True)
        )
        self._rendered[prompt.uid] = rendered
        return rendered

    def _close(self, output: EngineOutput, version: int) -> None:
        prompt, index = self._running.pop(output.request_id)
        rendered = self._rendered[prompt.uid]
        before, sampled = len(rendered.expanded), len(output.ids)
        text = self._renderer.decode(output.ids)
        trajectory = Trajectory(
            prompt=prompt,
            sample_index=index,
            input_ids=rendered.expanded + output.ids,
            loss_mask=(0,) * before + (1,) * sampled,
            rollout_log_probs=(0.0,) * before + output.log_probs,
            turn_ids=(-1,) * before + (0,) * sampled,
            policy_versions=(-1,) * before + (version,) * sampled,
            prompt_length=before,
            stop_reason=StopReason.ANSWER if output.finish_reason == "stop" else StopReason.LENGTH,
            prompt_text=rendered.text,
            response_text=text,
            images=prompt.images,
        )
        self._unscored.append((trajectory, self._scorer.submit(prompt, text)))

    def _hand_over(self, sink: TrajectorySink) -> None:
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


def _failed(prompt: Prompt, index: int, failure: str) -> Trajectory:
    return Trajectory(
        prompt=prompt,
        sample_index=index,
        input_ids=(0,),
        loss_mask=(0,),
        rollout_log_probs=(0.0,),
        turn_ids=(-1,),
        policy_versions=(-1,),
        prompt_length=1,
        stop_reason=StopReason.FAILED,
        prompt_text="",
        response_text="",
        failure=failure,
    )
