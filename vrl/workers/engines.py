"""Which engine a rollout worker gets, from the settings."""

from vrl.protocol.ports import Engine
from vrl.workers.building import BuildContext


def build_engine(context: BuildContext, replica: int) -> Engine:
    """Start the engine that `rollout.name` asks for. vLLM is imported only when it is used."""
    config = context.config
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "hf":
        from vrl.workers.hf_engine import HfEngine  # noqa: PLC0415  (engines are optional, each behind its own door)

        return HfEngine.build(context)
    from vrl.workers.vllm_engine import EngineSettings, VllmEngine  # noqa: PLC0415

    model = config.actor_rollout_ref.model
    limits = {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}
    settings = EngineSettings(
        path=model.path,
        tokenizer_path=config.tokenizer_path,
        device=context.device.type,
        dtype=str(context.dtype(rollout.dtype)).removeprefix("torch."),
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        max_model_len=config.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_bytes=int(rollout.kv_cache_gib * 2**30) if context.device.type == "cpu" else None,
        enforce_eager=rollout.enforce_eager,
        enable_prefix_caching=rollout.enable_prefix_caching,
        # On a CPU a request with a seed of its own cannot be prefilled in pieces ("Generator does not use offset").
        enable_chunked_prefill=rollout.enable_chunked_prefill and context.device.type != "cpu",
        trust_remote_code=model.trust_remote_code,
        limit_images=0 if context.images is None else (rollout.limit_images or 1),
        pixel_limits={name: value for name, value in limits.items() if value is not None},
        seed=config.rollout_seed + replica,
        extra=dict(rollout.engine_kwargs.get("vllm", {})),
    )
    return VllmEngine(settings, context.renderer.banned_ids, context.renderer.eos_ids)
