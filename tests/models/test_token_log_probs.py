"""Chunked log-probs and entropy against plain ones: values, gradients, memory."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vrl.models.token_log_probs import Extra, token_log_probs

_GOLDEN = Path(__file__).parents[1] / "golden"


def _inputs(n: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (n,), generator=generator)
    shift = torch.zeros(vocabulary)
    shift[[2, 5]] = -100.0
    return hidden, weight, bias, targets, shift


def _plain(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, shift: Tensor, t: float
) -> tuple[Tensor, Tensor]:
    logs = ((hidden @ weight.T + bias + shift) / t).log_softmax(dim=-1)
    return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(dim=-1)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_any_chunk_gives_the_plain_values_and_gradients(chunk: int, temperature: float) -> None:
    hidden, weight, bias, targets, shift = _inputs(11, 6, 20)
    a, b = torch.randn(2, 11, generator=torch.Generator().manual_seed(4))
    wanted = _plain(hidden, weight, bias, targets, shift, temperature)
    wanted_grads = torch.autograd.grad((wanted[0] * a + wanted[1] * b).sum(), (hidden, weight, bias))
    log_probs, entropy, _ = token_log_probs(
        hidden, (weight, bias), targets, shift=shift, temperature=temperature, want=Extra.ENTROPY, chunk_tokens=chunk
    )
    assert entropy is not None
    torch.testing.assert_close((log_probs, entropy), wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((log_probs * a + entropy * b).sum(), (hidden, weight, bias))
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-5, atol=1e-5)


def test_entropy_alone_or_log_prob_alone() -> None:
    hidden, weight, bias, targets, shift = _inputs(5, 3, 9)
    wanted = _plain(hidden, weight, bias, targets, shift, 1.0)
    found = token_log_probs(hidden, (weight, bias), targets, shift=shift, want=Extra.ENTROPY, chunk_tokens=2)[:2]
    for mine, plain in zip(found, wanted, strict=True):
        assert mine is not None
        grads = torch.autograd.grad(mine.sum(), (hidden, weight), retain_graph=True)
        plain_grads = torch.autograd.grad(plain.sum(), (hidden, weight), retain_graph=True)
        torch.testing.assert_close(grads, plain_grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("want", [Extra.SUM_PI_SQUARED, Extra.ENTROPY | Extra.SUM_PI_SQUARED])
def test_sum_of_squared_probabilities_is_that_of_float64(chunk: int, want: Extra) -> None:
    hidden, weight, bias, targets, shift = _inputs(11, 6, 20)
    exact = []
    for row in (hidden.detach().double() @ weight.detach().double().T + bias.detach() + shift).tolist():
        powers = [math.exp(logit / 0.6) for logit in row]
        exact.append(sum((power / sum(powers)) ** 2 for power in powers))
    found = token_log_probs(
        hidden, (weight, bias), targets, shift=shift, temperature=0.6, want=want, chunk_tokens=chunk
    )
    assert found.sum_pi_squared is not None
    assert not found.sum_pi_squared.requires_grad
    assert (found.entropy is None) == (Extra.ENTROPY not in want)
    assert found.sum_pi_squared.tolist() == pytest.approx(exact, rel=2e-6)
    alone = token_log_probs(hidden, (weight, bias), targets, shift=shift, temperature=0.6)
    assert alone.sum_pi_squared is None
    wanted_grad = torch.autograd.grad(alone.log_probs.sum(), (hidden, weight))  # what comes beside changes no gradient
    grad = torch.autograd.grad(found.log_probs.sum(), (hidden, weight))
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6)


def test_entropy_of_uniform_and_certain_distributions() -> None:
    uniform = token_log_probs(
        torch.zeros(1, 1), (torch.zeros(1000, 1), None), torch.tensor([0]), want=Extra.ENTROPY
    ).entropy
    assert uniform is not None
    assert uniform.item() == pytest.approx(math.log(1000), abs=1e-4)
    logits = torch.tensor([[1e4, 0.0, 0.0]], requires_grad=True)
    log_probs, certain, _ = token_log_probs(logits, (torch.eye(3), None), torch.tensor([0]), want=Extra.ENTROPY)
    assert certain is not None
    assert certain.item() == 0.0
    assert log_probs.item() == 0.0
    certain.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_entropy_golden_values() -> None:
    cases = json.loads((_GOLDEN / "entropy.json").read_text(encoding="utf-8"))["cases"]
    arrays = np.load(_GOLDEN / "entropy.npz")
    for case in cases:
        logits = torch.from_numpy(arrays[f"{case['id']}.logits"]).float()
        wanted = arrays[f"{case['id']}." + ("formula_entropy" if case["peer_quirk"] else "entropy")]
        # Each row comes in as the shift of a head of zeros, so that words of probability zero take part.
        for row, value in zip(logits.flatten(0, 1), wanted.flatten(), strict=True):
            found = token_log_probs(
                torch.zeros(1, 1),
                (torch.zeros(len(row), 1), None),
                torch.tensor([0]),
                shift=row,
                temperature=case["temperature"],
                want=Extra.ENTROPY,
            ).entropy
            assert found is not None
            np.testing.assert_allclose(found.item(), value, rtol=1e-5, atol=1e-5, err_msg=case["id"])


class _LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


@pytest.mark.parametrize("want", [Extra.NONE, Extra.ENTROPY, Extra.ENTROPY | Extra.SUM_PI_SQUARED])
def test_neither_pass_holds_more_than_a_chunk_of_logits(want: Extra) -> None:
    n, width, vocabulary, chunk = 512, 4, 1000, 16
    hidden, weight, _, targets, _ = _inputs(n, width, vocabulary)
    saved = 0

    def count(x: Tensor) -> Tensor:
        nonlocal saved
        saved += x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x), _LargestTensor() as largest:
        log_probs, entropy, _ = token_log_probs(hidden, (weight, None), targets, want=want, chunk_tokens=chunk)
        (log_probs.sum() if entropy is None else (log_probs + entropy).sum()).backward()
    assert largest.numel <= chunk * vocabulary
    inputs = hidden.nbytes + weight.nbytes + targets.nbytes
    assert saved <= inputs + 3 * 4 * n


def test_no_target_gives_zero_gradients_not_none() -> None:
    _, weight, bias, _, _ = _inputs(1, 4, 6)
    hidden = torch.zeros(0, 4, requires_grad=True)
    log_probs, entropy, _ = token_log_probs(
        hidden, (weight, bias), torch.zeros(0, dtype=torch.int64), want=Extra.ENTROPY
    )
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    assert bias.grad is not None


def test_bfloat16_head_sums_its_gradient_in_float32() -> None:
    hidden, weight, _, targets, _ = _inputs(256, 4, 10)
    low = weight.detach().bfloat16().requires_grad_()
    wanted, *_ = token_log_probs(hidden.bfloat16().float(), (low.float(), None), targets)
    found, *_ = token_log_probs(hidden.bfloat16(), (low, None), targets, chunk_tokens=1)
    assert found.dtype == torch.float32
    (exact,) = torch.autograd.grad(wanted.sum(), low)
    (grad,) = torch.autograd.grad(found.sum(), low)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.float(), exact.float(), rtol=0.02, atol=0.3)


def test_impossible_settings_are_refused() -> None:
    hidden, weight, _, targets, _ = _inputs(2, 3, 8)
    with pytest.raises(ValueError, match="temperature=0"):
        token_log_probs(hidden, (weight, None), targets, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        token_log_probs(hidden, (weight, None), targets, chunk_tokens=0)
