"""SemiStructuredSparsity: two of four in every product, a dense straight-through gradient, and zeros in what is kept."""

from itertools import product
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader

from lightning_eff import SemiStructuredSparsity
from lightning_eff._core.search_space import RunProfile, SearchSpace
from lightning_eff.model.sparsity._masks.two_of_four import mask_of, of_rows, of_tiles, patterns
from tests.cases import Case, no_map
from tests.families import module as family
from tests.models import TinyClassifier, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import SaveBatches, differences, final_state, fit, fit_yaml

CASES = {
    "SemiStructuredSparsity": Case(
        active=lambda: SemiStructuredSparsity(),
        neutral=lambda: SemiStructuredSparsity(until=0.0),
        lost=(no_map, "classifier", "no trainable weight of a linear layer or convolution"),
    )
}


def most_in_four(w: Tensor) -> int:
    """How many of an aligned four along the last dimension are not zero, at most."""
    return int((w.unflatten(-1, (-1, 4)) != 0).sum(-1).max())


# -- the rules


def test_rows_keep_the_two_largest_of_each_four_and_of_equal_ones_the_first() -> None:
    w = torch.randint(0, 4, (64, 16), generator=torch.Generator().manual_seed(0)).float()
    for row, mask in zip(w.tolist(), of_rows(w).tolist(), strict=True):
        for i in range(0, 16, 4):
            best = sorted(range(4), key=lambda j: (-row[i + j], j))[:2]
            assert [j for j in range(4) if mask[i + j]] == sorted(best)


def test_tiles_keep_the_largest_sum_of_all_masks_with_two_in_rows_and_columns() -> None:
    masks = [m for m in product((0, 1), repeat=16) if all(sum(m[4 * i : 4 * i + 4]) == 2 for i in range(4))]
    masks = [m for m in masks if all(sum(m[i::4]) == 2 for i in range(4))]
    assert len(masks) == len(patterns()) == 90
    w = torch.rand(2, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = of_tiles(w)
    assert most_in_four(w * made) == most_in_four((w * made).mT) == 2
    for k, i, j in product(range(2), range(0, 8, 4), range(0, 12, 4)):
        tile = w[k, i : i + 4, j : j + 4].flatten().tolist()
        best = max(masks, key=lambda m: sum(a * b for a, b in zip(tile, m, strict=True)))
        assert made[k, i : i + 4, j : j + 4].flatten().int().tolist() == list(best)


def test_fours_lie_along_the_inputs_whatever_the_layout() -> None:
    w = torch.randn(8, 12, 3, 3)
    by_place = mask_of(w, (2, 3, 0, 1), tiles=False)
    assert torch.equal(by_place[:, :, 1, 2], of_rows(w[:, :, 1, 2].abs()))
    turned = mask_of(w[:, :, 0, 0].T, (1, 0), tiles=False)
    assert torch.equal(turned.T, of_rows(w[:, :, 0, 0].abs()))


# -- the run


class Straight(torch.autograd.Function):
    """``M w`` forward, and the gradient as it is for ``w``."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, decay: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        four = w.detach().abs().reshape(w.shape[0], -1, 4)
        kept = torch.zeros_like(four).scatter_(-1, four.topk(2).indices, 1.0).view_as(w)
        ctx.save_for_backward(w, kept)
        ctx.decay = decay
        return w * kept

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        w, kept = ctx.saved_tensors
        return grads[0] + ctx.decay * (1 - kept) * w, None


class Step(nn.Module):
    """A module whose call is another's training step."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Any) -> Tensor:
        return self.net.training_step(batch, 0)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.05)])
def test_a_run_is_that_of_masked_weights_with_a_straight_through_gradient(accumulate: int, clip: float | None) -> None:
    decay, steps = 0.05, 5
    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0).double()
    torch.manual_seed(0)
    plain = TinyGPT(2, dropout=0.0).double()
    plain.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    masked = [n for n, p in plain.named_parameters() if p.ndim == 2 and "embed" not in n and "position" not in n]
    data = [make_batch("tiny_gpt", seed=i) for i in range(steps * accumulate)]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in data[step * accumulate :][:accumulate]:
            weights = {
                n: Straight.apply(p, decay / accumulate) if n in masked else p for n, p in plain.named_parameters()
            }
            prefixed: Any = {f"net.{n}": w for n, w in weights.items()}
            (functional_call(Step(plain), prefixed, (batch,)) / accumulate).backward()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()

    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    technique = SemiStructuredSparsity(decay=decay)
    loaded: DataLoader[Any] = DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType]
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    trainer(technique, max_steps=steps, **settings).fit(net, loaded)
    state = technique.state_dict()["dense"]
    assert set(state) == set(masked) == set(technique.masks)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(state.get(name, dict(net.named_parameters())[name]), p, rtol=1e-9, atol=1e-11)
        if name in masked:
            end = dict(net.named_parameters())[name]
            assert most_in_four(end) <= 2 and torch.equal(end, end * technique.masks[name])


class Looks(pl.Callback):
    """What the network computes with, by the phase, as a hook of a map sees it; and the gradient's zeros."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"train": [], "eval": [], "gradient": [], "between": []}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def look(m: nn.Module, *_: Any) -> None:
            self.seen["train" if m.training else "eval"].append(most_in_four(m.weight.detach()))  # pyright: ignore[reportArgumentType, reportCallIssue]

        pl_module.blocks[0].mlp[0].register_forward_pre_hook(look)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.seen["gradient"].append(int((pl_module.blocks[0].mlp[0].weight.grad == 0).sum()))
        self.seen["between"].append(most_in_four(pl_module.blocks[0].mlp[0].weight.detach()))


@pytest.mark.parametrize(("until", "sparse"), [(1.0, 4), (0.5, 2)])
def test_sparse_for_a_share_of_the_run(until: float, sparse: int, tmp_path: Path) -> None:
    looks, technique = Looks(), SemiStructuredSparsity(until=until, tiles=True)
    torch.manual_seed(0)
    net = TinyGPT(2, dropout=0.0)
    data = loader("tiny_gpt", 16)
    saved = SaveBatches(tmp_path, [1, 4])
    trainer(technique, looks, saved, max_steps=4, limit_val_batches=1, num_sanity_val_steps=0).fit(net, data, data)
    assert looks.seen["train"] == [2] * sparse + [4] * (4 - sparse)
    assert looks.seen["eval"] == [2 if until == 1.0 else 4]
    assert looks.seen["between"] == [4] * 4 and looks.seen["gradient"] == [0] * 4, "weights and gradients are dense"
    for batch, most in ((1, 2), (4, 2 if until == 1.0 else 4)):
        weights = torch.load(tmp_path / f"batch={batch}.ckpt", weights_only=True)["state_dict"]
        fc, proj = weights["blocks.0.mlp.0.weight"], weights["blocks.1.proj.weight"]
        assert [most_in_four(w) for w in (fc, fc.T, proj, proj.T)] == [most] * 4
    assert most_in_four(net.get_parameter("blocks.1.proj.weight").detach()) == (2 if until == 1.0 else 4)
    assert technique.report()["sparsity"] == (0.5 if until == 1.0 else 0.0)


def test_a_run_resumes_from_dense_weights_in_mid_window(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 3}

    def build() -> list[Any]:
        return [SemiStructuredSparsity(until=0.5)]

    whole = final_state(*fit("tiny_gpt", build, callbacks=[SaveBatches(tmp_path, [5, 10])], **settings))
    for batch in (5, 10):
        again = final_state(*fit("tiny_gpt", build, resume=tmp_path / f"batch={batch}.ckpt", **settings))
        assert differences(whole, again) == []


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "resnet", "gpt2"])
def test_unchanged_modules(name: str, tiles: bool) -> None:
    net: Any = hugging_face("gpt2", 2) if name == "gpt2" else family(name)
    technique = SemiStructuredSparsity(tiles=tiles)
    batch = make_batch("vit" if name == "resnet" else "gpt2")
    trainer(technique, max_steps=1).fit(net, DataLoader([batch], batch_size=None))  # pyright: ignore[reportArgumentType]
    named = dict(net.named_parameters())
    assert technique.masks and not any("embed" in n or "wte" in n for n in technique.masks)
    for name_, mask in technique.masks.items():
        w = named[name_].detach()
        assert int(mask.sum()) * 2 == mask.numel()
        along = w.T if name == "gpt2" else w.permute(2, 3, 0, 1) if w.ndim == 4 else w
        assert most_in_four(along) <= 2 and (not tiles or most_in_four(along.mT) <= 2)
    if name == "qwen3_moe":
        assert any(m.ndim == 3 for m in technique.masks.values()) == tiles


def test_a_tied_head_is_masked_if_asked_for() -> None:
    net: Any = hugging_face("gpt2", 2)
    technique = SemiStructuredSparsity(names=["lm_head"])
    trainer(technique, max_steps=1).fit(net, DataLoader([make_batch("gpt2")], batch_size=None))  # pyright: ignore[reportArgumentType]
    assert [*technique.masks] == ["model.transformer.wte.weight"]
    assert net.model.lm_head.weight is net.model.transformer.wte.weight and most_in_four(net.model.lm_head.weight) == 2


def test_gradient_checkpointing_computes_with_masked_weights_again() -> None:
    class Checkpointed(TinyClassifier):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    ends: list[Tensor] = []
    for made in (TinyClassifier, Checkpointed):
        torch.manual_seed(0)
        net, technique = made(batch_norm=False), SemiStructuredSparsity()
        net.eval()
        trainer(technique, max_steps=3).fit(net, loader("classifier", shuffle=False))
        ends.append(technique.state_dict()["dense"]["blocks.0.0.weight"])
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": -1.0}, r"SemiStructuredSparsity\(decay=-1.0\): expected a finite number >= 0"),
        ({"until": 1.5}, r"until=1.5.: expected a number in \[0, 1\]: the fraction of the budget"),
        ({"tiles": 1}, "tiles=1.: expected True or False"),
        ({"names": "head"}, "expected a list of dotted paths"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SemiStructuredSparsity(**settings)


class Odd(TinyClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(8, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.odd(batch[0]).square().mean()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"names": ["odd"], "tiles": True},
            r"1 weights cannot be 2:4: odd.weight \(6, 8\): its 6 and 8 outputs",
        ),
        ({"names": ["od"]}, r"names=\['od', ...\].*Nearest: .*odd"),
        ({"dense": ["*"]}, "no trainable weight of a linear layer .* besides dense="),
    ],
)
def test_what_cannot_be_masked_is_refused_at_setup(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(SemiStructuredSparsity(**settings), max_steps=1).fit(Odd(), loader("classifier"))


def test_what_has_no_whole_fours_stays_dense_by_itself() -> None:
    technique = SemiStructuredSparsity(tiles=True)
    trainer(technique, max_steps=1).fit(Odd(), loader("classifier"))
    assert technique.masks and not {"odd.weight", "head.1.weight"} & set(technique.masks)


def test_a_search_tries_it_only_where_torch_has_sparse_kernels() -> None:
    pointless = cast(SearchSpace, SemiStructuredSparsity.search_space).pointless
    assert pointless(RunProfile(accelerator="cuda")) is None
    assert pointless(RunProfile()) == "masked products take as long as dense ones, so it saves no time"


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SemiStructuredSparsity", {"tiles": True, "until": 0.7, "dense": ["head.*"]}, max_steps=3)
