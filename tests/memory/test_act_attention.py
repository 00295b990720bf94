"""Fused attention under compression: the forward pass as it is, the backward pass that of the rounded q, k and v."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_eff.kernels.group_quantization import dequantize, quantize
from lightning_eff.memory._compression.engine import Engine

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "boolean mask": {"attn_mask": torch.ones(32, 32, dtype=torch.bool).tril(3)},
    "additive mask": {"attn_mask": torch.linspace(-3, 3, 32 * 32).view(32, 32)},
    "grouped queries": {"is_causal": True, "enable_gqa": True},
}


def qkv(form: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator, heads = torch.Generator().manual_seed(0), 2 if form == "grouped queries" else 4
    shapes = ((2, 4, 32, 16), (2, heads, 32, 16), (2, heads, 32, 16))
    q, k, v = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def held(bits: Any, form: str, *, autocast: bool = False, **kwargs: Any) -> tuple[Tensor, list[Tensor], Engine]:
    """The output, the gradients of q, k and v, and the engine; ``bits`` None is plain torch."""
    given, engine = qkv(form), Engine(nn.Linear(2, 2), bits=bits or 8, stochastic=False)
    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    if bits is None:
        with cast:
            out = F.scaled_dot_product_attention(*given, **FORMS[form], **kwargs)
    else:
        with cast, engine.forward(0, list(FORMS[form].values())):
            out = F.scaled_dot_product_attention(*given, **FORMS[form], **kwargs)
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, list(torch.autograd.grad(out, given, dy)), engine


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", list(FORMS))
def test_kept_exact_all_is_equal_to_the_bit(form: str, autocast: bool) -> None:
    plain, exact, _ = held(None, form, autocast=autocast)
    out, grads, _ = held(lambda key, wide: 32, form, autocast=autocast)
    assert out.dtype == plain.dtype and torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(grads, exact, strict=True))


@pytest.mark.parametrize("form", list(FORMS))
def test_the_backward_pass_is_that_of_the_rounded_tensors(form: str) -> None:
    """Its softmax has rows that sum to one, and its output is their product with the rounded values."""
    q, k, v = (
        dequantize(quantize(t.detach(), b, 256)).requires_grad_() for t, b in zip(qkv(form), (4, 4, 2), strict=True)
    )
    expected = F.scaled_dot_product_attention(q, k, v, **FORMS[form])
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    _, grads, _ = held(2, form)
    for found, reference in zip(grads, torch.autograd.grad(expected, (q, k, v), dy), strict=True):
        assert torch.equal(found, reference)


@pytest.mark.parametrize("autocast", [False, True])
def test_neither_output_nor_log_sum_exp_is_held_and_the_ledger_counts_both(autocast: bool) -> None:
    _, _, engine = held(8, "causal", autocast=autocast)
    tensor = 2 * 4 * 32 * 16
    assert engine.ledger.exact_bytes == 4 * tensor * (2 if autocast else 4) + 2 * 4 * 32 * 4
    assert engine.ledger.saved_bytes == 3 * (tensor + tensor // 256 * 8)


def test_what_no_fused_kernel_runs_is_left_to_autograd() -> None:
    """With dropout torch multiplies matrices on a CPU; without gradients nothing is saved."""
    engine, (q, k, v) = Engine(nn.Linear(2, 2), bits=8), qkv("plain")
    with engine.forward(0, ()):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        with torch.no_grad():
            assert F.scaled_dot_product_attention(q, k, v).grad_fn is None
        assert F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach()).grad_fn is None
    assert out.grad_fn is not None and "_Attention" not in out.grad_fn.name()
    with Engine(nn.Linear(2, 2), bits=8, only=lambda: False).forward(0, ()):
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.grad_fn is not None and out.grad_fn.name().startswith("ScaledDotProduct")


def test_a_backward_pass_within_the_forward_pass() -> None:
    """What it runs anew is not compressed again: its gradients and the ledger are those of one after the forward pass."""
    engine, found = Engine(nn.Linear(2, 2), bits=2, stochastic=False), []
    for within in (True, False):
        q, k, v = qkv("causal")
        with engine.forward(0, ()):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()
            if within:
                grads = torch.autograd.grad(y, (q, k, v))
        if not within:
            grads = torch.autograd.grad(y, (q, k, v))
        found.append((engine.ledger.saved_bytes, torch.stack(grads)))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_only_the_gradients_that_are_wanted() -> None:
    q, k, v = qkv("causal")
    with Engine(nn.Linear(2, 2), bits=lambda key, wide: 32).forward(0, ()):
        out = F.scaled_dot_product_attention(q.detach(), k, v.detach(), is_causal=True)
    out.sum().backward()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()
    assert k.grad is not None and q.grad is None and torch.equal(k.grad, torch.autograd.grad(expected, k)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint_attention_saves_the_same_both_times(reentrant: bool) -> None:
    """What runs again in the backward pass runs outside of the engine."""
    q, k, v = qkv("causal")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with Engine(nn.Linear(2, 2), bits=2).forward(0, ()):
        out = checkpoint(attend, q, k, v, use_reentrant=reentrant)
    found = torch.autograd.grad(out.square().sum(), (q, k, v)) if not reentrant else None
    if found is None:
        out.square().sum().backward()
        found = (q.grad, k.grad, v.grad)
    expected = torch.autograd.grad(attend(*(again := qkv("causal"))).square().sum(), again)
    assert all(a is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
