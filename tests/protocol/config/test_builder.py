"""Plain dictionaries to settings and back: types are checked, keys are known, defaults hold."""

import dataclasses
import pickle
from typing import Any, get_origin

import pytest

from vrl.protocol.config.builder import build, to_dict
from vrl.protocol.config.keys import key_types, leaf_keys
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def wrong_value(kind: Any) -> Any:
    """Return a value that no key of this type may have."""
    if kind is str or str in getattr(kind, "__args__", ()):
        return [1.5]
    return {"a": 1} if get_origin(kind) is tuple else "no such value"


def test_no_values_are_the_defaults():
    assert build({}) == Config()


def test_round_trip_is_equal_and_plain():
    config = build(
        {
            "data": {"train_files": ["a.parquet", "b.parquet"], "seed": 3},
            "actor_rollout_ref": {
                "model": {"override_config": {"rope": {"type": "yarn", "list": (1, 2)}}},
                "actor": {"optim": {"betas": [0.9, 0.95]}, "clip_ratio_high": 0.28},
            },
            "critic": {"enable": True},
        }
    )
    values = to_dict(config)
    assert values["data"]["train_files"] == ["a.parquet", "b.parquet"]
    assert values["actor_rollout_ref"]["model"]["override_config"] == {"rope": {"type": "yarn", "list": [1, 2]}}
    assert build(values) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_partly_given_section_keeps_the_defaults_of_its_place():
    config = build({"critic": {"optim": {"weight_decay": 0.1}}})
    assert config.critic.optim.lr == 1e-5
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.critic.optim.weight_decay == 0.1


@pytest.mark.parametrize("key", leaf_keys())
def test_a_value_of_the_wrong_type_names_the_whole_key(key: str):
    value = wrong_value(key_types()[key])
    with pytest.raises(ConfigError) as error:
        build(nested(key, value))
    assert str(error.value).startswith(f"{key}={value!r}: ")
    assert str(error.value).endswith("is wanted")


@pytest.mark.parametrize(
    ("key", "value", "built"),
    [
        ("trainer.worker_start_timeout", 5, 5.0),
        ("data.seed", None, None),
        ("data.train_files", "one.parquet", ("one.parquet",)),
        ("trainer.experiment_name", 7, "7"),
        ("critic.enable", False, False),
        ("actor_rollout_ref.actor.clip_ratio_low", 1, 1.0),
    ],
)
def test_values_that_stand_for_another(key: str, value: Any, built: Any):
    found: Any = build(nested(key, value))
    for name in key.split("."):
        found = getattr(found, name)
    assert found == built
    assert type(found) is type(built)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("data.train_batch_size", True, "a whole number"),
        ("data.train_batch_size", 1.0, "a whole number"),
        ("data.train_batch_size", None, "a whole number"),
        ("data.seed", "3", "a whole number or null"),
        ("actor_rollout_ref.actor.optim.lr", "1e-6", "a number"),
        ("actor_rollout_ref.actor.optim.lr", False, "a number"),
        ("actor_rollout_ref.actor.optim.betas", [0.9], r"a list of 2 values \(a number, a number\)"),
        ("trainer.device", "npu", "'auto' or 'cpu' or 'cuda'"),
        ("trainer.logger", ["console", 1.5], "a list of text"),
        ("trainer.val_only", 1, "true or false"),
        ("critic.optim", 3, "a section with keys of its own"),
        ("custom_reward_function.reward_kwargs", [1], "a dictionary"),
    ],
)
def test_the_message_says_what_is_wanted(key: str, value: Any, wanted: str):
    with pytest.raises(ConfigError, match=f"{wanted} is wanted"):
        build(nested(key, value))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("data.train_batchsize", "did you mean data.train_batch_size?"),
        ("trainer.lr", "did you mean warm_start.lr or critic.optim.lr or actor_rollout_ref.actor.optim.lr?"),
        ("critic.model.fsdp_config", "write critic.fsdp_config"),
        ("actor_rollout_ref.model.use_remove_padding", "leave it out; rows are always packed"),
        ("actor_rollout_ref.model.lora", "leave it out; LoRA is set by lora_rank"),
        ("data.qqqqqq", "configs/ppo_trainer.yaml lists all settings"),
    ],
)
def test_an_unknown_key_gets_a_hint(key: str, hint: str):
    with pytest.raises(ConfigError) as error:
        build(nested(key, 1))
    assert str(error.value).startswith(f"{key}: ")
    assert hint in str(error.value)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().trainer.seed = 2  # type: ignore[misc]
