"""Polar factors by matrix products: against the singular value decomposition, and one form against the other."""

import pytest
import torch
from torch import Tensor

from lightning_eff.optim.optimizers._muon import orthogonalization as polar
from lightning_eff.optim.optimizers._muon.orthogonalization import ITERATIONS, gram_is_cheaper, orthogonalize


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
    assert gram_is_cheaper(16, 64, steps) and not gram_is_cheaper(16, 16, steps)
    calls = []
    iterate = polar._iterate_gram
    monkeypatch.setattr(
        polar, "_iterate_gram", lambda xs, steps: calls.append([tuple(x.shape) for x in xs]) or iterate(xs, steps)
    )
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
        for iterate in (polar._iterate, lambda x, steps: polar._iterate_gram([x], steps)):
            for shape in ((2, m, n), (2, n, m)):
                with FlopCounterMode(display=False) as counter:
                    iterate(torch.randn(shape), steps)
                flops.append(counter.get_total_flops())
        assert flops[0] == flops[1] and flops[2] == flops[3], "lying and standing matrices"
        assert (flops[2] < flops[0]) == gram_is_cheaper(m, n, steps), (m, n, flops)


def test_what_a_matrix_becomes_does_not_depend_on_the_others() -> None:
    matrices = [torch.randn(s) for s in [(48, 48)] * 5 + [(192, 48), (48, 192), (48, 192), (31, 7)]]
    together = orthogonalize(matrices)
    for one, other in zip(together, matrices, strict=True):
        assert torch.equal(one, orthogonalize([other])[0])
        assert one.shape == other.shape and one.dtype == torch.float32


def test_zero_and_tiny_matrices_stay_finite() -> None:
    found = orthogonalize([torch.zeros(4, 4), torch.full((4, 4), 1e-30)])
    assert all(one.isfinite().all() for one in found)
    assert orthogonalize([]) == []
