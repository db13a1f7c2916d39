"""Generation through Hugging Face's own model code, behind the `Engine` port. `engines.build_engine` makes it for
`rollout.name=hf`: the reference in tests, and an engine for machines without vLLM.

Each rank holds a whole copy of the model; ranks of one tensor-parallel engine all do the same work.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vrl.models.decoding import Decoder, RowCache, Segment
from vrl.models.images import ImageCache
from vrl.models.loading import load_policy
from vrl.models.policy import BAN_SHIFT, CausalPolicy
from vrl.protocol.errors import EngineError
from vrl.protocol.ports import EngineOutput, EngineRequest, Renderer
from vrl.protocol.trajectory import Sampling
from vrl.workers.building import BuildContext


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What runs at a time: tokens of a row, rows, tokens of a step (a longer prompt still runs, alone)."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@final
@dataclass(slots=True, eq=False, kw_only=True)
class _Row:
    """A request under way."""

    request: EngineRequest
    prompt: list[int]  # expanded
    positions: Int[Tensor, "T 3"] | None  # of the prompt
    max_tokens: int
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cache: RowCache | None = None  # None: waiting

    @property
    def pending(self) -> list[int]:
        """Tokens that are not in the cache: the last one, or all of a row that waits."""
        return self.prompt + self.ids if self.cache is None else self.ids[-1:]

    def pending_positions(self) -> Int[Tensor, "N 3"] | None:
        """Return the 3-D positions of the pending tokens: sampled text counts on behind the prompt in all three."""
        if self.positions is None:
            return None
        following = torch.arange(len(self.ids))[:, None] + self.positions.max() + 1
        sampled = following.expand(-1, 3)
        return torch.cat([self.positions, sampled]) if self.cache is None else sampled[-1:]


@final
class HfEngine:
    """See `protocol.ports.Engine`."""

    def __init__(
        self, policy: CausalPolicy, renderer: Renderer, images: ImageCache | None, limits: EngineLimits
    ) -> None:
        self._policy = policy
        self._decoder = Decoder(policy)
        self._renderer = renderer
        self._images = images
        self._limits = limits
        self._rows: dict[str, _Row] = {}

    @classmethod
    def build(cls, context: BuildContext) -> Self:
        """Load a whole copy of the model in the rollout's dtype."""
        model, rollout = context.config.actor_rollout_ref.model, context.config.actor_rollout_ref.rollout
        policy = load_policy(
            model.path,
            context.dtype(rollout.dtype),
            override_config=model.override_config,
            trust_remote_code=model.trust_remote_code,
        )
        limits = EngineLimits(
            max_model_len=context.config.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
        )
        return cls(policy.to(context.device), context.renderer, context.images, limits)

    # -- generation ---------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            EngineError: its name is taken, or its prompt fills the context.
            DataError: image marks and images differ, or an image cannot be used.
        """
        if request.request_id in self._rows:
            raise EngineError(f"request {request.request_id!r} is running already; names must be unique")
        prompt = self._renderer.expand(request.ids, request.images)
        room = self._limits.max_model_len - len(prompt)
        if room < 1:
            raise EngineError(
                f"request {request.request_id!r}: its prompt has {len(prompt)} tokens and leaves no room in a context "
                f"of {self._limits.max_model_len}; raise rollout.max_model_len or shorten the prompt"
            )
        positions = self._renderer.positions(prompt, request.images)
        self._rows[request.request_id] = _Row(
            request=request,
            prompt=prompt,
            positions=None if positions is None else torch.as_tensor(positions),
            max_tokens=min(room, request.sampling.max_tokens),
            generator=torch.Generator().manual_seed(request.sampling.seed),
        )

    def step(self) -> list[EngineOutput]:
        """Advance what runs by one token, start waiting requests as far as the limits allow; return what finished."""
        rows = self._chosen()
        if not rows:
            return []
        logits = self._decoder.logits([self._segment(row) for row in rows]).cpu()
        if self._renderer.banned_ids:
            logits[:, list(self._renderer.banned_ids)] += BAN_SHIFT
        finished = []
        for row, scores in zip(rows, logits, strict=True):
            token, log_prob = sample_token(scores, row.request.sampling, row.generator)
            row.ids.append(token)
            row.log_probs.append(log_prob)
            reason = self._finish_reason(row)
            if reason is not None:
                finished.append(_output(row, reason))
        for output in finished:
            del self._rows[output.request_id]
        return finished

    def num_unfinished(self) -> int:
        """Return how many requests run or wait."""
        return len(self._rows)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests without an output; unknown names are fine, they may just have finished."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def _chosen(self) -> list[_Row]:
        """Return the rows of this step: all that run, and waiting ones in order as long as they fit."""
        rows = [row for row in self._rows.values() if row.cache is not None]
        tokens = len(rows)
        for row in self._rows.values():
            if row.cache is not None:
                continue
            tokens += len(row.pending)
            is_full = len(rows) >= self._limits.max_num_seqs or tokens > self._limits.max_num_batched_tokens
            if rows and is_full:
                break
            rows.append(row)
        return rows

    def _segment(self, row: _Row) -> Segment:
        ids, positions = row.pending, row.pending_positions()
        images = None
        if row.cache is None:
            row.cache = RowCache(len(row.prompt) + row.max_tokens)
            images = self._pixels(row.request.images)
        return Segment(cache=row.cache, ids=ids, positions=positions, images=images)

    def _pixels(self, images: Sequence[bytes]) -> tuple[Tensor, Tensor] | None:
        if not images or self._images is None:
            return None
        patches, grids = self._images.batch(images)
        return None if patches is None or grids is None else (patches, grids)

    def _finish_reason(self, row: _Row) -> str | None:
        sampling = row.request.sampling
        if not sampling.ignore_eos and row.ids[-1] in self._renderer.eos_ids:
            return "stop"
        if sampling.stop:
            text = self._renderer.decode(row.ids)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(row.ids) >= row.max_tokens else None

    # -- memory and weights -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Drop what runs; the weights stay."""
        self._rows.clear()

    def wake(self, tags: Sequence[str]) -> None:
        """Nothing was given back, so there is nothing to take."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Copy full tensors by Hugging Face name; return how many.

        Raises:
            EngineError: an unknown name, another shape, or parameters that were not sent.
        """
        parameters = dict(self._policy.hf_named_parameters())
        written: set[str] = set()
        with torch.no_grad():
            for name, tensor in weights:
                parameter = parameters.get(name)
                if parameter is None:
                    raise EngineError(f"weight sync sent {name!r}, which the engine's model does not have")
                if parameter.shape != tensor.shape:
                    raise EngineError(
                        f"weight sync sent {name!r} in shape {tuple(tensor.shape)}; "
                        f"the engine's has {tuple(parameter.shape)}"
                    )
                parameter.copy_(tensor)
                written.add(name)
        unwritten = sorted(parameters.keys() - written)
        if unwritten:
            raise EngineError(
                f"weight sync left engine parameters unwritten: {', '.join(unwritten[:5])} "
                f"({len(unwritten)} in all, {len(written)} tensors were sent)"
            )
        return len(written)

    def reset_caches(self) -> None:
        """Drop all keys and values; running rows compute theirs again with the present weights."""
        for row in self._rows.values():
            row.cache = None

    def close(self) -> None:
        """Drop what runs."""
        self._rows.clear()


def sample_token(logits: Float[Tensor, " V"], sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Draw a token; return it with its log-prob under the distribution that was drawn from.

    That distribution is softmax(logits / temperature) within `top_k` and `top_p`. Greedy takes the likeliest token; its
    log-prob is that of temperature 1, as in vLLM.

    Args:
        logits: float32 on the CPU, after bans.
        sampling: temperature, top_k and top_p.
        generator: this request's own.
    """
    if sampling.greedy:
        log_probs = logits.log_softmax(dim=-1)
        token = int(log_probs.argmax())
    else:
        log_probs = _truncated(logits / sampling.temperature, sampling).log_softmax(dim=-1)
        token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
    return token, float(log_probs[token])


def _truncated(scores: Float[Tensor, " V"], sampling: Sampling) -> Float[Tensor, " V"]:
    """Keep the `top_k` likeliest tokens, and of those the fewest whose probability reaches `top_p`."""
    if 0 < sampling.top_k < len(scores):
        smallest = scores.topk(sampling.top_k).values[-1]
        scores = scores.masked_fill(scores < smallest, -math.inf)
    if sampling.top_p < 1.0:
        ordered, index = scores.sort(descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # 0 for the likeliest, which always stays
        scores = scores.index_fill(0, index[before >= sampling.top_p], -math.inf)
    return scores


def _output(row: _Row, reason: str) -> EngineOutput:
    return EngineOutput(
        request_id=row.request.request_id, ids=tuple(row.ids), log_probs=tuple(row.log_probs), finish_reason=reason
    )
