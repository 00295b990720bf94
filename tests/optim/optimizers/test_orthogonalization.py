"""Polar factors by matrix products: against the singular value decomposition, and one form against the other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory.measure import Peak
from lightning_eff import Muon
from lightning_eff.optim.optimizers._muon import orthogonalization as polar
from lightning_eff.optim.optimizers._muon.orthogonalization import (
    ITERATIONS,
    Stack,
    gram_is_cheaper,
    orthogonalize,
    stages,
)


def with_singular_values(rows: int, columns: int, low: float) -> Tensor:
    """A random matrix whose singular values go evenly, by ratio, from 1 down to ``low``."""
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64), full_matrices=False)
    return (u * torch.logspace(0, torch.tensor(low).log10().item(), len(v), dtype=torch.float64)) @ v


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16), (1, 8)])
def test_singular_values_go_to_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    x = with_singular_values(*shape, low=0.01)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    (found,) = orthogonalize([x], dtype=torch.float64)
    # in the basis of x's singular vectors the result is diagonal
    diagonal = u.T @ found @ v.T
    values = diagonal.diagonal()
    assert (diagonal - torch.diag(values)).abs().max() < 1e-9
    assert values.min() > 0.7 and values.max() < 1.2
    # many steps end at the last polynomial's fixed point: c s^4 + b s^2 + a = 1
    a, b, c = ITERATIONS["polar_express"].steps[-1]
    fixed = ((-b - (b * b - 4 * c * (a - 1)) ** 0.5) / (2 * c)) ** 0.5
    (exact,) = orthogonalize([x], num_iterations=80, dtype=torch.float64)
    assert 1.0 < fixed < 1.05
    assert (exact - fixed * u @ v).abs().max() < 1e-6


def test_each_step_is_the_papers_polynomial_of_the_singular_values() -> None:
    for method, how in ITERATIONS.items():
        x = with_singular_values(12, 40, low=0.05)
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        norm = s.square().sum().sqrt()
        s = s / (norm.clamp(min=how.eps) if how.clamped else norm * how.safety + how.eps)
        for a, b, c in how.coefficients(7):
            s = a * s + b * s**3 + c * s**5
        (found,) = orthogonalize([x], method=method, num_iterations=7, dtype=torch.float64)
        assert (found - (u * s) @ v).abs().max() < 1e-8


@pytest.mark.parametrize("low", [0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("method", sorted(ITERATIONS))
def test_gram_matrices_give_what_plain_iteration_gives(
    method: str, low: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the condition: small singular values are not squared away, of lying and of standing matrices."""
    steps = ITERATIONS[method].coefficients(5)
    matrices = [with_singular_values(*shape, low=low) for shape in ((16, 64), (64, 16), (16, 96), (48, 192), (192, 48))]
    parts = stages(steps, 50.0)
    assert gram_is_cheaper(16, 64, parts) and not gram_is_cheaper(16, 16, parts)
    calls = []
    iterate = polar._iterate

    def seen(stacks: list[Stack], parts: Any, *args: Any) -> None:
        if len(parts) < len(steps):
            calls.append([tuple(stack.x.shape) for stack in stacks])
        iterate(stacks, parts, *args)

    monkeypatch.setattr(polar, "_iterate", seen)
    gram = orthogonalize([x.float() for x in matrices], method=method)
    together = [[(1, 16, 64), (1, 64, 16), (1, 16, 96)], [(1, 48, 192), (1, 192, 48)]]
    assert calls == together, "one sequence of products, whatever their longer sides"
    exact = orthogonalize(matrices, method=method, dtype=torch.float64)
    assert max((a - b).abs().max() for a, b in zip(gram, exact, strict=True)) < 2e-5
    monkeypatch.setattr(polar, "gram_is_cheaper", lambda *_: False)
    plain = orthogonalize([x.float() for x in matrices], method=method)
    assert max((a - b).abs().max() for a, b in zip(gram, plain, strict=True)) < 2e-5
    assert len(calls) == 2


def test_the_cheaper_form_has_fewer_multiplications() -> None:
    """Counted by torch: where the rule says so, and nowhere else."""
    from torch.utils.flop_counter import FlopCounterMode

    steps = ITERATIONS["polar_express"].steps
    for m, n in [(16, 16), (16, 24), (16, 32), (16, 48), (16, 64)]:
        flops = []
        for parts in ([[step] for step in steps], stages(steps, 50.0)):
            for shape in ((2, m, n), (2, n, m)):
                x = torch.randn(shape)
                stacks = [Stack([0], x, x.clone())]
                room = torch.empty(polar._gram_bytes(stacks, parts), dtype=torch.uint8)
                with FlopCounterMode(display=False) as counter:
                    polar._iterate(stacks, parts, ITERATIONS["polar_express"], room)
                flops.append(counter.get_total_flops())
        assert flops[0] == flops[1] and flops[2] == flops[3], "lying and standing matrices"
        assert (flops[2] < flops[0]) == gram_is_cheaper(m, n, stages(steps, 50.0)), (m, n, flops)


def test_stacks_of_two_dtypes_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of bfloat16 with an odd number of elements lies before one of float32, which begins at whole words."""
    monkeypatch.setattr(polar, "multiplies_bfloat16", lambda: True)
    odd, small = torch.randn(65, 65), torch.randn(48, 48)
    for one, other in zip(orthogonalize([odd, small]), (odd, small), strict=True):
        assert torch.equal(one, orthogonalize([other])[0])
    assert [t.dtype for t in orthogonalize([odd, small])] == [torch.bfloat16, torch.float32]


def test_a_step_needs_twice_the_memory_of_its_largest_chunk() -> None:
    """Gram matrices lie where the momenta were, also those of an earlier chunk with more of them."""
    weights = {
        "attn.qkv.weight": nn.Parameter(torch.zeros(1536, 512)),
        "up.weight": nn.Parameter(torch.zeros(2048, 512)),
    }
    optimizer = Muon(weights.items(), dtype="bfloat16")
    for p in weights.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    peak = Peak()
    with peak:
        optimizer.step()
    assert peak.bytes < 2 * 4 * 2048 * 512


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_matrix_becomes_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    matrices = [torch.randn(s) for s in [(48, 48)] * 5 + [(192, 48), (48, 192), (48, 192), (31, 7), (96, 96), (96, 96)]]
    together = orthogonalize(matrices, dtype=dtype)
    for one, other in zip(together, matrices, strict=True):
        assert torch.equal(one, orthogonalize([other], dtype=dtype)[0])
        assert one.shape == other.shape and one.dtype == dtype


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b).sum() / (a.double().norm() * b.norm()))


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (256, 1024)])
@pytest.mark.parametrize("low", [1e-2, 1e-3])
def test_bfloat16_is_about_as_near_to_the_polar_factor(shape: tuple[int, int], low: float) -> None:
    """And nearer than torch's five Newton-Schulz steps in bfloat16; no singular value leaves the range of exact products."""
    torch.manual_seed(0)
    x = with_singular_values(*shape, low=low)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    near = {}
    for name, method, dtype in (
        ("exact", "polar_express", torch.float64),
        ("bfloat16", "polar_express", torch.bfloat16),
        ("torch", "newton_schulz", torch.bfloat16),
    ):
        (found,) = orthogonalize([x], method=method, dtype=dtype)
        near[name] = cosine(found, u @ v), torch.linalg.svdvals(found.double())
    assert near["bfloat16"][0] > near["exact"][0] - 0.01
    assert near["bfloat16"][0] > near["torch"][0] + 0.005
    assert near["bfloat16"][1].max() < 1.2
    assert near["bfloat16"][1].min() > 0.8 * near["exact"][1].min()


@pytest.mark.parametrize("native", [True, False])
def test_large_matrices_use_bfloat16_where_the_processor_has_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polar, "multiplies_bfloat16", lambda: native)
    shapes = {(64, 64): native, (63, 200): False, (64, 200): native, (200, 63): False}
    matrices = [torch.randn(shape) for shape in shapes]
    found = orthogonalize(matrices)
    assert [one.dtype == torch.bfloat16 for one in found] == list(shapes.values())
    for dtype in (torch.float32, torch.bfloat16):
        assert all(one.dtype == dtype for one in orthogonalize(matrices, dtype=dtype))


def test_zero_and_tiny_matrices_stay_finite() -> None:
    found = orthogonalize([torch.zeros(4, 4), torch.full((4, 4), 1e-30)])
    assert all(one.isfinite().all() for one in found)
    assert orthogonalize([]) == []
