"""vLLM in the worker's own process, behind the `Engine` port. The only file that knows vLLM.

Built last in a process: `external_launcher` joins the process group that the learner made. With tensor parallelism all
ranks of an engine make the same calls in the same order.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from PIL.Image import Image
from torch import Tensor, nn
from vllm import LLM, SamplingParams, _custom_ops
from vllm.config import set_current_vllm_config
from vllm.inputs import TokensPrompt
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from vrl.models.images import decode_image
from vrl.models.policy import BAN_SHIFT
from vrl.protocol.errors import EngineError
from vrl.protocol.ports import EngineOutput, EngineRequest
from vrl.protocol.trajectory import Sampling, content_key


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine is started; sizes in tokens unless named otherwise."""

    path: str
    tokenizer_path: str
    device: str  # "cpu" or "cuda"
    dtype: str
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_bytes: int | None  # on a CPU; a GPU goes by its utilization
    enforce_eager: bool
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    trust_remote_code: bool
    limit_images: int  # images a row; 0 for text models
    pixel_limits: Mapping[str, int]
    seed: int  # equal on the ranks of one engine
    extra: Mapping[str, Any]


@final
class VllmEngine:
    """One engine, or this rank's part of one."""

    def __init__(self, settings: EngineSettings, banned_ids: Sequence[int], eos_ids: Sequence[int]) -> None:
        if settings.device == "cpu" and settings.dtype == "float32":
            # oneDNN compiles a matmul for each layer and batch size: hundreds of MiB, and float32 gains nothing by it.
            _custom_ops._supports_onednn = False
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        self._settings = settings
        self._llm = LLM(**_arguments(settings))
        # On a CPU the engine replaces torch.set_num_threads; training in this process gets it and its threads back.
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        self._engine = self._llm.llm_engine
        self._worker = self._engine.model_executor.driver_worker
        self._bias = {int(token): BAN_SHIFT for token in banned_ids}
        self._eos_ids = sorted(int(token) for token in eos_ids)
        self._running: set[str] = set()
        self._decoded: dict[str, Image] = {}  # since the last weight sync: the samples of a prompt share its images

    # -- generation ---------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            DataError: an image cannot be used.
        """
        prompt = TokensPrompt(prompt_token_ids=list(request.ids))
        if request.images:
            # The content hash spares the engine hashing pixels for every sample of a prompt.
            keys = [content_key(image) for image in request.images]
            prompt["multi_modal_data"] = {
                "image": [self._pixels(key, data) for key, data in zip(keys, request.images, strict=True)]
            }
            prompt["multi_modal_uuids"] = {"image": keys}
        self._engine.add_request(request.request_id, prompt, self._parameters(request.sampling))
        self._running.add(request.request_id)

    def step(self) -> list[EngineOutput]:
        """Advance the engine's batch by one step; return what finished."""
        with self._without_compiler():
            outputs = self._engine.step()
        finished = [output for output in outputs if isinstance(output, RequestOutput) and output.finished]
        self._running.difference_update(output.request_id for output in finished)
        return [_output(output) for output in finished]

    def num_unfinished(self) -> int:
        """Return how many requests run or wait."""
        return len(self._running)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests without an output; unknown names are fine, they may just have finished."""
        chosen = list(request_ids)
        self._engine.abort_request(chosen)
        self._running.difference_update(chosen)

    def _pixels(self, key: str, data: bytes) -> Image:
        if key not in self._decoded:
            self._decoded[key] = decode_image(data)
        return self._decoded[key]

    def _without_compiler(self) -> AbstractContextManager[object]:
        # Eager or not, the engine compiles small functions of its sampler when they are first used. On a CPU the C++
        # compiler takes 10 to 30 seconds to save microseconds.
        return torch.compiler.set_stance("force_eager") if self._settings.device == "cpu" else nullcontext()

    def _parameters(self, sampling: Sampling) -> SamplingParams:
        return SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop) or None,
            stop_token_ids=[] if sampling.ignore_eos else self._eos_ids,
            ignore_eos=sampling.ignore_eos,
            logit_bias=self._bias or None,
            logprobs=0,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    # -- memory and weights -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back, where the device can."""
        # Requests that run into a sleep never leave the front end's step loop: there must be none.
        self.abort(list(self._running))
        if self._settings.device == "cuda":
            self._llm.sleep(level=2)

    def wake(self, tags: Sequence[str]) -> None:
        """Take memory for "weights" or "kv_cache"."""
        if self._settings.device == "cuda":
            self._llm.wake_up(tags=list(tags))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Write full tensors by Hugging Face name; return how many.

        Raises:
            EngineError: an unknown name, another shape, or layers that were not written whole.
        """
        runner = self._worker.model_runner
        model: Any = runner.get_model()
        names: list[str] = []
        with set_current_vllm_config(self._engine.vllm_config):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(_with_tied_head(_counted(weights, names), self._is_tied()))
            except (
                ValueError,
                KeyError,
                AssertionError,
                RuntimeError,
            ) as error:  # what unknown names and shapes become
                sent = names[-1] if names else "nothing"
                raise EngineError(f"the engine refused a weight, the last one sent was {sent}: {error}") from error
            finally:
                unwritten = _unwritten(model)  # before finalising, which puts old values back without a word
                finalize_layerwise_reload(model, runner.model_config)
        if unwritten:
            raise EngineError(
                f"weight sync left engine layers unwritten: {', '.join(unwritten[:5])} "
                f"({len(unwritten)} in all, {len(names)} tensors were sent)"
            )
        return len(names)

    def _is_tied(self) -> bool:
        return bool(self._engine.vllm_config.model_config.hf_text_config.tie_word_embeddings)

    def reset_caches(self) -> None:
        """Drop keys, values and image embeddings, which older weights made; what runs computes its own again."""
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("the engine did not reset its prefix cache; it would answer with older weights")
        # Through the engine, not its model runner: the scheduler keeps a list of the embeddings it believes are there.
        self._engine.reset_encoder_cache()
        # Pixels are no older than before, but only the samples of one step share images: kept, they would only pile up.
        self._engine.reset_mm_cache()
        self._decoded.clear()

    def close(self) -> None:
        """End the engine, and with it this process's group: call it before the group is left, and nothing of it after.

        The engine destroys the default process group itself. If the group goes first, the engine's own end, at the
        latest at the exit of the process, fails.
        """
        self._engine.engine_core.shutdown()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the engine's own parameters, for tests that look at or change them.

        On a CPU the weights of linear layers are packed elsewhere and empty here; `load_weights` reaches those.
        """
        yield from self._worker.model_runner.get_model().named_parameters()


def _arguments(settings: EngineSettings) -> dict[str, Any]:
    images: dict[str, Any] = {}
    if settings.limit_images:
        images = {
            "limit_mm_per_prompt": {"image": settings.limit_images, "video": 0},
            "mm_processor_kwargs": dict(settings.pixel_limits) or None,
        }
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return {
        "model": settings.path,
        "tokenizer": settings.tokenizer_path,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": max(settings.max_num_batched_tokens, settings.max_model_len),
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enforce_eager": settings.enforce_eager or settings.device == "cpu",
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "enable_sleep_mode": settings.device == "cuda",
        "trust_remote_code": settings.trust_remote_code,
        "seed": settings.seed,
        # Log-probs of the distribution that is sampled from, after bans and temperature: what the learner computes.
        "logprobs_mode": "processed_logprobs",
        # The model folder's sampling defaults never apply.
        "generation_config": "vllm",
        "disable_log_stats": True,
        **images,
        **settings.extra,
    }


def _output(output: RequestOutput) -> EngineOutput:
    sampled = output.outputs[0]
    ids = tuple(sampled.token_ids)
    entries: Any = sampled.logprobs  # one mapping a token, of the sampled token alone
    return EngineOutput(
        request_id=output.request_id,
        ids=ids,
        log_probs=tuple(entry[token].logprob for entry, token in zip(entries, ids, strict=True)),
        finish_reason=sampled.finish_reason or "abort",
    )


def _with_tied_head(weights: Iterator[tuple[str, Tensor]], tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Send a tied embedding under the head's name, too: on a CPU the engine keeps a repacked copy for the head."""
    for name, tensor in weights:
        yield name, tensor
        if tied and name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", tensor


def _counted(weights: Iterator[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        names.append(name)
        yield name, tensor


def _unwritten(model: nn.Module) -> list[str]:
    """Name layers that were not written, or only in part, such as a fused projection that got q but not k."""
    out = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue  # written and processed; or attention scales, which a checkpoint does not hold
        wanted = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        # A vocabulary padded to a multiple is never written whole.
        enough = min(wanted, 1) if isinstance(layer, VocabParallelEmbedding) else wanted
        if info.load_numel < enough:
            out.append(name)
    return out
