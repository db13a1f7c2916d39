"""Names that settings share with the registries, roles of a run, and when old log-probs take a pass of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.models.reward_folders import build_reward_model
from vrl.algorithms.advantages.registry import get_advantage, known_advantages
from vrl.algorithms.aggregation import AGGREGATION_MODES
from vrl.algorithms.kl import KL_ESTIMATORS
from vrl.algorithms.losses.registry import get_policy_loss, known_policy_losses
from vrl.controller.environments import checked_environments
from vrl.controller.launch import check_model, check_reward_model
from vrl.controller.run import load_data, needs_old_log_probs, plan, role_names, run_length, started, total_steps
from vrl.data.dataset import load_rows
from vrl.data.loader import PromptLoader
from vrl.models.renderer import load_renderer
from vrl.models.tiny import build_tiny_model
from vrl.protocol.config import names
from vrl.protocol.config.builder import build
from vrl.protocol.config.schema import Config
from vrl.protocol.errors import ConfigError, DataError
from vrl.workers.host import RunLength

ONE_UPDATE = {"data": {"train_batch_size": 8}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8}}}


def test_the_settings_have_the_names_of_the_registries():
    assert sorted(names.ADV_ESTIMATORS) == list(known_advantages())
    assert sorted(names.POLICY_LOSSES) == list(known_policy_losses())
    assert sorted(names.LOSS_AGG_MODES) == sorted(AGGREGATION_MODES)
    assert sorted(names.KL_ESTIMATORS) == sorted(KL_ESTIMATORS)


def test_the_settings_know_what_estimators_and_losses_need():
    estimators = [get_advantage(name) for name in known_advantages()]
    assert {one.name for one in estimators if one.needs_critic} == names.VALUE_ESTIMATORS
    assert {one.name for one in estimators if one.needs_sum_pi_squared} == names.SUM_PI_SQUARED_ESTIMATORS
    losses = [get_policy_loss(name) for name in known_policy_losses()]
    assert {loss.name for loss in losses if loss.needs_whole_groups} == names.GROUP_LOSSES
    assert {loss.name for loss in losses if loss.needs_ref_log_probs} == names.GROUP_LOSSES
    assert {loss.name: loss.aggregation for loss in losses if loss.aggregation} == names.FIXED_AGGREGATION


@pytest.mark.parametrize("mode", [*sorted(names.GROUP_LOSSES), "vanilla"])
def test_losses_against_the_reference_bring_one(mode: str):
    config = build({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": mode}}}})
    assert config.needs_reference == (mode in names.GROUP_LOSSES)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"algorithm": {"mask_truncated_completions": True}}, False),
        ({"algorithm": {"use_kl_in_reward": True}}, True),
        ({"algorithm": {"adv_estimator": "optimal_token_baseline"}}, True),
        ({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, True),
        ({"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}}}, True),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 8, "policy_loss": {"loss_mode": "kl_cov"}}}}, True),
        ({"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}}}, True),
    ],
    ids=str,
)
def test_one_update_gives_its_own_old_log_probs_unless_the_driver_wants_them(changes: dict[str, Any], wanted: bool):
    assert needs_old_log_probs(build({**ONE_UPDATE, **changes})) is wanted


def config_of(folder: Path, train: str, test: str, **settings: Any) -> Config:
    """Settings over a tiny model and two files, of a row of each data source in the texts."""
    policy = folder / "policy"
    if not policy.exists():
        build_tiny_model("qwen2", policy, ["what is 3 + 4", "the answer"], seed=1)
    for name, sources in (("train", train), ("test", test)):
        message = {"role": "user", "content": "what is 3 + 4"}
        rows = [json.dumps({"data_source": source, "prompt": [message]}) for source in sources.split()]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    files = {"train_files": [str(folder / "train.jsonl")], "val_files": [str(folder / "test.jsonl")]}
    model = {"path": str(policy)}
    return build(
        {
            "actor_rollout_ref": {"model": model, "actor": {"ppo_mini_batch_size": 1}},
            "data": {**files, "train_batch_size": 1},
            **settings,
        }
    )


def test_an_unknown_data_source_is_refused_before_anything_starts(tmp_path: Path):
    config = config_of(tmp_path, "openai/gsm8k", "my/task")
    with pytest.raises(ConfigError, match="no reward rule for data source 'my/task'"), started(config, gpus=False):
        pass


def test_rows_whose_reward_runs_code_are_left_out_without_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no bubblewrap
    config = config_of(tmp_path, "apps openai/gsm8k", "arc taco")
    renderer = load_renderer(config.tokenizer_path, None, None)
    config, tools = checked_environments(config, renderer)
    assert tools.sources_left_out == {"apps", "taco"}
    assert "rows with data_source apps, taco are left out, their code cannot run: " in caplog.text
    assert load_data(config, renderer, tools).data_sources == {"openai/gsm8k", "arc"}
    parts = {"parts": [{"rule": "format"}, {"rule": "code_tests"}]}
    function = {"path": "vrl:combined", "reward_kwargs": parts}
    config, tools = checked_environments(
        config_of(tmp_path, "openai/gsm8k", "arc", custom_reward_function=function), renderer
    )
    with pytest.raises(DataError, match="no rows without data_source arc, openai/gsm8k"):
        load_data(config, renderer, tools)


def test_a_reward_model_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path):
    policy = build_tiny_model("qwen2", tmp_path / "policy", ["what is 3 + 4", "the answer"], seed=1)
    reward = build_reward_model(policy, tmp_path / "reward", seed=2)
    other = build_tiny_model("qwen2", tmp_path / "other", ["quite other words", "in another language"], seed=1)

    def check(path: Path, **settings: Any) -> None:
        model = {"path": str(path), "input_tokenizer": settings.pop("input_tokenizer", None)}
        values = {"actor_rollout_ref": {"model": {"path": str(policy)}}}
        check_reward_model(build({**values, "reward_model": {"enable": True, "model": model, **settings}}))

    check(reward)
    check(reward, max_length=4096, ulysses_sequence_parallel_size=2, input_tokenizer=str(policy))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM, which gives no score a row"):
        check(policy)
    with pytest.raises(ConfigError, match=r"max_length=4097.* has 4096 positions: set max_length=4096 or null"):
        check(reward, max_length=4097)
    with pytest.raises(ConfigError, match=r"reward_model\.ulysses_sequence_parallel_size=3 does not fit"):
        check(reward, ulysses_sequence_parallel_size=3)
    with pytest.raises(ConfigError, match=r"another tokenizer.*set reward_model\.model\.input_tokenizer="):
        check(build_reward_model(other, tmp_path / "foreign", seed=2))


def test_a_reference_takes_no_role_of_its_own_where_the_actor_has_an_adapter():
    policy: dict[str, Any] = {"actor": {"use_kl_loss": True}}
    assert role_names(build({"actor_rollout_ref": policy, "algorithm": {"adv_estimator": "grpo"}})) == [
        "actor", "reference", "rollout"
    ]  # fmt: skip
    for lora in ({"lora_rank": 8}, {"lora_adapter_path": "adapter"}):
        adapted = build({"actor_rollout_ref": policy | {"model": lora}, "algorithm": {"adv_estimator": "grpo"}})
        assert role_names(adapted) == ["actor", "rollout"]


@pytest.mark.parametrize("section", ["actor_rollout_ref", "critic"])
def test_layers_that_the_model_lacks_are_refused_before_anything_starts(tmp_path: Path, section: str):
    folder = build_tiny_model("qwen2", tmp_path / "model", ["a"], seed=0)
    lora = {"lora_rank": 8, "target_modules": ["query"]}
    values: dict[str, Any] = {"actor_rollout_ref": {"model": {"path": str(folder)}}, "critic": {"model": {}}}
    check_model(build(values))
    values[section]["model"] |= lora
    with pytest.raises(ConfigError, match=f"{section}.model.target_modules=.*'query' matches no linear layer"):
        check_model(build(values))


@pytest.mark.parametrize("section", ["actor_rollout_ref", "critic"])
def test_liger_is_refused_for_a_model_without_its_kernels(tmp_path: Path, section: str):
    known = build_tiny_model("qwen2", tmp_path / "qwen2", ["what is 3 + 4"], seed=1)
    AutoConfig.for_model("granite", num_attention_heads=4, num_key_value_heads=4).save_pretrained(tmp_path / "granite")
    values: dict[str, Any] = {name: {"model": {"path": str(known)}} for name in ("actor_rollout_ref", "critic")}
    values[section]["model"]["use_liger"] = True
    check_model(build(values))
    values[section]["model"]["path"] = str(tmp_path / "granite")
    with pytest.raises(ConfigError, match=rf"{section}.model.use_liger=True is for .*, not for granite"):
        check_model(build(values))


def test_a_critic_that_does_not_read_the_rows_is_refused_before_anything_starts(tmp_path: Path):
    text = ["what is 3 + 4", "the answer"]
    folders = {
        "text": build_tiny_model("qwen2", tmp_path / "text", text, seed=1),
        "again": build_tiny_model("qwen2", tmp_path / "again", text, seed=2),
        "foreign": build_tiny_model("qwen2", tmp_path / "foreign", ["quite other words", "elsewhere"], seed=1),
        "vision": build_tiny_model("qwen2_5_vl", tmp_path / "vision", text, seed=1),
    }

    def check(policy: str, critic: str, adv_estimator: str = "gae") -> None:
        models = {role: {"model": {"path": str(folders[name])}} for role, name in
                  (("actor_rollout_ref", policy), ("critic", critic))}  # fmt: skip
        check_model(build({**models, "algorithm": {"adv_estimator": adv_estimator}}))

    check("text", "again")
    check("vision", "vision")
    check("text", "vision", "grpo")  # no critic, nothing to read
    with pytest.raises(ConfigError, match=r"^critic\.model\.path=.*foreign has another tokenizer .* or null for"):
        check("text", "foreign")
    with pytest.raises(ConfigError, match=r"^critic\.model\.path=.*text has no vision tower, and the policy has one"):
        check("vision", "text")
    with pytest.raises(ConfigError, match=r"^critic\.model\.path=.*vision has a vision tower, and the policy none"):
        check("text", "vision")


@pytest.mark.parametrize("section", ["actor_rollout_ref", "critic"])
def test_a_vision_tower_that_is_not_there_cannot_be_frozen(tmp_path: Path, section: str):
    kinds = {kind: str(build_tiny_model(kind, tmp_path / kind, ["a"], seed=0)) for kind in ("qwen2", "qwen2_5_vl")}
    for kind, path in kinds.items():
        values: dict[str, Any] = {"actor_rollout_ref": {"model": {"path": path}}, "critic": {"model": {}}}
        values[section]["model"]["freeze_vision_tower"] = True
        if kind == "qwen2_5_vl":
            check_model(build(values))
            continue
        with pytest.raises(ConfigError, match=rf"^{section}\.model\.freeze_vision_tower=True, but .* set it to False"):
            check_model(build(values))


def test_schedules_of_the_actor_are_as_long_as_it_learns():
    values: dict[str, Any] = {**ONE_UPDATE, "critic": {"ppo_mini_batch_size": 4}}
    assert run_length(build(values), 10) == RunLength(actor=10, critic=20)
    for warmup, steps in ((3, 7), (10, 1), (11, 1)):
        config = build({**values, "trainer": {"critic_warmup": warmup}})
        assert run_length(config, 10) == RunLength(actor=steps, critic=20)


@pytest.mark.parametrize(("warmup", "said"), [(0, 0), (5, 0), (6, 1)])
def test_a_warmup_as_long_as_the_epochs_is_said_when_their_steps_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warmup: int, said: int
):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "a"}], "data_source": "x"}\n' * 6)
    loader = PromptLoader(load_rows([file]), 2)
    config = build({"trainer": {"critic_warmup": warmup, "total_epochs": 2}})
    assert total_steps(config, loader) == 6
    assert len(caplog.records) == said
    assert all("critic_warmup=6 is all of the 6 steps" in record.getMessage() for record in caplog.records)


def test_balance_is_counted_over_the_ranks_that_hold_different_rows():
    actor = {"ulysses_sequence_parallel_size": 2}
    config = build({"actor_rollout_ref": {"actor": actor}, "trainer": {"n_gpus_per_node": 4}})
    assert plan(config, 10).ranks == 2
    assert plan(config, 10).total_ranks == 4
