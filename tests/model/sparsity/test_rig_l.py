"""RigL against its rule written with sorted lists: counts stay, growth is by the dense gradient, and nothing moves by it."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_eff import SET, SOAP, LayerFreezing, Muon, RigL
from lightning_eff.model.sparsity._masks.allotting import erk
from lightning_eff.model.sparsity._masks.finding import Weight, prunable
from lightning_eff.model.sparsity._masks.rewired import drop_and_grow
from lightning_eff.model.sparsity.rig_l import cosine_fraction
from tests.cases import Case, no_map
from tests.families import module as family
from tests.model.sparsity.sparse import Counts, fit_on, sparsity_of
from tests.models import TinyClassifier, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import SaveBatches, differences, final_state, fit, fit_yaml

CASES = {
    "RigL": Case(
        active=lambda: RigL(sparsity=0.5, interval=2),
        neutral=lambda: RigL(sparsity=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


# -- the rules


def by_lists(w: list[float], g: list[float], kept: list[bool], fraction: float) -> list[bool]:
    """The same with sorted lists, as the paper's algorithm has it."""
    active = [i for i, k in enumerate(kept) if k]
    k = math.floor(fraction * len(active))
    stay = sorted(active, key=lambda i: -abs(w[i]))[: len(active) - k]
    grown = sorted((i for i in range(len(w)) if i not in stay), key=lambda i: -abs(g[i]))[:k]
    return [i in stay or i in grown for i in range(len(w))]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.33, 1.0])
def test_drops_the_smallest_and_grows_by_the_largest(fraction: float) -> None:
    g = torch.Generator().manual_seed(0)
    kept = torch.rand(200, generator=g, dtype=torch.float64) < 0.3
    w = torch.randn(200, generator=g) * kept
    grow = torch.randn(200, generator=g).abs()
    ours = drop_and_grow(w.abs(), grow, kept, fraction)
    assert ours.tolist() == by_lists(w.tolist(), grow.tolist(), kept.tolist(), fraction)
    assert ours.sum() == kept.sum()


def test_the_share_that_moves_follows_a_cosine() -> None:
    assert [cosine_fraction(u, fraction=0.3, until=0.75) for u in (0.0, 0.375, 0.75, 1.0)] == pytest.approx(
        [0.3, 0.15, 0.0, 0.0], abs=1e-12
    )
    assert cosine_fraction(0.25, fraction=0.4, until=1.0) == pytest.approx(0.2 * (1 + 2**-0.5))


@pytest.mark.parametrize("sparsity", [0.3, 0.8, 0.95])
def test_erk_shares(sparsity: float) -> None:
    dims = {"stem": (16, 3, 3, 3), "small": (16, 16), "mid": (64, 64, 3, 3), "large": (256, 256)}
    counts = {name: math.prod(d) for name, d in dims.items()}
    shares = erk(dims, counts, sparsity)
    kept = sum(shares[name] * counts[name] for name in dims)
    assert kept == pytest.approx((1 - sparsity) * sum(counts.values()))
    ratio = {shares[name] * counts[name] / sum(dims[name]) for name in dims if shares[name] < 1}
    assert max(ratio) == pytest.approx(min(ratio)), "in proportion to the sum of sides, but for those that are whole"
    assert all(shares[n] * counts[n] / sum(dims[n]) <= min(ratio) + 1e-9 for n in dims), "and those would have more"


def test_blocks_are_pooled_and_spread() -> None:
    for shape, stack in (((8, 12), False), ((8, 3, 2, 2), False), ((3, 8, 12), True)):
        w, values = Weight("w", shape, stack), torch.randn(shape)
        pooled = w.pool(values, (4, 4))
        assert len(pooled) == w.num_blocks((4, 4))
        assert w.pool(w.spread(pooled, (4, 4)), (4, 4)).allclose(16 * pooled)
        first = values.view(-1, shape[-2] if stack else shape[0], values.numel() // (8 * (3 if stack else 1)))
        assert pooled[0] == pytest.approx(float(first[0, :4, :4].sum()), rel=1e-4)


# -- the run


def gpt() -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(2, dropout=0.0)


def test_counts_stay_and_masked_weights_are_zero_after_every_step() -> None:
    technique = RigL(sparsity=0.8, interval=2, fraction=0.5, until=1.0)
    net = gpt()
    counts = fit_on(net, make_batch("tiny_gpt"), technique, steps=8, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert counts.leaks == []
    kept = [{n: int(m.sum()) for n, m in masks.items()} for masks in counts.masks]
    assert all(one == kept[0] for one in kept)
    assert sparsity_of(counts) == pytest.approx(0.8, abs=1e-3)
    changed = [
        any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(counts.masks, counts.masks[1:], strict=False)
    ]
    assert changed == [True, False, True, False, True, False, True], "after the steps 2, 4, 6 and 8"
    assert technique.report()["changes"] == 4 and set(counts.masks[0]) == set(prunable(net))
    assert not any("embed" in n or "position" in n or "norm" in n or "bias" in n for n in counts.masks[0])


class Dense(pl.Callback):
    """The gradients of one step before anyone masks them."""

    def __init__(self, step: int) -> None:
        self.step, self.found = step, dict[str, Tensor]()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step + 1 == self.step:
            self.found = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_grows_by_the_dense_gradient_and_the_function_stays(optimizer: str) -> None:
    net, seen, technique = gpt(), Dense(3), RigL(sparsity=0.6, interval=3, fraction=0.4, until=1.0)
    made: Any = getattr(torch.optim, optimizer)
    settings = {"momentum": 0.9} if optimizer == "SGD" else {}
    net.configure_optimizers = lambda: made(net.parameters(), lr=0.01, **settings)
    counts = Counts()
    data: DataLoader[Any] = DataLoader([make_batch("tiny_gpt")] * 3, batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(technique, seen, counts, max_steps=3, gradient_clip_val=0.1).fit(net, data)
    share, grown = cosine_fraction(2 / 3, fraction=0.4, until=1.0), 0
    for name, before in counts.masks[1].items():
        after, w = counts.masks[2][name], counts.weights[2][name]
        k = int(share * int(before.sum()))
        new = after & ~before
        grown += int(new.sum())
        assert not w[new].any(), "what has grown is zero, so nothing is computed otherwise"
        candidates = seen.found[name].abs().masked_fill(before & after, -1.0)
        threshold = candidates.flatten().topk(k).values[-1] if k else torch.inf
        assert bool((seen.found[name].abs()[new] >= threshold).all())
    assert grown > 50 and counts.leaks == []


@pytest.mark.filterwarnings("ignore:RigL. the run ends after 1 step")
def test_masked_gradients_do_not_count_in_the_norm_that_is_clipped() -> None:
    norms: list[float] = []

    class Norms(TinyGPT):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    seen = Dense(1)
    torch.manual_seed(0)
    counts = Counts()
    data: DataLoader[Any] = DataLoader([make_batch("tiny_gpt")], batch_size=None)  # pyright: ignore[reportArgumentType]
    trainer(RigL(sparsity=0.9), seen, counts, max_steps=1).fit(Norms(2, dropout=0.0), data)
    sparse = {n: g * counts.masks[0][n] if n in counts.masks[0] else g for n, g in seen.found.items()}
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([*sparse.values()])), rel=1e-6)]
    assert norms[0] < float(nn.utils.get_total_norm([*seen.found.values()]))


def test_blocks_of_four_by_four() -> None:
    technique = RigL(sparsity=0.5, interval=1, block=(4, 4), until=1.0, dense=["head"])
    counts = fit_on(gpt(), make_batch("tiny_gpt"), technique, steps=2)
    for mask in counts.masks[-1].values():
        blocks = mask.view(mask.shape[0] // 4, 4, mask.shape[1] // 4, 4).float().mean((1, 3))
        assert set(blocks.flatten().tolist()) == {0.0, 1.0}
    assert "head.weight" not in counts.masks[0] and counts.leaks == []


def test_random_growth_needs_no_gradient_and_is_another() -> None:
    ends = [
        fit_on(gpt(), make_batch("tiny_gpt"), RigL(sparsity=0.5, interval=1, grow=grow, until=1.0), steps=2).masks[-1]
        for grow in ("gradient", "random")
    ]
    assert any(not torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


@pytest.mark.parametrize("name", ["qwen3", "modernbert", "qwen3_moe", "resnet", "vit", "gpt2"])
def test_unchanged_modules(name: str) -> None:
    net: Any = hugging_face("gpt2", 2) if name == "gpt2" else family(name)
    kind = {"vit": "vit", "resnet": "vit"}.get(name, "gpt2")
    technique = RigL(sparsity=0.7, interval=1, until=1.0)
    counts = fit_on(net, make_batch(kind), technique, steps=2)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.7, abs=2e-3)
    held = {n: p for n, p in net.named_parameters() if n in counts.masks[0]}
    tables = {id(m.weight) for m in net.modules() if isinstance(m, nn.Embedding)}
    assert not any(id(p) in tables for p in held.values())
    if name == "qwen3_moe":
        assert any(p.ndim == 3 for p in held.values())
    if name == "resnet":
        assert sum(p.ndim == 4 for p in held.values()) == 14
    if name == "gpt2":
        assert len(held) == 8, "the tied head is an embedding"


def test_svites_setting_on_a_vision_transformer_with_its_patches_and_head_dense() -> None:
    """Half of the weights moves at first, and the dense gradient says where to, as of the last of each interval's steps."""
    technique = RigL(
        sparsity=0.5, distribution="erk", interval=2, fraction=0.5, until=0.8, dense=["*.projection", "*.classifier"]
    )
    net: Any = hugging_face("vit", 2)
    counts = fit_on(net, make_batch("vit"), technique, steps=6)
    assert counts.leaks == [] and sparsity_of(counts) == pytest.approx(0.5, abs=2e-3)
    assert not any("projection" in name or "classifier" in name for name in counts.masks[0])
    for step in (1, 3):
        share, moved = 0.25 * (1 + math.cos(math.pi * step / 6 / 0.8)), 0
        for name, before in counts.masks[step - 1].items():
            after, count = counts.masks[step][name], int(before.sum())
            assert int(after.sum()) == count
            assert int((before & ~after).sum()) <= int(share * count)
            moved += int((before & ~after).sum())
        assert moved > 0
    assert all(torch.equal(counts.masks[4][name], mask) for name, mask in counts.masks[5].items()), "until 0.8"


@pytest.mark.filterwarnings("ignore:RigL. the run ends after 1 step")
def test_a_tied_head_is_masked_if_asked_for() -> None:
    technique = RigL(sparsity=0.5, names=["lm_head", "c_fc"])
    counts = fit_on(hugging_face("gpt2", 2), make_batch("gpt2"), technique, steps=1)
    assert set(counts.masks[0]) == {
        "model.transformer.wte.weight",
        *(f"model.transformer.h.{i}.mlp.c_fc.weight" for i in (0, 1)),
    }
    assert counts.leaks == []


def test_muon_steps_all_of_a_matrix_and_masks_hold() -> None:
    net = gpt()
    net.configure_optimizers = lambda: Muon(net.named_parameters(), lr=0.01)  # pyright: ignore[reportAttributeAccessIssue]
    assert fit_on(net, make_batch("tiny_gpt"), RigL(sparsity=0.5, interval=2), steps=4).leaks == []


def test_an_optimizer_with_moments_in_another_basis_is_refused() -> None:
    net = gpt()
    net.configure_optimizers = lambda: SOAP(net.named_parameters(), lr=0.01)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="RigL: SOAP keeps moments of sums of weights"):
        fit_on(net, make_batch("tiny_gpt"), RigL(sparsity=0.5))


def test_checkpoints_have_the_zeros_and_other_settings_are_refused(tmp_path: Path) -> None:
    _, t = fit("classifier", lambda: [RigL(sparsity=0.5, interval=2)], max_steps=3)
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    masks = saved["callbacks"]["RigL"]["masks"]
    assert all(not saved["state_dict"][name][~mask].any() for name, mask in masks.items()) and len(masks) == 4
    with pytest.raises(ValueError, match=r"masks were made with .*0.5.*this run has .*0.6"):
        fit("classifier", lambda: [RigL(sparsity=0.6, interval=2)], resume=tmp_path / "a.ckpt")
    fit("classifier", list, max_steps=2)[1].save_checkpoint(tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="saved without it"):
        fit("classifier", lambda: [RigL(sparsity=0.5)], resume=tmp_path / "b.ckpt")


def test_resumes_where_another_has_frozen_what_is_masked(tmp_path: Path) -> None:
    def build() -> list[Any]:
        return [LayerFreezing(start=0.0, end=0.3), RigL(sparsity=0.5, interval=2)]

    whole = final_state(*fit("tiny_gpt", build, callbacks=[SaveBatches(tmp_path, [6])], max_steps=8))
    assert differences(whole, final_state(*fit("tiny_gpt", build, resume=tmp_path / "batch=6.ckpt", max_steps=8))) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, r"RigL\(sparsity=1.0\): expected a number in \[0, 1\): the fraction of the masked weights"),
        ({"sparsity": -0.1}, r"sparsity=-0.1\): expected a number in"),
        ({"distribution": "ER"}, "distribution='ER'.: expected 'uniform' or 'erk'"),
        ({"interval": 0}, "interval=0.: expected an integer >= 1: the number of optimizer steps"),
        ({"fraction": 0.0}, r"fraction=0.0.: expected a number in \(0, 1\]"),
        ({"until": 1.5}, r"until=1.5.: expected a number in \(0, 1\]: the fraction of the budget"),
        ({"grow": "momentum"}, "grow='momentum'.: expected"),
        ({"block": (0, 4)}, r"block=\(0, 4\)\): expected 2 values, each an integer >= 1: rows and columns"),
        ({"names": "head"}, "expected a list of dotted paths"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RigL(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": ["blocks.0.1"]}, r"names=\['blocks.0.1', ...\].*means none of the 4 weights .*Nearest: .*blocks.0"),
        ({"dense": ["haed"]}, r"dense=\['haed', ...\].*Nearest: .*head"),
        ({"dense": ["*"]}, "no trainable weight of a linear layer .* besides dense="),
        ({"block": (4, 4)}, r"1 weights do not consist of whole blocks, such as head.1.weight \(3, 8\)"),
    ],
)
def test_what_means_nothing_is_refused_at_setup(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(RigL(**settings), max_steps=1).fit(TinyClassifier(), loader("classifier"))


@pytest.mark.parametrize(
    ("technique", "told"),
    [
        (RigL(), "every 100, up to until=0.75 of the run, so they keep their random start"),
        (RigL(interval=10), "every 10, up to until=0.75"),
        (SET(), "every 100, so they keep"),
    ],
)
def test_a_run_in_which_no_mask_moves_is_told(technique: RigL | SET, told: str) -> None:
    who = type(technique).__name__
    with pytest.warns(
        UserWarning, match=rf"{who}: the run ends after 12 steps, and masks change {told}.* smaller `interval`"
    ):
        trainer(technique, max_steps=12).fit(gpt(), loader("tiny_gpt"))
    assert technique.report()["changes"] == 0
    moves = type(technique)(interval=9)
    trainer(moves, max_steps=12).fit(gpt(), loader("tiny_gpt"))
    assert moves.report()["changes"] == 1


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "RigL", {"sparsity": 0.5, "interval": 2, "block": [1, 1], "dense": ["head.*"]}, max_steps=3)
