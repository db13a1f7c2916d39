"""Settings that need an optional package or a device are refused on a machine without it."""

from typing import Any

import pytest

from tests.protocol.config.test_rules import config_with, faults
from vrl.protocol.config.rules import Machine, check

GPUS = Machine(gpus=8, cores=64, packages={"deepspeed", "liger_kernel"})
BARE_GPUS = Machine(gpus=8, cores=64)
CPU = Machine(gpus=0, cores=64, packages={"deepspeed", "liger_kernel"})
ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"


def cpu_adam(section: str, offload: bool = True) -> dict[str, Any]:
    settings = {f"{section}.optim.optimizer": "DeepSpeedCPUAdam", f"{section}.fsdp_config.optimizer_offload": offload}
    return settings | ({"algorithm.adv_estimator": "gae"} if section == CRITIC else {})


@pytest.mark.parametrize("section", [ACTOR, CRITIC])
def test_cpu_adam_needs_deepspeed(section: str):
    message = faults(cpu_adam(section), BARE_GPUS)
    assert f"{section}.optim.optimizer=DeepSpeedCPUAdam" in message
    assert "pip install deepspeed" in message
    assert check(config_with(cpu_adam(section)), GPUS) == ()


@pytest.mark.parametrize("section", [ACTOR, CRITIC])
def test_cpu_adam_of_a_gpu_is_an_offloaded_optimizer(section: str):
    assert f"set {section}.fsdp_config.optimizer_offload=True" in faults(cpu_adam(section, offload=False), GPUS)
    assert check(config_with(cpu_adam(section, offload=False)), CPU) == ()


def test_a_critic_that_is_not_there_needs_nothing():
    unused = cpu_adam(CRITIC) | {"algorithm.adv_estimator": "grpo"}
    assert check(config_with(unused), BARE_GPUS) == ()


@pytest.mark.parametrize("section", ["actor_rollout_ref.model", "critic.model"])
def test_liger_needs_its_package_and_a_gpu(section: str):
    wish = {f"{section}.use_liger": True, "algorithm.adv_estimator": "gae"}
    assert f"{section}.use_liger=True needs a GPU" in faults(wish, CPU)
    assert f"{section}.use_liger=True needs a GPU" in faults(wish | {"trainer.device": "cpu"}, GPUS)
    assert "pip install liger-kernel" in faults(wish, BARE_GPUS)
    assert check(config_with(wish), GPUS) == ()
