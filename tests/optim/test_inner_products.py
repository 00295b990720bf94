"""Squares and inner products of lists of tensors, compared with sums in float64."""

import pytest
import torch
from torch import Tensor

from lightning_eff._core._optim import gradient_norms
from lightning_eff._core._optim.gradient_norms import square_and_product


def by_hand(pairs: list[tuple[Tensor, Tensor]]) -> float:
    dense = [[t.to_dense() if t.is_sparse else t for t in pair] for pair in pairs]
    return float(sum((a.to(torch.complex128).conj() * b).real.sum() for a, b in dense))


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dense_tensors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in slices, without their dtype's rounding, and in other layouts."""
    pairs = [(made(*shape, dtype=dtype), made(*shape, dtype=dtype, seed=1)) for shape in ((40, 50), (7,), ())]
    image = made(2, 3, 8, 8, dtype=dtype).to(memory_format=torch.channels_last)
    pairs.append((image, made(2, 3, 8, 8, dtype=dtype, seed=2)))
    check(pairs)
    monkeypatch.setattr(gradient_norms, "_TERMS", 37)
    check(pairs)


def test_many_small_tensors_beside_large_ones() -> None:
    """Small ones are joined, also those that no other tensor has as a neighbour in memory."""
    sizes = [1, 4096, 4097, 3, 5000, *range(2, 70)]
    pairs = [(made(n, seed=2 * n), made(n, seed=2 * n + 1)) for n in sizes]
    pairs += [(made(n, 4, seed=n)[:, 1], made(n, dtype=torch.float64, seed=n)) for n in (3, 6)]
    check(pairs)


def check(pairs: list[tuple[Tensor, Tensor]]) -> None:
    square, product = square_and_product(pairs)
    assert square.dtype == product.dtype == torch.float64 and square.shape == product.shape == ()
    assert float(product) == pytest.approx(by_hand(pairs), rel=1e-5)
    assert float(square) == pytest.approx(by_hand([(a, a) for a, _ in pairs]), rel=1e-5)


def test_without_a_second_tensor_the_product_is_zero() -> None:
    a, b = made(6, 5), made(3, seed=1).bfloat16()
    square, product = square_and_product([(a, None), (b, b)])
    assert float(product) == pytest.approx(by_hand([(b, b)]), rel=1e-5)
    assert float(square) == pytest.approx(by_hand([(a, a), (b, b)]), rel=1e-5)
    assert float(square_and_product([(a, None)])[1]) == 0.0


def test_complex_and_sparse_tensors() -> None:
    a, b = made(6, 5), made(6, 5, seed=1)
    rows = torch.tensor([[1, 3, 1]])
    sparse = torch.sparse_coo_tensor(rows, made(3, 5, seed=2), (6, 5), check_invariants=True)
    pairs = [(torch.complex(a, b), torch.complex(b, a + 1).conj()), (sparse, a), (sparse, sparse)]
    check(pairs)
