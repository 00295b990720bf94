"""RandomMask, the control of techniques that choose which weights are zero: how many, and that they stay."""

import torch

from lightning_eff.model.sparsity._random_mask import RandomMask
from tests.cases import Case, no_map
from tests.model.sparsity.sparse import fit_on
from tests.models import TinyGPT, make_batch

CASES = {
    "RandomMask": Case(
        active=lambda: RandomMask(sparsity=0.5),
        neutral=lambda: RandomMask(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


def test_as_many_of_each_weight_as_asked_are_zero_and_stay_so() -> None:
    torch.manual_seed(0)
    counts = fit_on(TinyGPT(2), make_batch("tiny_gpt"), RandomMask(sparsity=0.7), steps=3)
    assert counts.leaks == []
    for name, mask in counts.masks[0].items():
        assert int(mask.sum()) == round(0.3 * mask.numel())
        assert torch.equal(mask, counts.masks[-1][name])
