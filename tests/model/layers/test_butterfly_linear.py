"""Two block-diagonal factors: the nearest ones, of which butterflies are made, really smaller, and folded away by export."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from lightning_eff import ButterflyLinear
from lightning_eff.model.layers._monarch.factors import apply, num_weights, product, project
from lightning_eff.model.layers._monarch.module import MonarchLinear
from tests import families
from tests.cases import Case, no_map
from tests.families import Losses
from tests.models import TinyGPT, loader, trainer
from tests.runs import fit, fit_yaml

CASES = {
    "ButterflyLinear": Case(
        active=lambda: ButterflyLinear(blocks=4, rank=2, min_features=8),  # a map of each block stays, for plugins
        neutral=lambda: ButterflyLinear(names=[]),
        architecture=True,
        on_classifier=lambda: ButterflyLinear(blocks=4, rank=1, names=["blocks.1.0"]),
        lost=(no_map, "classifier", "has no linear layer to act on"),
    )
}


def dense(left: Tensor, right: Tensor) -> Tensor:
    """``Q L P R`` of whole matrices, by their definitions."""
    (classes, n, taken), (runs, made, _) = left.shape, right.shape
    r = made // classes
    inner = torch.zeros(classes * taken, runs * made, dtype=left.dtype)
    outer = torch.zeros(classes * n, classes * n, dtype=left.dtype)
    for i in range(classes):
        for j in range(runs):
            for s in range(r):
                inner[(i * runs + j) * r + s, (j * classes + i) * r + s] = 1.0
        for t in range(n):
            outer[t * classes + i, i * n + t] = 1.0
    assert all((p.sum(0) == 1).all() and (p.sum(1) == 1).all() for p in (inner, outer))
    return outer @ torch.block_diag(*left) @ inner @ torch.block_diag(*right)


@pytest.mark.parametrize(
    ("shape", "blocks", "rank"), [((12, 8), (3, 2), 1), ((6, 12), (2, 3), 2), ((16, 16), (4, 4), 3)]
)
def test_the_factors_multiply_to_the_weight(shape: tuple[int, int], blocks: tuple[int, int], rank: int) -> None:
    left, right = project(torch.randn(shape, dtype=torch.float64), blocks, rank)
    whole = dense(left, right)
    torch.testing.assert_close(product(left, right), whole)
    x = torch.randn(2, 5, shape[1], dtype=torch.float64)
    torch.testing.assert_close(apply(x, left, right), x @ whole.t())
    assert left.numel() + right.numel() == num_weights(*shape, blocks, rank)


def test_no_product_is_nearer() -> None:
    """Against a search by gradients from many starts, and perturbations; a matrix of this form is met exactly."""
    torch.manual_seed(0)
    w = torch.randn(6, 8, dtype=torch.float64)
    left, right = project(w, (2, 4), 1)
    nearest = float((w - product(left, right)).square().sum())
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        a = torch.randn_like(left).requires_grad_()
        b = torch.randn_like(right).requires_grad_()
        search = torch.optim.LBFGS([a, b], max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-14)

        def closure(a: Tensor = a, b: Tensor = b, search: Any = search) -> Tensor:
            search.zero_grad()
            loss = (w - product(a, b)).square().sum()
            a.grad, b.grad = (g.contiguous() for g in torch.autograd.grad(loss, (a, b)))
            return loss

        search.step(closure)  # pyright: ignore[reportArgumentType]
        found.append(float(closure().detach()))
    assert min(found) >= nearest - 1e-9 and min(found) == pytest.approx(nearest, rel=1e-6)
    exact = product(torch.randn_like(left), torch.randn_like(right))
    torch.testing.assert_close(product(*project(exact, (2, 4), 1)), exact)
    torch.testing.assert_close(product(*project(w, (2, 4), 2)), w)  # blocks of 3 x 2 have rank 2


def test_a_hadamard_and_a_fourier_transform_are_exact() -> None:
    """n = 16: 2 n^1.5 = 128 weights for 256, which singular values alone (a rank of 16) would not save."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    left, right = project(hadamard, (4, 4), 1)
    torch.testing.assert_close(product(left, right), hadamard)
    assert left.numel() + right.numel() == 128 and torch.linalg.matrix_rank(hadamard) == 16
    # Cooley & Tukey: with inputs 4 m + j in the order (j, m), parts of exp(2 pi i n k / 16) have rank 1, their reals 2
    order = torch.arange(16).view(4, 4).t().flatten()
    angle = 2 * math.pi / 16 * torch.outer(torch.arange(16), order).double()
    for part in (angle.cos(), angle.sin()):
        torch.testing.assert_close(product(*project(part, (4, 4), 2)), part)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "modernbert", "vit"])
def test_in_blocks_maps_become_the_nearest_and_fold_away(name: str) -> None:
    plain = families.module(name)
    net: Any = eff.apply(copy.deepcopy(plain), ButterflyLinear(blocks=4, rank=2, min_features=8))
    made = {path: m for path, m in net.named_modules() if isinstance(m, MonarchLinear)}
    assert made and not any("head" in path or "classifier" in path or "embed" in path for path in made)
    for path, m in made.items():
        w: Any = plain.get_submodule(path).weight
        whole = (w.t() if m.transposed else w).detach().double()
        tail = sum(
            float(torch.linalg.svdvals(block)[2:].square().sum())
            for i in range(4)
            for block in whole[i::4].chunk(4, dim=1)
        )
        assert float((m.weight - w).detach().double().square().sum()) == pytest.approx(tail, rel=1e-3)
        assert m.left.numel() + m.right.numel() == 2 * 4 * (m.in_features + m.out_features)
    with torch.no_grad():
        exported: Any = eff.export(net)
        got, expected = (n.eval().model(**families.batch(name, 2)).logits for n in (exported, net))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert exported.state_dict().keys() == plain.state_dict().keys()


def test_at_full_rank_the_function_stays() -> None:
    plain = TinyGPT(2, dropout=0.0).eval()
    net = eff.apply(copy.deepcopy(plain), ButterflyLinear(blocks=2, rank=8, names=["qkv", "proj", "mlp.*"]))
    ids = torch.randint(0, 61, (2, 9))
    torch.testing.assert_close(net(ids), plain(ids), rtol=1e-4, atol=1e-5)


def test_the_products_are_really_smaller() -> None:
    def flops(net: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            net(torch.randn(5, 64)).sum().backward()
        return counter.get_total_flops()

    plain = nn.Sequential(nn.Tanh(), nn.Linear(64, 96))
    made = eff.apply(copy.deepcopy(plain), ButterflyLinear(8, rank=1, names=["1"]))
    assert flops(plain) == 2 * 2 * 5 * 64 * 96  # the product, and the weight's gradient
    assert flops(made) == 2 * 5 * 8 * (2 * 64 + 3 * 96)  # the inputs take no gradient


def test_maps_are_those_of_the_blocks_and_what_is_left_is_told(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        net = eff.apply(TinyGPT(2, dim=32), ButterflyLinear(blocks=4, min_features=32))
    made = [path for path, m in net.named_modules() if isinstance(m, MonarchLinear)]
    assert made == [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "proj", "mlp.0", "mlp.2")]
    assert "head (32 to 61) (it is outside the blocks)" in caplog.text
    assert "replaced 8 linear layers with factors of 4 blocks" in caplog.text
    assert f"{2 * 2 * 4 * (128 + 64 + 160 + 160):,} weights instead of {2 * 12 * 32 * 32:,}" in caplog.text


def test_a_step_moves_both_factors_and_the_loss_falls() -> None:
    technique, losses = ButterflyLinear(blocks=4, min_features=16), Losses()
    trainer(technique, losses, max_steps=60).fit(TinyGPT(2, dim=32, dropout=0.0), loader("tiny_gpt"))
    assert sum(losses.losses[-5:]) < 0.7 * sum(losses.losses[:5])
    assert technique.report()["maps"] == 8


def test_dtypes_stay_weights_may_lie_nowhere_and_new_ones_spread_as_a_linear_map() -> None:
    net = eff.apply(nn.Sequential(nn.Linear(32, 32)).to(torch.bfloat16), ButterflyLinear(names=["0"]))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16} == {p.dtype for p in eff.export(net).parameters()}
    on_meta = eff.apply(nn.Sequential(nn.Linear(32, 32)).to("meta"), ButterflyLinear(names=["0"]))
    assert all(p.is_meta for p in on_meta.parameters())
    new = MonarchLinear(64, 256, (4, 4), 3, transposed=False, bias=None)
    assert float(new.weight.detach().std()) == pytest.approx(nn.Linear(64, 256).weight.detach().std().item(), rel=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": 1}, r"blocks=1\): expected an integer >= 2"),
        ({"rank": 0}, r"rank=0\): expected an integer >= 1"),
        ({"rank": True}, "rank=True"),
        ({"min_features": 0}, r"min_features=0\): expected an integer >= 1"),
        (
            {"names": "mlp"},
            r"names='mlp'\): expected a list of dotted paths or patterns, or None: dotted paths of the linear layers",
        ),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ButterflyLinear(**settings)


def test_what_cannot_be_says_why() -> None:
    with pytest.raises(
        ValueError, match=r"blocks=3, rank=None\): blocks.0.qkv .* has 16 features, which 3 blocks do not"
    ):
        eff.apply(TinyGPT(2), ButterflyLinear(3, names=["qkv"]))
    with pytest.raises(ValueError, match=r"rank=5\): blocks.0.qkv .* has parts of rank 4 at most, below rank=5"):
        eff.apply(TinyGPT(2), ButterflyLinear(4, rank=5, names=["qkv"]))
    reason = r"blocks.0.qkv \(16 to 48\), blocks.0.proj .* and 5 more: it has fewer features than min_features=512"
    with pytest.raises(ValueError, match=rf"{reason}\. .*Set min_features=16 or lower, name some") as e:
        eff.apply(TinyGPT(2), ButterflyLinear())
    assert str(e.value).count("it has fewer") == 1
    with pytest.raises(ValueError, match=r"blocks=3\): found no linear layer .* Give other blocks, name some"):
        eff.apply(TinyGPT(2), ButterflyLinear(3))
    with pytest.raises(ValueError, match=r"it has 256 weights, and two factors would have 256"):
        eff.apply(nn.Sequential(nn.Linear(16, 16)), ButterflyLinear(4, rank=2, min_features=1))
    tied = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="the weights would no longer be tied"):
        eff.apply(tied, ButterflyLinear(names=["0"]))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "ButterflyLinear", {"blocks": 4, "names": ["blocks.1.0"]}, keeps_state=False, max_steps=3)


def test_a_run_is_that_of_apply() -> None:
    net, _ = fit("tiny_gpt", lambda: [ButterflyLinear(blocks=4, min_features=8)], max_steps=1)
    assert set(net.state_dict()) == set(eff.apply(TinyGPT(), ButterflyLinear(blocks=4, min_features=8)).state_dict())
