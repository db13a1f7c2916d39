"""Prompts computed once for the rows that begin with them, against the same rows each by itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from vrl.models.loading import load_policy, load_value_model
from vrl.models.packing import PackedBatch, pack, with_shared_prompts
from vrl.models.policy import CausalPolicy
from vrl.models.renderer import HFRenderer, load_renderer
from vrl.models.shared_prompts import lay_out
from vrl.models.token_log_probs import Extra
from vrl.protocol.balance import RowPrompt

# In float64, too, norms and log-probs are computed in float32; `test_attention` has the bound of float64 itself.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


def rows_of(groups: Sequence[tuple[int, Sequence[int]]], order: int = 0) -> tuple[PackedBatch, PackedBatch]:
    """Return text rows plain and with shared prompts: of each group a prompt's length and the remainders'."""
    draw = torch.Generator().manual_seed(5)
    rows: list[tuple[Tensor, RowPrompt]] = []
    for number, (length, remainders) in enumerate(groups):
        prompt = torch.randint(20, 200, (length,), generator=draw)
        for n in remainders:
            rows.append((torch.cat([prompt, torch.randint(20, 200, (n,), generator=draw)]), RowPrompt(number, length)))
    rows = [row for row in rows if len(row[0])]
    shuffled = torch.randperm(len(rows), generator=draw.manual_seed(order)).tolist() if order else range(len(rows))
    rows = [rows[i] for i in shuffled]
    plain = pack(torch.cat([ids for ids, _ in rows]), torch.tensor([0, *(len(ids) for ids, _ in rows)]).cumsum(0))
    return plain, with_shared_prompts(plain, [prompt for _, prompt in rows], None)


RAGGED = ((5, (4, 0, 9, 4)), (1, (3, 6)), (12, (7,)), (0, (2, 3)), (5, (4, 4, 1)), (6, (0, 0)))


def results(model: nn.Module, packed: PackedBatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return outputs by row token, and the gradients of all parameters."""
    model.zero_grad()
    if isinstance(model, CausalPolicy):
        found = model(packed, temperature=0.8, want=Extra.ENTROPY | Extra.SUM_PI_SQUARED, chunk_tokens=16)
        outputs = [found.log_probs, found.entropy, found.sum_pi_squared]
    else:
        outputs = [model(packed)]
    draw = torch.Generator().manual_seed(3)
    torch.stack([x * torch.randn(len(x), generator=draw) for x in outputs]).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [x.detach() for x in outputs], grads


def assert_equal(model: nn.Module, plain: PackedBatch, shared: PackedBatch) -> None:
    dtype = next(model.parameters()).dtype
    bound = TOLERANCE[dtype]
    wanted, wanted_grads = results(model, plain)
    found, grads = results(model, shared)
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in wanted_grads.items():
        scale = max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(grads[name], grad, rtol=bound, atol=bound * scale, msg=name)


def test_a_prompt_stands_once_and_remainders_look_at_it() -> None:
    """The example of the module's docstring, with its rows in another order."""
    layout = lay_out([0, 5, 8, 14], [RowPrompt(0, 3), RowPrompt(1, 2), RowPrompt(0, 3)])
    assert layout is not None
    # By width: a remainder of 2, then what looks at itself alone (prompt of 3, row of 3), then a remainder of 3.
    assert layout.kept.tolist() == [3, 4, 0, 1, 2, 5, 6, 7, 11, 12, 13]
    assert layout.lengths == (2, 3, 3, 3)
    assert layout.key_lengths == (5, 3, 3, 6)
    assert layout.keys.tolist() == [2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 8, 9, 10]
    assert layout.place.tolist() == [2, 3, 4, 0, 1, 5, 6, 7, 2, 3, 4, 8, 9, 10]


def test_rows_that_share_nothing_stay_as_they_are() -> None:
    plain, shared = rows_of([(4, (3,)), (0, (2, 3)), (7, (1,))])
    assert shared is plain
    assert shared.computed is plain


def test_segments_of_equal_widths_run_as_one() -> None:
    _, shared = rows_of([(6, (4, 4, 4)), (6, (4, 4))], order=2)
    assert [(run.rows, run.width, run.keys) for run in shared.computed.plans.runs] == [(5, 4, 10), (2, 6, 6)]
    assert len(shared.computed.input_ids) == 2 * 6 + 5 * 4
    assert len(shared.input_ids) == 5 * 10


@pytest.mark.parametrize("load", [load_policy, load_value_model])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_text_rows(text_folder: Path, load: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    for checkpointing in (False, True):
        model = load(text_folder, dtype, gradient_checkpointing=checkpointing)
        plain, shared = rows_of(RAGGED, order=1)
        assert len(shared.computed.input_ids) == len(plain.input_ids) - 3 * 5 - 1 - 2 * 5 - 6
        assert_equal(model, plain, shared)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_any_rows(text_folder: Path, groups: list[tuple[int, list[int]]], order: int) -> None:
    if not any(length + n for length, remainders in groups for n in remainders):
        return
    assert_equal(load_policy(text_folder, torch.float64), *rows_of(groups, order))


def test_a_sliding_window_reaches_back_into_the_prompt(tmp_path: Path) -> None:
    """Windows shorter than a prompt, between a prompt and a row, and longer than any row."""
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    for window in (2, 8, 40):
        config: Any = AutoConfig.for_model(
            "mistral", **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=window
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(window))
        policy = load_policy(tmp_path / str(window), torch.float64)
        assert policy.hf.config.sliding_window == window
        assert_equal(policy, *rows_of(RAGGED, order=1))


@pytest.fixture(scope="module")
def renderer(vision_folder: Path) -> HFRenderer:
    return load_renderer(vision_folder)


def vision_rows(renderer: HFRenderer, png: Callable[..., bytes]) -> tuple[PackedBatch, PackedBatch]:
    """Return rows with 0, 1 and 3 images in their prompts and images in later turns, groups mixed with one another."""
    red, blue, wide, small = png(60, 90, 1), png(84, 56, 2), png(30, 200, 3), png(56, 56, 4)
    prompts = [("no picture", []), ("see <image>", [red]), ("<image><image> or <image>?", [red, blue, wide])]
    later = [("", []), ("what of <image>", [small]), ("", []), ("and <image> or <image>", [wide, red])]
    rows: list[tuple[list[int], list[bytes], RowPrompt]] = []
    for turn in range(len(later)):
        for number, (content, images) in enumerate(prompts):
            begin = renderer.expand(renderer.render([{"role": "user", "content": content}]), images)
            text, more = later[(turn + number) % len(later)]
            after = renderer.expand(renderer.render([{"role": "user", "content": text}]), more) if text else []
            ids = [*begin, *range(30, 33 + turn), *after, 40 + turn]
            rows.append((ids, [*images, *more], RowPrompt(number, len(begin))))
    cache = renderer.image_cache(1 << 30)
    assert cache is not None
    pixels, grids, index = cache.distinct([image for _, images, _ in rows for image in images])
    plain = pack(
        torch.tensor([token for ids, _, _ in rows for token in ids]),
        torch.tensor([0, *(len(ids) for ids, _, _ in rows)]).cumsum(0),
        positions=torch.cat([torch.tensor(renderer.positions(ids, images)) for ids, images, _ in rows]),
        pixel_values=pixels,
        image_grid_thw=grids,
        visual_index=index,
    )
    return plain, with_shared_prompts(plain, [prompt for _, _, prompt in rows], renderer.image_token)


@pytest.mark.parametrize("load", [load_policy, load_value_model])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_with_images(
    vision_folder: Path, renderer: HFRenderer, png: Callable[..., bytes], load: Callable[..., nn.Module], dtype: Any
) -> None:
    plain, shared = vision_rows(renderer, png)
    assert len(shared.computed.input_ids) < 0.6 * len(plain.input_ids)
    assert plain.pixel_values is not None
    assert shared.computed.pixel_values is not None
    assert len(shared.computed.pixel_values) == len(plain.pixel_values)
    for frozen in (False, True):
        assert_equal(load(vision_folder, dtype, gradient_checkpointing=True, freeze_vision_tower=frozen), plain, shared)


def test_images_given_once_a_row_find_their_places(
    vision_folder: Path, renderer: HFRenderer, png: Callable[..., bytes]
) -> None:
    """Without `visual_index` the images of all rows are given in order, those of a prompt as often as it has rows."""
    image = png(60, 90, 1)
    ids = renderer.expand(renderer.render([{"role": "user", "content": "see <image>"}]), [image])
    cache = renderer.image_cache(1 << 30)
    assert cache is not None
    pixels, grids = cache.batch([image, image])
    plain = pack(
        torch.tensor([*ids, 30, 31, *ids, 32, 33, 34]),
        torch.tensor([0, len(ids) + 2, 2 * len(ids) + 5]),
        positions=torch.cat([torch.tensor(renderer.positions([*ids, *range(n)], [image])) for n in (2, 3)]),
        pixel_values=pixels,
        image_grid_thw=grids,
    )
    shared = with_shared_prompts(plain, [RowPrompt(0, len(ids))] * 2, renderer.image_token)
    assert_equal(load_policy(vision_folder, torch.float64), plain, shared)


def test_another_attention_is_refused(text_folder: Path) -> None:
    _, shared = rows_of(RAGGED)
    with pytest.raises(ValueError, match="shared prompts: attention 'varlen' is needed"):
        load_policy(text_folder, torch.float32, attn="sdpa")(shared)
