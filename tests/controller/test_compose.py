"""Config files and overrides become settings; every file in configs/ is composed and checked."""

from pathlib import Path

import pytest
import yaml

from vrl.controller.compose import CONFIG_DIR, config_names, load, yaml_text
from vrl.protocol.config.rules import Machine, check, check_heads
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError

CPU, GPU_NODE = Machine(gpus=0, cores=2), Machine(gpus=8, cores=64)
MACHINES = {
    "tiny_vl_grpo": CPU,
    "tiny_vl_agent": CPU,
    "smollm2_arithmetic": CPU,
    "qwen2_5_vl_7b_geo3k_grpo": GPU_NODE,
    "qwen2_5_7b_gsm8k_ppo": GPU_NODE,
}
HEADS_7B = (28, 4)


def folder_with(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def test_the_base_file_holds_the_defaults():
    assert load("ppo_trainer").config == Config()


def test_every_config_file_is_checked():
    assert set(config_names()) == {*MACHINES, "ppo_trainer"}


@pytest.mark.parametrize("name", MACHINES)
def test_a_config_file_is_composed_and_fits_its_machine(name: str):
    config = load(name).config
    assert check(config, MACHINES[name]) == ()
    if MACHINES[name] is GPU_NODE:
        size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        check_heads(*HEADS_7B, size, "actor_rollout_ref.rollout.tensor_model_parallel_size")


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_run_writes_down_loads_back_equal(name: str, tmp_path: Path):
    composed = load(name, ["trainer.seed=17"])
    folder_with(tmp_path, config=yaml_text(composed.values))
    again = load("config", config_dir=tmp_path)
    assert again.config == composed.config
    assert again.values == composed.values
    assert composed.config.trainer.seed == 17


def test_the_text_holds_every_key():
    composed = load("tiny_vl_grpo")
    assert yaml.safe_load(yaml_text(composed.values)).keys() == composed.values.keys()
    assert "train_batch_size: 48" in yaml_text(composed.values)


def test_the_default_run_with_a_critic_only_needs_the_estimator():
    config = load("tiny_vl_grpo", ["algorithm.adv_estimator=gae"]).config
    assert config.needs_critic
    assert check(config, CPU) == ()


def test_overrides_in_every_form():
    composed = load(
        "tiny_vl_grpo",
        [
            "data.train_files=[a.parquet,b.parquet]",
            "+trainer.val_only=True",
            "~trainer.logger",
            "actor_rollout_ref.actor.optim.lr=3e-6",
            "actor_rollout_ref.actor.optim={weight_decay: 0.5}",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
            "actor_rollout_ref.model.override_config={rope: {type: yarn}}",
            "actor_rollout_ref.rollout.agent.custom_stop=['</tool_call>']",
            "data.max_response_length=${data.max_prompt_length}",
            "critic.model.fsdp_config.param_offload=True",
            "actor_rollout_ref.model.use_remove_padding=True",
        ],
    )
    config, rollout = composed.config, composed.config.actor_rollout_ref.rollout
    assert config.data.train_files == ("a.parquet", "b.parquet")
    assert config.trainer.val_only
    assert config.trainer.logger == Config().trainer.logger
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config.actor_rollout_ref.actor.optim.weight_decay == 0.5
    assert rollout.engine_kwargs == {"vllm": {"swap_space": 4}}
    assert config.actor_rollout_ref.model.override_config == {"rope": {"type": "yarn"}}
    assert rollout.agent.custom_stop == ("</tool_call>",)
    assert config.data.max_response_length == config.data.max_prompt_length
    assert config.critic.fsdp_config.param_offload
    assert len(composed.notes) == 2


def test_a_file_of_ones_own_builds_on_those_that_come_with_vrl(tmp_path: Path):
    folder_with(
        tmp_path,
        mine="defaults:\n  - tiny_vl_grpo\n  - small: a\n  - _self_\ntrainer:\n  seed: 9\n",
        small__a="# @package _global_\ndata:\n  train_batch_size: 4\n",
        small__b="# @package _global_\ndata:\n  train_batch_size: 2\n",
    )
    assert load("mine", config_dir=tmp_path).config.data.train_batch_size == 4
    config = load("mine.yaml", ["small=b", "trainer.project_name=p"], tmp_path).config
    assert config.data.train_batch_size == 2
    assert (config.trainer.seed, config.trainer.project_name) == (9, "p")
    assert config.actor_rollout_ref.model.path == "models/tiny_qwen2_5_vl"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.total_epoch=3"], "trainer.total_epoch: unknown setting; did you mean trainer.total_epochs?"),
        (["++trainer.total_epoch=3"], "did you mean trainer.total_epochs?"),
        (["data={train_batchsize: 3}"], "data.train_batchsize: unknown setting; did you mean data.train_batch_size?"),
        (["data.seed=abc"], "data.seed='abc': a whole number or null is wanted"),
        (["data.seed=${data.nothing}"], "Interpolation key 'data.nothing' not found"),
        (["trainer.logger=[[a"], "no viable alternative"),
        (["small=c"], "small: unknown setting"),
    ],
)
def test_bad_overrides_are_refused_with_one_message(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as error:
        load("tiny_vl_grpo", overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  train_batchsize: 4\n", "did you mean data.train_batch_size?"),
        ("critic:\n  model:\n    fsdp_config: {}\n", "critic.model.fsdp_config: write critic.fsdp_config"),
        ("defaults:\n  - nothing\n", "Could not load 'nothing'"),
        ("data: [1\n", "bad.yaml"),
        ("data:\n  seed: ???\n", "data.seed"),
        ("- 1\n- 2\n", "bad"),
    ],
)
def test_bad_files_are_refused_with_one_message(text: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load("bad", config_dir=folder_with(tmp_path, bad=text))
    assert message in str(error.value)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"no config 'tiny' in .*tiny_vl_grpo"):
        load("tiny")


def test_loading_twice_leaves_nothing_behind():
    assert load("tiny_vl_grpo", ["trainer.seed=2"]).config != load("tiny_vl_grpo").config
    assert load("tiny_vl_grpo").config == load("tiny_vl_grpo", config_dir=CONFIG_DIR).config
