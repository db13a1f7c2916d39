"""Rules of settings that need an optional package or a device. `rules` runs them once the machine is known."""

from collections.abc import Collection, Iterator
from typing import Final

from vrl.protocol.config.schema import Config

OPTIONAL: Final = {"deepspeed": "deepspeed"}  # what is imported, and the name it is installed by

Messages = Iterator[str]


def errors(config: Config, installed: Collection[str], *, gpu: bool) -> Messages:
    """`installed` are those of `OPTIONAL` that can be imported."""
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


def _missing(package: str) -> str:
    return f"a package that is not installed: pip install {OPTIONAL[package]}"
