"""Rules of settings that need an optional package or a device. `rules` runs them once the machine is known."""

from collections.abc import Collection, Iterator
from typing import Final

from vrl.protocol.config.schema import Config

OPTIONAL: Final = {
    "deepspeed": "deepspeed",
    "liger_kernel": "liger-kernel",
}  # what is imported, and the name it is installed by

Messages = Iterator[str]


def errors(config: Config, installed: Collection[str], *, gpu: bool) -> Messages:
    """Yield what the machine lacks. `installed` are those of `OPTIONAL` that can be imported."""
    yield from _optimizers(config, installed, gpu=gpu)
    yield from _kernels(config, installed, gpu=gpu)


def _optimizers(config: Config, installed: Collection[str], *, gpu: bool) -> Messages:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    roles = [("actor_rollout_ref.actor", actor.optim, actor.fsdp_config)]
    if config.needs_critic:
        roles.append(("critic", critic.optim, critic.fsdp_config))
    for section, optim, fsdp in roles:
        wish = f"{section}.optim.optimizer={optim.optimizer}"
        if optim.optimizer == "AdamW":
            continue
        if "deepspeed" not in installed:
            yield f"{wish} needs {_missing('deepspeed')}, or set optimizer=AdamW"
        if gpu and not fsdp.optimizer_offload:
            yield (
                f"{wish} has its state in host memory at all times: "
                f"set {section}.fsdp_config.optimizer_offload=True or optimizer=AdamW"
            )


def _kernels(config: Config, installed: Collection[str], *, gpu: bool) -> Messages:
    wishes = {"actor_rollout_ref.model": config.actor_rollout_ref.model.use_liger}
    wishes["critic.model"] = config.needs_critic and config.critic.model.use_liger
    for section, wish in wishes.items():
        if wish and not gpu:
            yield f"{section}.use_liger=True needs a GPU, and ranks run on the CPU here: set it to False"
        elif wish and "liger_kernel" not in installed:
            yield f"{section}.use_liger=True needs {_missing('liger_kernel')}, or set it to False"


def _missing(package: str) -> str:
    return f"a package that is not installed: pip install {OPTIONAL[package]}"
