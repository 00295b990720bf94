"""Convolutions as one down columns and one along rows: the nearest such pair, exact at full rank, smaller, folded by export."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import LowRankConv
from lightning_eff.model.layers._low_rank.factored import FactoredConv2d, conv_matrix
from tests import families
from tests.cases import Case, classifier
from tests.models import flat
from tests.runs import fit_yaml

CASES = {
    "LowRankConv": Case(
        active=lambda: LowRankConv(rank=1, min_channels=1),
        neutral=lambda: LowRankConv(names=[]),
        model="vit",
        architecture=True,
        refuses=dict.fromkeys(("tiny_gpt", "gpt2", "llama", "bert", "classifier"), "found no convolution in"),
        lost=(classifier, "classifier", "found no convolution in TinyClassifier that"),
    )
}


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 5), "padding": (2, 1), "stride": (2, 1), "dilation": (1, 2)},
        {"kernel_size": (4, 2), "stride": (3, 2), "bias": False},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 1, "stride": 2},
    ],
)
def test_at_full_rank_a_pair_is_the_convolution(settings: dict[str, Any], mode: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(6, 10, padding_mode=mode, **settings)).double()
    net, x = eff.apply(copy.deepcopy(plain), LowRankConv(1.0, names=["0"])), torch.randn(2, 6, 11, 12).double()
    made = net[0]
    assert isinstance(made, FactoredConv2d) and made.first.kernel_size[1] == made.second.kernel_size[0] == 1  # pyright: ignore[reportIndexIssue, reportOptionalSubscript]
    torch.testing.assert_close(net(x), plain(x))
    torch.testing.assert_close(made.weight, plain[0].weight)
    torch.testing.assert_close(eff.export(net)(x), plain(x))


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_no_pair_of_the_rank_is_nearer(rank: int) -> None:
    """What is left over is the tail of the singular values of columns against rows, in float64 by eigenvalues."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(5, 8, (3, 2))).double()
    made: Any = eff.apply(copy.deepcopy(plain), LowRankConv(rank, names=["0"]))[0]
    w = plain[0].weight.detach()
    assert isinstance(w, Tensor)
    across = torch.einsum("ncyx,ndzx->cydz", w, w).reshape(15, 15)  # (C ky) x (C ky), summed over outputs and rows
    tail = torch.linalg.eigvalsh(across).flip(0)[rank:].sum()
    torch.testing.assert_close((made.weight - w).square().sum(), tail)
    h, v = made.second.weight, made.first.weight
    by_hand = sum(h[:, k, 0, None, None, :] * v[k, :, :, 0][None, :, :, None] for k in range(rank))
    torch.testing.assert_close(made.weight, by_hand)
    assert conv_matrix(w).shape == (16, 15) and torch.equal(conv_matrix(w)[2 * 3 + 1, 4 * 3 + 2], w[3, 4, 2, 1])


def test_of_a_resnet_wide_convolutions_become_pairs_and_products_are_fewer() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def flops(net: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            net.model(**families.batch("resnet", 2))
        return counter.get_total_flops()

    plain = families.module("resnet")
    net = eff.apply(copy.deepcopy(plain), LowRankConv(0.25))
    made = {path: m for path, m in net.named_modules() if isinstance(m, FactoredConv2d)}
    assert set(made) == {
        *(f"model.layer{j}.{i}.conv{k}" for j, n in ((1, 4), (2, 2)) for i in range(n) for k in (1, 2)),
        "model.down",
    }
    assert {m.rank for m in made.values()} == {12, 24, 4}
    saved = sum(
        m.weight.numel() * (64 if "layer1" in path else 16)
        - m.rank * (64 if "layer1" in path else 16) * 3 * 2 * m.second.out_channels  # pyright: ignore[reportOperatorIssue]
        for path, m in made.items()
        if "down" not in path
    )
    down = 16 * (32 * 16) - (4 * 16 * 32 + 4 * 32 * 16)  # rows fall away between the two: 8 x 8, 4 x 8, 4 x 4
    assert flops(plain) - flops(net) == 2 * 2 * (saved + down)
    net.eval()
    for p in net.parameters():
        p.requires_grad_(False)
    exported = eff.export(net)
    batch = families.batch("resnet", 3)
    torch.testing.assert_close(exported.model(**batch).loss, net.model(**batch).loss, rtol=1e-4, atol=1e-5)
    assert exported.state_dict().keys() == plain.state_dict().keys()


def test_it_trains_a_resnet_and_resumes_to_the_bit(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)
    net, _, _ = families.train("resnet", LowRankConv(energy=0.5), saving, enable_checkpointing=True)
    again, _, steps = families.train("resnet", LowRankConv(energy=0.5), resume=tmp_path / "step=3.ckpt")
    assert steps == 6 and torch.equal(flat(net), flat(again)) and all(p.isfinite().all() for p in net.parameters())
    plain, _, _ = families.train("resnet")
    assert flat(plain).numel() > flat(net).numel()


def test_what_is_left_and_what_cannot_be() -> None:
    grouped = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 32, 3), nn.Conv1d(32, 32, 3))
    made = eff.apply(copy.deepcopy(grouped), LowRankConv())
    assert [type(m).__name__ for m in made] == ["Conv2d", "FactoredConv2d", "Conv1d"]
    with pytest.raises(ValueError, match=r"0 \(Conv2d\) cannot be changed: its 32 groups"):
        eff.apply(copy.deepcopy(grouped), LowRankConv(names=["0"]))
    with pytest.raises(ValueError, match=r"2 \(Conv1d\) cannot be changed: it is Conv1d, and only two-dim"):
        eff.apply(copy.deepcopy(grouped), LowRankConv(names=["2"]))
    with pytest.raises(ValueError, match=r"rank=97\): the full rank of 1 \(Conv2d\) is 96\. Give rank=96"):
        eff.apply(copy.deepcopy(grouped), LowRankConv(97, names=["1"]))
    with pytest.raises(
        ValueError, match=r"no convolution in Sequential.*two factors of rank 96 have 18,432 weights.* has 9,216"
    ):
        eff.apply(copy.deepcopy(grouped), LowRankConv(1.0))
    with pytest.raises(ValueError, match=r"fewer channels than min_channels=512.* Set min_channels=32 or lower, or"):
        eff.apply(copy.deepcopy(grouped), LowRankConv(min_channels=512))
    with pytest.raises(ValueError, match=r"it matches none of the 14 convolutions of HuggingFace.*Nearest: .*layer1"):
        eff.apply(families.module("resnet"), LowRankConv(names=["layr1*"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": -1}, r"rank=-1\): expected an integer >= 1"),
        ({"energy": 2}, "energy=2"),
        (
            {"names": [3]},
            r"names=\[3\]\): expected a list of dotted paths or patterns, or None: dotted paths of the convolutions",
        ),
        ({"min_channels": "few"}, r"min_channels='few'\): expected an integer >= 1"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRankConv(**settings)


class Pictures(pl.LightningModule):
    """A convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 16, 3), nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(-1, 1, 2, 4).repeat(1, 1, 2, 1)
        return nn.functional.cross_entropy(self.head(self.conv(x).mean((2, 3))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_in_a_config(tmp_path: Path) -> None:
    arguments = {"rank": 2, "names": ["conv"]}
    model = f"{__name__}.Pictures"
    fit_yaml(tmp_path, "LowRankConv", arguments, model=model, keeps_state=False, max_steps=3)
