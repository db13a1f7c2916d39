"""Adapters against plain dense models and against peft: outputs, gradients, merged weights, files, refusals."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from vrl.models import lora
from vrl.models.loading import load_policy, load_value_model, skeleton
from vrl.models.lora import LoraSettings, add_adapters
from vrl.models.packing import PackedBatch, pack
from vrl.models.policy import CausalPolicy
from vrl.models.renderer import load_renderer
from vrl.protocol.errors import ConfigError, DataError

SECTION = "actor_rollout_ref.model"
EVERYWHERE = r".*(layers|visual).*"  # decoder and vision tower
OFFSETS = (0, 9, 10, 22)


def settings(**given: object) -> LoraSettings:
    return LoraSettings(section=SECTION, **({"rank": 4, "alpha": 8} | given))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A model folder, rows for it, and where its adapters are."""

    folder: Path
    packed: PackedBatch
    targets: str

    def adapted(self, **more: bool) -> CausalPolicy:
        """Return a policy with adapters that do something."""
        policy = load_policy(self.folder, torch.float32, **more)  # type: ignore[arg-type]
        add_adapters(policy.hf, settings(target_modules=self.targets), self.folder)
        scramble(policy)
        return policy


@pytest.fixture(params=["text", "vision"])
def case(request: pytest.FixtureRequest, text_folder: Path, vision_folder: Path, png: Callable[..., bytes]) -> Case:
    if request.param == "text":
        return Case(text_folder, pack(torch.arange(20, 42), torch.tensor(OFFSETS)), "all-linear")
    renderer = load_renderer(vision_folder)
    cache = renderer.image_cache(1 << 30)
    assert cache is not None
    rows = [("no picture", []), ("see <image>", [png(60, 90, 1)]), ("<image>?", [png(84, 56, 2)])]
    ids = [renderer.expand(renderer.render([{"role": "user", "content": text}]), images) for text, images in rows]
    pixels, grids = cache.batch([image for _, images in rows for image in images])
    packed = pack(
        torch.tensor([token for row in ids for token in row]),
        torch.tensor([0, *map(len, ids)]).cumsum(0),
        positions=torch.cat([torch.tensor(renderer.positions(a, b)) for a, (_, b) in zip(ids, rows, strict=True)]),
        pixel_values=pixels,
        image_grid_thw=grids,
    )
    return Case(vision_folder, packed, EVERYWHERE)


def scramble(policy: CausalPolicy) -> None:
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, parameter in lora.adapter_parameters(policy.hf):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


def whole(named: lora.Named) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in named)


def merged(policy: CausalPolicy) -> dict[str, Tensor]:
    return dict(lora.merged(policy.hf, policy.hf_named_parameters(), whole))


def test_new_adapters_change_nothing_and_are_the_same_on_every_rank(case: Case) -> None:
    base = load_policy(case.folder, torch.float32)
    wanted = base(case.packed).log_probs
    made = []
    for seed in (1, 2):
        policy = load_policy(case.folder, torch.float32)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        add_adapters(policy.hf, settings(target_modules=case.targets), case.folder)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(policy(case.packed).log_probs, wanted)
        made.append(dict(whole(lora.adapter_parameters(policy.hf))))
    for name, first in made[0].items():
        assert torch.equal(first, made[1][name])
        assert first.dtype == torch.float32
        bound = 0.0 if ".lora_B." in name else first.shape[1] ** -0.5  # sqrt(6 / ((1 + 5) * inputs)), as in peft
        assert float(first.abs().max()) <= bound
        assert ".lora_B." in name or float(first.std()) == pytest.approx(bound / 3**0.5, rel=0.15)
    trained = {name for name, p in policy.hf.named_parameters() if p.requires_grad}
    assert len(trained) == len(made[0]) == sum(".lora_" in name for name in trained)
    assert any(".visual." in name for name in trained) is (case.targets is EVERYWHERE)


def test_merged_weights_give_the_same_log_probs_and_leave_the_base_alone(case: Case) -> None:
    policy, plain = case.adapted(), load_policy(case.folder, torch.float32)
    unmerged = policy(case.packed).log_probs
    base = plain(case.packed).log_probs
    weights = merged(policy)
    assert list(weights) == [name for name, _ in plain.hf_named_parameters()]
    missing, unexpected = plain.hf.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    assert (unmerged - base).abs().max() > 0.1
    torch.testing.assert_close(plain(case.packed).log_probs, unmerged, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), lora.adapters_off(policy):
        assert torch.equal(policy(case.packed).log_probs, base)
    assert torch.equal(policy(case.packed).log_probs, unmerged)


def test_gradients_are_those_of_a_dense_model(case: Case) -> None:
    """Also with gradient checkpointing, where nothing that enters the first layer needs a gradient."""
    policy = case.adapted(gradient_checkpointing=True)
    weights = torch.linspace(-1, 1, len(case.packed.input_ids))
    (policy(case.packed).log_probs * weights).sum().backward()
    adapters = dict(lora.adapter_parameters(policy.hf))
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)

    plain = load_policy(case.folder, torch.float32)
    dense = {f"hf.{name}": p.detach() for name, p in plain.hf_named_parameters()}
    leaves = {name: p.detach().clone().requires_grad_() for name, p in adapters.items()}
    for name in [n.removesuffix(".lora_A.weight") for n in leaves if n.endswith(".lora_A.weight")]:
        layer = f"hf.{name.removeprefix('base_model.model.')}.weight"
        dense[layer] = dense[layer] + (8 / 4) * leaves[f"{name}.lora_B.weight"] @ leaves[f"{name}.lora_A.weight"]
    if plain.hf.get_output_embeddings().weight is plain.hf.get_input_embeddings().weight:
        dense["hf.lm_head.weight"] = dense[next(n for n in dense if n.endswith("embed_tokens.weight"))]
    # One visual parameter that needs a gradient stands for the adapters of the tower.
    plain.hf.requires_grad_(case.targets is EVERYWHERE)
    outputs = functional_call(plain, dense, (case.packed,))
    (outputs.log_probs * weights).sum().backward()
    assert len(leaves) == len(adapters) > 0
    for name, leaf in leaves.items():
        found, wanted = adapters[name].grad, leaf.grad
        assert found is not None
        assert wanted is not None
        assert float(found.abs().max()) > 0, name
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_peft_reads_what_is_written_and_so_do_we(case: Case, tmp_path: Path) -> None:
    policy = case.adapted()
    lora.save_adapter(policy.hf, whole(lora.adapter_parameters(policy.hf)), tmp_path, write=True)
    wanted = policy(case.packed).log_probs
    other = load_policy(case.folder, torch.float32)
    PeftModel.from_pretrained(other.hf, str(tmp_path))
    torch.testing.assert_close(other(case.packed).log_probs, wanted, rtol=0, atol=1e-6)
    again = load_policy(case.folder, torch.float32)
    add_adapters(again.hf, settings(rank=0, adapter_path=str(tmp_path)), case.folder)
    assert torch.equal(again(case.packed).log_probs, wanted)
    assert lora.summary(again.hf) == lora.summary(policy.hf)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(case.folder)
    assert (written["r"], written["lora_alpha"], written["inference_mode"]) == (4, 8, True)


def test_an_adapter_that_peft_wrote_is_trained_on(text_folder: Path, tmp_path: Path) -> None:
    """With other sizes for a part of the layers and rank-stabilised scaling."""
    packed = pack(torch.arange(20, 42), torch.tensor(OFFSETS))
    theirs = load_policy(text_folder, torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 2}, use_rslora=True,
                        init_lora_weights=False, lora_dropout=0.5)  # fmt: skip
    get_peft_model(theirs.hf, config).save_pretrained(str(tmp_path))
    ours = load_policy(text_folder, torch.float32)
    add_adapters(ours.hf, settings(adapter_path=str(tmp_path)), text_folder)
    wanted = theirs.eval()(packed).log_probs
    torch.testing.assert_close(ours(packed).log_probs, wanted, rtol=0, atol=1e-6)
    assert "rank 2" in lora.summary(ours.hf)
    plain = load_policy(text_folder, torch.float32)
    plain.hf.load_state_dict(merged(ours), strict=False)
    torch.testing.assert_close(plain(packed).log_probs, wanted, rtol=1e-5, atol=1e-5)


def test_the_value_head_learns_beside_the_adapters(text_folder: Path, tmp_path: Path) -> None:
    model = load_value_model(text_folder, torch.float32)
    add_adapters(model.backbone, settings(), text_folder)
    packed = pack(torch.arange(20, 42), torch.tensor(OFFSETS))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):  # the first step moves B off zero
        optimizer.zero_grad()
        (model(packed) - 1.0).square().sum().backward()
        optimizer.step()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert trained == {name for name, p in model.named_parameters() if ".lora_" in name or "value_head" in name}
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(load_value_model(tmp_path, torch.float32)(packed), model(packed), rtol=1e-5, atol=1e-5)


def test_which_layers_are_adapted(vision_folder: Path) -> None:
    hf = skeleton(vision_folder)

    def chosen(**given: object) -> list[str]:
        return lora.adapted_names(hf, settings(**given))

    kinds = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
    layers = [f"model.language_model.layers.{n}" for n in (0, 1)]
    assert chosen() == [f"{layer}.{kind}" for layer in layers for kind in kinds]
    assert chosen(target_modules=("gate_proj",)) == [f"{layer}.mlp.gate_proj" for layer in layers]
    assert chosen(
        target_modules=r".*layers\.1.*", exclude_modules=("self_attn.v_proj", "mlp.gate_proj", "up_proj")
    ) == [f"{layers[1]}.{kind}" for kind in (*kinds[:2], kinds[3], kinds[6])]
    tower = chosen(target_modules=r".*visual.*")
    assert len(tower) == 2 * 5 + 2
    assert chosen(target_modules=("visual.blocks.1.attn.qkv",)) == ["model.visual.blocks.1.attn.qkv"]
    assert chosen(target_modules=EVERYWHERE, exclude_modules=".*visual.*") == chosen()


def test_layers_that_do_not_exist_are_named_with_those_that_do(text_folder: Path, vision_folder: Path) -> None:
    def refusal(folder: Path, **given: object) -> str:
        with pytest.raises(ConfigError) as error:
            lora.adapted_names(skeleton(folder), settings(**given))
        return str(error.value)

    message = refusal(text_folder, target_modules=("q_proj", "query"))
    assert message.startswith(f"{SECTION}.target_modules=[q_proj,query]: 'query' matches no linear layer")
    assert "there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in message
    assert "'lm_head' matches no" in refusal(text_folder, target_modules=("lm_head",))
    assert "visual.blocks.N.attn.qkv" in refusal(vision_folder, target_modules=("qkv",))
    assert "leaves nothing" in refusal(text_folder, target_modules=("q_proj",), exclude_modules=("q_proj", "k_proj"))
    assert "exclude_modules=typo" in refusal(text_folder, exclude_modules="typo")
    frozen = refusal(vision_folder, target_modules=EVERYWHERE, vision_frozen=True)
    assert "freeze_vision_tower=True forbids" in frozen
    # Scripts for several models exclude a tower that a text model lacks.
    assert len(lora.adapted_names(skeleton(text_folder), settings(exclude_modules=".*visual.*"))) == 14


def test_adapters_of_another_kind_or_model_are_refused(
    text_folder: Path, vision_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load_policy(text_folder, torch.float32)
    add_adapters(policy.hf, settings(), text_folder)
    lora.save_adapter(policy.hf, whole(lora.adapter_parameters(policy.hf)), tmp_path, write=True)

    def refused(kind: type[Exception], message: str, folder: Path = text_folder, **given: object) -> None:
        model = load_policy(folder, torch.float32)
        with pytest.raises(kind, match=message):
            add_adapters(model.hf, settings(**({"rank": 0, "adapter_path": str(tmp_path)} | given)), folder)

    refused(ConfigError, "lora_rank=8, but the adapter in .* has rank 4: set lora_rank=4 or 0", rank=8)
    refused(DataError, "lora_adapter_path=nowhere is no adapter's folder", adapter_path="nowhere")
    refused(DataError, "adapts model.layers.0.* but vrl adapts linear layers that Qwen2_5", folder=vision_folder)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    lost = sorted(weights)[0]
    kept = {name: tensor for name, tensor in weights.items() if name != lost}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    refused(DataError, "does not fit Qwen2ForCausalLM: base_model.model.model.layers.0")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | {"use_dora": True}))
    refused(ConfigError, "uses use_dora; vrl trains plain LoRA")
    with caplog.at_level(logging.INFO, logger="vrl.models.lora"):
        add_adapters(load_policy(text_folder, torch.float32).hf, settings(target_modules=("q_proj",)), text_folder)
    assert "rank 4 scale 2 on 2 layers" in caplog.text
