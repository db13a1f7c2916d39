"""Log-probs of packed rows against the plain Hugging Face model, row by row."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from vrl.models.loading import load_policy
from vrl.models.packing import PackedBatch, pack
from vrl.models.policy import CausalPolicy
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.models.token_log_probs import Extra
from vrl.protocol.errors import ConfigError

Row = tuple[list[int], list[bytes]]
_LENGTHS = (37, 5, 64, 1, 21)


@pytest.fixture(scope="module")
def renderer(vision_folder: Path) -> HFRenderer:
    return load_renderer(vision_folder)


@pytest.fixture(scope="module")
def vision_rows(renderer: HFRenderer, png: Callable[..., bytes]) -> list[Row]:
    """Rows with no, one and two images of different sizes."""
    images = [png(60, 90, 1), png(84, 56, 2), png(30, 200, 3)]
    contents = [
        ("no picture", []),
        ("see <image>", images[:1]),
        ("<image> or <image>?", images[1:]),
        ("<image>", images[:1]),
    ]
    rows = []
    for content, used in contents:
        ids = renderer.expand(renderer.render([{"role": "user", "content": content}]), used)
        rows.append((ids, used))
    return rows


@pytest.fixture(scope="module")
def text_rows() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(20, 200, (n,), generator=generator).tolist(), []) for n in _LENGTHS]


def _pack(rows: Sequence[Row], renderer: HFRenderer | None = None, shared: bool = False) -> PackedBatch:
    ids = torch.tensor([token for row, _ in rows for token in row])
    offsets = torch.tensor([0, *(len(row) for row, _ in rows)]).cumsum(0)
    if renderer is None:
        return pack(ids, offsets)
    cache = renderer.image_cache(1 << 30)
    assert cache is not None
    given = [image for _, images in rows for image in images]
    pixels, grids, index = cache.distinct(given) if shared else (*cache.batch(given), None)
    places = [torch.tensor(renderer.positions(row, images)) for row, images in rows]
    return pack(
        ids, offsets, positions=torch.cat(places), pixel_values=pixels, image_grid_thw=grids, visual_index=index
    )


def _split(x: Tensor, rows: Sequence[Row]) -> list[Tensor]:
    return list(x.split([len(row) for row, _ in rows]))


def _logits(model: nn.Module, row: Row, renderer: HFRenderer | None) -> Tensor:
    """Run one row through the library's own forward pass, with its own positions and images."""
    ids = torch.tensor([row[0]])
    if renderer is None or not row[1]:
        return model(ids).logits[0]
    cache = renderer.image_cache(1 << 30)
    assert cache is not None
    pixels, grids = cache.batch(row[1])
    kinds = (ids == model.config.image_token_id).int()
    return model(ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds).logits[0]


def _reference(model: nn.Module, rows: Sequence[Row], renderer: HFRenderer | None, temperature: float = 1.0) -> Tensor:
    parts = []
    for row in rows:
        logits = _logits(model, row, renderer).float()
        logits = torch.cat([torch.zeros(1, logits.shape[1]), logits[:-1]])
        if renderer is not None:
            logits[:, list(renderer.banned_ids)] -= 100.0
        logs = (logits / temperature).log_softmax(dim=-1)
        found = logs.gather(1, torch.tensor(row[0])[:, None])[:, 0]
        parts.append(found * (torch.arange(len(found)) > 0))
    return torch.cat(parts)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name.removeprefix("hf."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_text_rows_packed_equal_rows_alone(
    text_folder: Path, text_rows: list[Row], attn: str, checkpointing: bool
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(text_folder, dtype=torch.float32)
    wanted = _reference(reference, text_rows, None, 0.7)
    weights = torch.linspace(-1, 1, len(wanted))
    (wanted * weights).sum().backward()
    policy = load_policy(text_folder, torch.float32, attn=attn, gradient_checkpointing=checkpointing)
    found = policy(_pack(text_rows), temperature=0.7, chunk_tokens=16).log_probs
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    (found * weights).sum().backward()
    torch.testing.assert_close(_gradients(policy), _gradients(reference), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attn", ["varlen", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_with_and_without_images_packed_equal_rows_alone(
    vision_folder: Path, vision_rows: list[Row], renderer: HFRenderer, attn: str, checkpointing: bool
) -> None:
    reference = AutoModelForImageTextToText.from_pretrained(vision_folder, dtype=torch.float32)
    wanted = _reference(reference, vision_rows, renderer)
    weights = torch.linspace(-1, 1, len(wanted))
    (wanted * weights).sum().backward()
    policy = load_policy(vision_folder, torch.float32, attn=attn, gradient_checkpointing=checkpointing)
    found = policy(_pack(vision_rows, renderer), banned_ids=renderer.banned_ids).log_probs
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    (found * weights).sum().backward()
    torch.testing.assert_close(_gradients(policy), _gradients(reference), rtol=1e-4, atol=1e-4)


def test_images_that_rows_share_go_through_the_tower_once(
    vision_folder: Path, vision_rows: list[Row], renderer: HFRenderer
) -> None:
    rows = [*vision_rows, *reversed(vision_rows)]
    found = []
    for shared in (False, True):
        packed = _pack(rows, renderer, shared=shared)
        policy = load_policy(vision_folder, torch.float32)
        log_probs = policy(packed).log_probs
        (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
        assert packed.pixel_values is not None
        found.append((len(packed.pixel_values), log_probs.detach(), _gradients(policy)))
    (patches, log_probs, gradients), (fewer, same, close) = found
    assert fewer * 2 <= patches
    torch.testing.assert_close(same, log_probs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(close, gradients, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_the_others(vision_folder: Path, vision_rows: list[Row], renderer: HFRenderer) -> None:
    policy = load_policy(vision_folder, torch.float32)
    with torch.no_grad():
        together = _split(policy(_pack(vision_rows, renderer)).log_probs, vision_rows)
        for order in ([2, 0], [3, 1, 2], [1]):
            rows = [vision_rows[i] for i in order]
            parts = _split(policy(_pack(rows, renderer)).log_probs, rows)
            for i, part in zip(order, parts, strict=True):
                torch.testing.assert_close(part, together[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pads", [0, 1, 67])
def test_packed_equals_left_padded(text_folder: Path, text_rows: list[Row], pads: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(text_folder, dtype=torch.float32)
    row = text_rows[2][0]
    ids = torch.tensor([[0] * pads + row])
    mask = torch.tensor([[0] * pads + [1] * len(row)])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logs = reference(ids, attention_mask=mask, position_ids=positions).logits[0, pads:-1].log_softmax(dim=-1)
    wanted = logs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    found = load_policy(text_folder, torch.float32)(_pack(text_rows)).log_probs
    torch.testing.assert_close(_split(found, text_rows)[2][1:], wanted, rtol=1e-5, atol=1e-5)


def test_images_change_the_log_probs(vision_folder: Path, renderer: HFRenderer, png: Callable[..., bytes]) -> None:
    policy = load_policy(vision_folder, torch.float32)
    ids = renderer.render([{"role": "user", "content": "<image> which colour"}])
    outputs = []
    for seed in (1, 2):
        image = png(56, 56, seed)
        outputs.append(policy(_pack([(renderer.expand(ids, [image]), [image])], renderer)).log_probs)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_only_wanted_tokens_get_log_probs_and_entropy(text_folder: Path, text_rows: list[Row]) -> None:
    policy = load_policy(text_folder, torch.float32)
    packed = _pack(text_rows)
    full = policy(packed, want=Extra.ENTROPY)
    wanted = torch.zeros(len(packed.input_ids), dtype=torch.bool)
    wanted[[0, 3, 36, 37, 40]] = True
    some = policy(packed, want=Extra.ENTROPY, positions=wanted)
    kept = wanted & (packed.position_ids != 0)
    assert int(kept.sum()) == 3
    torch.testing.assert_close(some.log_probs, full.log_probs * kept, rtol=1e-6, atol=1e-6)
    assert some.entropy is not None
    assert full.entropy is not None
    torch.testing.assert_close(some.entropy, full.entropy * kept, rtol=1e-6, atol=1e-6)
    assert policy(packed).entropy is None


def test_no_wanted_token_still_reaches_every_parameter(vision_folder: Path) -> None:
    policy = load_policy(vision_folder, torch.float32)
    outputs = policy(pack(torch.tensor([20]), torch.tensor([0, 1])), want=Extra.ENTROPY)
    assert outputs.log_probs.tolist() == [0.0]
    outputs.log_probs.sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or grad.any()] == []


def test_a_batch_without_images_gives_the_vision_tower_zero_gradients(
    vision_folder: Path, vision_rows: list[Row], renderer: HFRenderer
) -> None:
    policy = load_policy(vision_folder, torch.float32)
    policy(_pack(vision_rows[:1], renderer)).log_probs.sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters()}
    vision = [name for name in grads if ".visual." in name]
    assert vision
    assert [name for name in vision if grads[name] is None or grads[name].any()] == []
    assert grads["hf.model.language_model.norm.weight"].any()


def test_frozen_vision_tower_gets_no_gradient(
    vision_folder: Path, vision_rows: list[Row], renderer: HFRenderer
) -> None:
    policy = load_policy(vision_folder, torch.float32, freeze_vision_tower=True, gradient_checkpointing=True)
    trained = load_policy(vision_folder, torch.float32)
    packed = _pack(vision_rows, renderer)
    found = policy(packed).log_probs
    torch.testing.assert_close(found, trained(packed).log_probs, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    without = {name for name, p in policy.named_parameters() if p.grad is None}
    assert without == {name for name, _ in policy.named_parameters() if ".visual." in name}


def test_train_and_eval_mode_agree(text_folder: Path, text_rows: list[Row]) -> None:
    policy = load_policy(text_folder, torch.float32, override_config={"attention_dropout": 0.5})
    assert policy.training
    packed = _pack(text_rows)
    torch.testing.assert_close(policy(packed).log_probs, policy.eval()(packed).log_probs, rtol=0, atol=0)


def test_placeholders_without_their_images_are_refused(
    vision_folder: Path, text_folder: Path, vision_rows: list[Row], renderer: HFRenderer
) -> None:
    policy = load_policy(vision_folder, torch.float32)
    full = _pack(vision_rows, renderer)
    ids = torch.tensor(vision_rows[1][0])
    with pytest.raises(ValueError, match=r"image placeholder tokens, but its images make 0 visual tokens"):
        policy(pack(ids, torch.tensor([0, len(ids)])))
    with pytest.raises(ValueError, match="needs 3-D positions"):
        policy(
            pack(
                full.input_ids,
                full.cu_seqlens.long(),
                pixel_values=full.pixel_values,
                image_grid_thw=full.image_grid_thw,
            )
        )
    with pytest.raises(ValueError, match="takes text only"):
        load_policy(text_folder, torch.float32)(full)
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        policy(_pack(vision_rows[:1], renderer), banned_ids=(10**6,))


@pytest.mark.parametrize("kind", ["text_folder", "vision_folder"])
def test_parameter_names_are_those_of_the_checkpoint(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    policy = load_policy(folder, torch.float32)
    named = dict(policy.hf_named_parameters())
    assert "lm_head.weight" not in named
    assert set(named) == set(policy.hf.state_dict()) - {"lm_head.weight"}


def test_layers_to_shard(vision_folder: Path, text_folder: Path) -> None:
    vision = load_policy(vision_folder, torch.float32)
    assert (len(vision.decoder_layers()), len(vision.vision_blocks())) == (2, 2)
    text = load_policy(text_folder, torch.float32)
    assert (len(text.decoder_layers()), len(text.vision_blocks())) == (2, 0)


def test_text_models_have_no_vision_tower_to_freeze(text_folder: Path) -> None:
    with pytest.raises(ConfigError, match="no vision tower"):
        load_policy(text_folder, torch.float32, freeze_vision_tower=True)


def test_other_architectures_run_packed(tmp_path: Path, text_rows: list[Row]) -> None:
    """A Llama with untied head and a Mistral with a sliding window shorter than its rows."""
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for kind, more in (("llama", {"tie_word_embeddings": False}), ("mistral", {"sliding_window": 8})):
        config = AutoConfig.for_model(kind, **sizes, **heads, **more)
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        reference.save_pretrained(tmp_path / kind)
        policy = load_policy(tmp_path / kind, torch.float32)
        assert isinstance(policy, CausalPolicy)
        found = policy(_pack(text_rows)).log_probs
        torch.testing.assert_close(found, _reference(reference, text_rows, None), rtol=1e-5, atol=1e-5)
