"""One episode as a row that only grows: prompt, model turns, observations. The turn loop drives it. Torch-free.

Two lists run side by side: `ids` with one placeholder an image, which the engine gets and expands by itself, and the
expanded row that is trained on. Nothing is ever taken back from either.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from vrl.agent.environments.types import Observation, StepResult
from vrl.agent.environments.wire import StepOutcome
from vrl.protocol.errors import DataError
from vrl.protocol.messages import placed_images, replaced_images
from vrl.protocol.ports import EngineOutput, EngineRequest, Renderer
from vrl.protocol.trajectory import Prompt, Sampling, StopReason, Trajectory, content_key, request_seed


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode, and how many run together. `Sampling.max_tokens` bounds a turn."""

    max_response_tokens: int  # of everything after the prompt, observations included
    max_model_len: int  # tokens of a whole row
    max_running: int  # episodes that decode together
    max_turns: int = 1  # model turns, where there is an environment
    max_seconds: float = 600.0  # wall clock from the episode's start, where there is an environment
    max_plain_seconds: float = 7200.0  # the same, where there is none
    max_retries: int = 0  # new tries after a failure outside the model
    max_images: int = 0  # that observations bring
    max_row_images: int = 0  # those of the prompt included: what the engine takes
    max_image_pixels: int = 1 << 24  # an image of an observation; a larger one becomes a text that says so

    def seconds_of(self, prompt: Prompt) -> float:
        """Return the wall clock of an episode of this row."""
        return self.max_plain_seconds if prompt.env_name is None else self.max_seconds


@final
@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's ids, made once for all its samples."""

    ids: tuple[int, ...]
    expanded: tuple[int, ...]
    text: str
    state: str

    @classmethod
    def of(cls, prompt: Prompt, renderer: Renderer, schemas: Sequence[Mapping[str, Any]] = ()) -> Self:
        """Render a prompt with the schemas of its environment. Raises DataError where it cannot be used."""
        ids = tuple(renderer.render(prompt.messages, schemas))
        text = renderer.decode(ids, keep_special=True)
        return cls(ids, tuple(renderer.expand(ids, prompt.images)), text, state_hash(text, prompt.images))


def state_hash(seen: str, images: Sequence[bytes]) -> str:
    """Return a hash of what a model saw before a turn: its text and the contents of its images."""
    return hashlib.sha256("\0".join([seen, *map(content_key, images)]).encode(errors="replace")).hexdigest()


@final
class Episode:
    """The row of one try of one sample of a prompt."""

    def __init__(
        self, prompt: Prompt, sample_index: int, rendered: RenderedPrompt, renderer: Renderer, limits: EpisodeLimits
    ) -> None:
        self.prompt = prompt
        self.sample_index = sample_index
        self.turns = 0
        self._rendered = rendered
        self._renderer = renderer
        self._limits = limits
        self._ids = list(rendered.ids)
        self._expanded = list(rendered.expanded)
        self._images = list(prompt.images)
        self._mask = [0] * len(self._expanded)
        self._log_probs = [0.0] * len(self._expanded)
        self._turn_ids = [-1] * len(self._expanded)
        self._versions = [-1] * len(self._expanded)
        self._sampled: list[tuple[int, ...]] = []  # a turn each, as the engine gave them
        self._rewards: list[float] = []
        self._info: list[Mapping[str, Any]] = []
        self._cut = False
        self._states = [rendered.state]

    @property
    def room(self) -> int:
        """Tokens that may still follow, 0 or less when the response or the context is full."""
        return self._room_behind(len(self._expanded))

    @property
    def was_cut(self) -> bool:
        """Whether a limit of tokens ended the last turn, and not the model."""
        return self._cut

    def _room_behind(self, length: int) -> int:
        response = length - len(self._rendered.expanded)
        return min(self._limits.max_response_tokens - response, self._limits.max_model_len - length)

    @property
    def _most_images(self) -> int:
        return min(self._limits.max_row_images, len(self.prompt.images) + self._limits.max_images)

    def request(self, sampling: Sampling, step: int, retry: int) -> EngineRequest:
        """Return what the engine is to sample next; there must be room."""
        prompt, index = self.prompt, self.sample_index
        seed = request_seed(sampling.seed, step, prompt.uid, index, self.turns, retry)
        return EngineRequest(
            request_id=f"{prompt.uid}/{index}/{self.turns}/{retry}",
            ids=tuple(self._ids),
            images=tuple(self._images),
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, self.room), seed=seed),
        )

    def add_turn(self, output: EngineOutput, version: int) -> None:
        """Append what the engine sampled, as it was sampled.

        Raises:
            DataError: it holds an image or vision token, which would shift all images behind it.
        """
        self._ids += output.ids
        self._append(output.ids, output.log_probs, (1, self.turns, version))
        self._sampled.append(output.ids)
        self._cut = output.finish_reason != "stop"
        self.turns += 1
        if not set(self._renderer.banned_ids).isdisjoint(output.ids):
            raise DataError("the engine sampled an image or vision token, although they are banned")

    def _append(self, ids: Sequence[int], log_probs: Sequence[float], marks: tuple[int, int, int]) -> None:
        self._expanded += ids
        self._log_probs += log_probs
        for column, mark in zip((self._mask, self._turn_ids, self._versions), marks, strict=True):
            column += [mark] * len(ids)

    def turn_text(self, stop: Sequence[str] = ()) -> str:
        """Return the last turn's text for its environment: without special tokens, and cut behind a stop string.

        A stop string may end inside the last token. What the token holds beyond it stays in the row, and is not acted
        on.
        """
        text = self._renderer.decode(self._last_turn)
        ends = [text.find(mark) + len(mark) for mark in stop if mark in text]
        return text[: min(ends)] if ends else text

    def add_outcome(self, result: StepResult, outcome: StepOutcome) -> None:
        """Keep what the environment gave the last turn."""
        seconds = {"tool_seconds": outcome.run_seconds, "queue_seconds": outcome.wait_seconds}
        self._rewards.append(result.reward)
        self._info.append({**result.info, "cut": int(self._cut), **seconds})

    def add_final_reward(self, reward: float) -> None:
        """Add the environment's reward of the whole episode to that of the last turn."""
        missing = self.turns - len(self._rewards)
        self._rewards += [0.0] * missing
        self._info += [{"cut": int(self._cut)}] * missing
        self._rewards[-1] += reward

    def observe(self, observation: Observation) -> StopReason | None:
        """Append an observation; if it does not fit, leave the row as it is and return why the episode ends.

        Raises:
            DataError, ConfigError: the environment made messages that cannot be rendered.
        """
        messages, images = self._usable(observation)
        if images and len(self._images) + len(images) > self._most_images:
            return StopReason.IMAGE_LIMIT
        ids = self._renderer.observation_ids(messages, len(images), self._ids[-1])
        expanded = self._renderer.expand(ids, images)
        if self._room_behind(len(self._expanded) + len(expanded)) < 1:
            return StopReason.CONTEXT_FULL
        self._ids += ids
        self._images += images
        self._append(expanded, [0.0] * len(expanded), (0, -1, -1))
        self._states.append(state_hash(str(messages), images))
        self._check_sides()
        return None

    def _usable(self, observation: Observation) -> tuple[Sequence[Mapping[str, Any]], list[bytes]]:
        """Return messages and images, with a text in the place of each image that the model cannot take."""
        faults: dict[int, str] = {}
        for number, image in enumerate(observation.images):
            try:
                self._renderer.check_image(image, self._limits.max_image_pixels)
            except DataError as error:
                faults[number] = f"[image left out: {error}]"
        messages = placed_images(observation.messages, len(observation.images))
        kept = [image for number, image in enumerate(observation.images) if number not in faults]
        return replaced_images(messages, faults), kept

    def _check_sides(self) -> None:
        """The engine expands the whole of `ids`; that must give the row that was put together from its parts."""
        if self._renderer.expand(self._ids, self._images) != self._expanded:
            raise DataError("the ids that the engine gets and the row that is trained on drifted apart")

    def _check_mask(self) -> None:
        """What the mask picks from the row must be what the engine sampled, turn by turn."""
        marked: list[list[int]] = [[] for _ in self._sampled]
        for token, sampled, turn in zip(self._expanded, self._mask, self._turn_ids, strict=True):
            if sampled:
                marked[turn].append(token)
        if [tuple(ids) for ids in marked] != self._sampled:
            lengths = [len(ids) for ids in self._sampled], [len(ids) for ids in marked]
            raise ValueError(f"turns of {lengths[0]} tokens were sampled, the loss mask holds {lengths[1]} or others")

    @property
    def _last_turn(self) -> tuple[int, ...]:
        return self._sampled[-1] if self._sampled else ()

    def trajectory(self, reason: StopReason) -> Trajectory:
        """Return the finished row."""
        self._check_mask()
        missing = self.turns - len(self._rewards) if self._rewards or self.prompt.env_name else 0
        return Trajectory(
            prompt=self.prompt,
            sample_index=self.sample_index,
            input_ids=tuple(self._expanded),
            loss_mask=tuple(self._mask),
            rollout_log_probs=tuple(self._log_probs),
            turn_ids=tuple(self._turn_ids),
            policy_versions=tuple(self._versions),
            prompt_length=len(self._rendered.expanded),
            stop_reason=reason,
            prompt_text=self._rendered.text,
            response_text=self.response_text,
            images=tuple(self._images),
            turn_rewards=(*self._rewards, *[0.0] * missing),
            turn_info=(*self._info, *[{}] * missing),
            turn_states=tuple(self._states[: self.turns]),
        )

    @property
    def response_text(self) -> str:
        """What reward functions and people read; see `Trajectory`."""
        if self.prompt.env_name is None:
            return self._renderer.decode(self._last_turn)
        return self._renderer.decode(self._ids[len(self._rendered.ids) :], keep_special=True)

    def reward_prompt(self, reason: StopReason) -> Prompt:
        """Return the prompt with what reward functions may want to know in `extra_info`, where several turns can be.

        Keys: `last_turn` (text of the last model turn, special tokens left out), `num_turns`, `stop_reason`,
        `turn_rewards`, `turn_info` (what the environment reported, a mapping a turn, and whether a limit `cut` it).
        """
        if self.prompt.env_name is None:
            return self.prompt
        added = {
            "last_turn": self._renderer.decode(self._last_turn),
            "num_turns": self.turns,
            "stop_reason": str(reason),
            "turn_rewards": list(self._rewards),
            "turn_info": [dict(info) for info in self._info],
        }
        return replace(self.prompt, extra_info={**self.prompt.extra_info, **added})

    def failed(self, failure: str) -> Trajectory:
        """Return a row of no tokens that says why it failed, and shows what had been said until then."""
        row = failed_row(self.prompt, self.sample_index, failure)
        return replace(row, prompt_text=self._rendered.text, response_text=self.response_text)


def failed_row(prompt: Prompt, sample_index: int, failure: str) -> Trajectory:
    """Return the row of an episode that failed outside the model: one token that nothing is trained on."""
    return Trajectory(
        prompt=prompt,
        sample_index=sample_index,
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
