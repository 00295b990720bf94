"""Sketches of many tensors at once, which checkpoints of adapters hold of frozen weights."""

import pytest
import torch

from lightning_eff.model.adapters._pieces import sketch, sketches


@pytest.mark.parametrize("size", [1, 8, 255, 256, 257, 4096])
def test_a_sketch_has_the_same_bits_alone_and_among_others(size: int) -> None:
    made = [torch.randn(size) for _ in range(9)] + [
        torch.randn(3, size).t(),
        torch.zeros(0),
        torch.randn(2, device="meta"),
    ]
    together = sketches(made)
    assert together.shape == (12, 2) and all(torch.equal(one, sketch(t)) for one, t in zip(together, made, strict=True))
    few = made[0][:: max(1, size // 256)][:256].double()
    weights = torch.tensor([1 + i % 7 for i in range(len(few))])
    assert together[0].tolist() == pytest.approx(
        [float((few * weights).sum()), float(few.abs().sum())], rel=1e-4, abs=1e-4
    )


def test_a_sketch_is_float32_also_where_new_tensors_are_bfloat16() -> None:
    made = [torch.randn(300)]
    expected = sketches(made)
    torch.set_default_dtype(torch.bfloat16)  # as in Lightning's set-up of precision="bf16-true"
    try:
        assert torch.equal(sketches(made), expected) and sketches(made).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
