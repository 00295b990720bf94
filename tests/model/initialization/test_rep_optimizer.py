"""RepOptimizer: a network of blocks with branches, trained by torch's SGD, has the weights of the plain network."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import ReplaceOptimizer, RepOptimizer
from lightning_eff.model.initialization.rep_optimizer import scale_at
from tests.cases import Case
from tests.models import TinyGPT, trainer
from tests.runs import fit_yaml

NONE = "found no 3 x 3 convolution to train in"
CASES = {
    "RepOptimizer": Case(
        active=lambda: RepOptimizer(),
        neutral=lambda: RepOptimizer(names=[]),
        model="convolved",
        refuses=dict.fromkeys(("tiny_gpt", "gpt2", "llama", "bert", "vit", "translator", "classifier"), NONE),
        lost=(TinyGPT, "tiny_gpt", NONE),
    )
}
STEPS = 6


def convolutions() -> list[nn.Conv2d]:
    """Convolutions with a stride, without, of depth alone, in groups, and with a dilation."""
    return [
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(4, 4, 3, padding="same", bias=False),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 6, 3, padding=2, dilation=2),
    ]


def network(layers: Sequence[nn.Module]) -> nn.Sequential:
    inner = [part for m in layers for part in (m, nn.BatchNorm2d(getattr(m, "out_channels")), nn.ReLU())]  # noqa: B009
    return nn.Sequential(*inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


class Plain(pl.LightningModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = network(convolutions())
        self.settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, **settings}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), **self.settings)


class Branches(nn.Module):
    """A block of branches with constant scales, as the paper's equation has it."""

    def __init__(self, plain: nn.Conv2d, point: Tensor, scales: Sequence[Tensor]) -> None:
        super().__init__()
        self.out_channels = plain.out_channels
        self.kernel = copy.deepcopy(plain)
        self.kernel.bias = None
        self.bias = None if plain.bias is None else nn.Parameter(plain.bias.detach().clone())
        self.point = nn.Conv2d(
            plain.in_channels, plain.out_channels, 1, plain.stride[0], groups=plain.groups, bias=False
        )
        self.point.weight = nn.Parameter(point.clone())
        self.s, self.t = (x.view(-1, 1, 1) for x in scales[:2])
        self.e = nn.Parameter(scales[2].clone()) if len(scales) == 3 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.s * self.kernel(x) + self.t * self.point(x)
        if self.e is not None:
            y = y + self.e.view(-1, 1, 1) * x
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)

    def merged(self) -> Tensor:
        w = self.s[..., None] * self.kernel.weight + F.pad(self.t[..., None] * self.point.weight, [1, 1, 1, 1])
        for i, e in enumerate(() if self.e is None else self.e):
            w[i, i % w.shape[1], 1, 1] = w[i, i % w.shape[1], 1, 1] + e
        return w.detach()


class First(pl.Callback):
    """Notes the weights before the first step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(4 * STEPS, 3, 9, 9, generator=g, dtype=torch.float64), torch.arange(4 * STEPS) % 3)


def searched(path: Path, keeps: Sequence[bool] = (False, True, True, True, False)) -> list[list[Tensor]]:
    """Save scales as the authors' search has them, and return those of each block as [s, t] or [s, t, e]."""
    g, saved, every = torch.Generator().manual_seed(2), {}, []
    for i, (keep, size) in enumerate(zip(keeps, (4, 4, 4, 4, 6), strict=True)):
        scales = [torch.rand(size, generator=g) + 0.3 for _ in range(2 + keep)]
        for name, x in zip(("scale_conv", "scale_1x1", "scale_identity"), scales, strict=False):
            saved[f"stage1.{i}.{name}.weight"] = x
        saved[f"stage1.{i}.conv.weight"] = torch.randn(size, 4, 3, 3)
        every.append([x.double() for x in scales])
    torch.save({"model": saved, "epoch": 3}, path)
    return every


@pytest.mark.parametrize(
    "settings",
    [{}, {"nesterov": True}, {"momentum": 0.0}, {"weight_decay": 0.0, "dampening": 0.3}, {"fused": True}],
    ids=str,
)
def test_the_weights_are_those_of_blocks_with_branches(settings: dict[str, Any], tmp_path: Path) -> None:
    scales = searched(tmp_path / "scales.pth")
    plain, first = Plain(**settings).double(), First()
    before = copy.deepcopy(plain)
    t = trainer(RepOptimizer(tmp_path / "scales.pth"), first, max_epochs=1, precision="64-true")
    t.fit(plain, DataLoader(data(), 4))
    assert t.global_step == STEPS

    blocks: list[Any] = []
    paths = [path for path, m in before.net.named_modules() if isinstance(m, nn.Conv2d)]
    for path, (s, t_, *e) in zip(paths, scales, strict=True):
        m: Any = before.net.get_submodule(path)
        point = first.weights[f"net.{path}.weight"] - s.view(-1, 1, 1, 1) * m.weight.detach()
        for i in range(len(e[0]) if e else 0):
            point[i, i % point.shape[1], 1, 1] -= e[0][i]
        rest = point.clone()
        rest[:, :, 1, 1] = 0
        assert rest.abs().max() < 1e-12
        point = point[:, :, 1:2, 1:2] / t_.view(-1, 1, 1, 1)
        assert 0.3 < point.abs().max() * point.shape[1] ** 0.5 < 1 + 1e-6  # as nn.Conv2d draws it
        blocks.append(Branches(m, point, [s, t_, *e]))
    net = network(blocks).double()
    net[-1] = copy.deepcopy(before.net[-1])
    optimizer = torch.optim.SGD(net.parameters(), **plain.settings)
    for x, y in DataLoader(data(), 4):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for path, block in zip(paths, blocks, strict=True):
        m = plain.net.get_submodule(path)
        torch.testing.assert_close(m.weight, block.merged(), rtol=0, atol=1e-10)
        assert (m.weight - first.weights[f"net.{path}.weight"]).abs().max() > 1e-3
    torch.testing.assert_close(plain.net[-1].weight, net[-1].weight, rtol=0, atol=1e-10)


def scales_of(technique: RepOptimizer, net: pl.LightningModule) -> list[list[list[float]]]:
    trainer(technique, max_steps=1, precision="64-true").fit(net, DataLoader(data(), 4))
    return [[x.tolist() for x in scales] for scales in technique.state_dict()["scales"].values()]


def test_scales_begin_by_the_depth_in_a_stage() -> None:
    assert [scale_at(i) for i in range(4)] == [1.0, 2**0.5, 1.0, (2 / 3) ** 0.5]
    found = scales_of(RepOptimizer(), Plain().double())
    assert [len(scales) for scales in found] == [2, 3, 3, 3, 2]
    for scales, at in zip(found, (1.0, 2**0.5, 1.0, (2 / 3) ** 0.5, 1.0), strict=True):
        assert scales[0] == scales[1] == pytest.approx([at] * len(scales[0]))
        assert scales[2:] in ([], [[1.0] * 4])


def test_scales_by_pattern_and_convolutions_by_name() -> None:
    found = scales_of(
        RepOptimizer({"net.3": [0.5, 0.25, 2.0], "net.*": [3, 4]}, names=["net.0", "3", "net.9"]), Plain().double()
    )
    assert [[x[0] for x in scales] for scales in found] == [[3, 4], [0.5, 0.25, 2], [3, 4, 1]]


def test_a_resumed_run_keeps_its_scales_without_the_file(tmp_path: Path) -> None:
    searched(tmp_path / "scales.pth")
    nets: list[Any] = []
    for steps, resume in ((4, None), (STEPS, "half.ckpt"), (STEPS, None)):
        nets.append(Plain().double())
        technique = RepOptimizer(tmp_path / "scales.pth")
        t = trainer(technique, max_steps=steps, precision="64-true")
        if resume:
            torch.save({}, tmp_path / "scales.pth")
        t.fit(nets[-1], DataLoader(data(), 4), ckpt_path=resume and tmp_path / resume)
        if steps == 4:
            t.save_checkpoint(tmp_path / "half.ckpt")
        if resume:
            searched(tmp_path / "scales.pth")
    for a, b in zip(nets[1].parameters(), nets[2].parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_file_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "scales.pth"
    with pytest.raises(ValueError, match="there is no such file"):
        scales_of(RepOptimizer(str(path)), Plain().double())
    searched(path)
    with pytest.raises(
        ValueError, match=r"has the scales of 5 blocks .* and the module has 1 convolutions to train \(net.0\)"
    ):
        scales_of(RepOptimizer(path, names=["net.0"]), Plain().double())
    searched(path, (True, True, True, True, False))
    with pytest.raises(ValueError, match=r"stage1.0 \(of \[4, 4, 4\] channels, with an identity\) do not fit net.0"):
        scales_of(RepOptimizer(path), Plain().double())


def test_what_cannot_train_so_is_refused() -> None:
    class ByAdam(Plain):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    with pytest.raises(ValueError, match=r"AdamW trains net.0.weight, but only under SGD .* Return torch.optim.SGD"):
        scales_of(RepOptimizer(), ByAdam().double())
    with pytest.raises(ValueError, match="cannot train together: another optimizer would"):
        trainer(RepOptimizer(), ReplaceOptimizer("muon", lr=0.02), max_steps=1).fit(Plain(), DataLoader(data(), 4))
    large = Plain().double()
    large.net[3] = nn.Conv2d(4, 4, 5, padding=2)
    large.net[6] = nn.Conv2d(4, 4, 3)
    large.double()
    with pytest.raises(ValueError, match=r"net.3: its kernel is 5 x 5. Leave it out."):
        scales_of(RepOptimizer(names=["net.0", "net.3"]), large)
    with pytest.raises(ValueError, match=r"net.6: the center of its kernel is not at the pixel"):
        scales_of(RepOptimizer(names=["net.0", "net.6"]), large)
    assert len(scales_of(RepOptimizer(), large)) == 3
    frozen = Plain().double()
    frozen.configure_optimizers = lambda: torch.optim.SGD(frozen.net[-1].parameters(), 0.1)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=f"{NONE}.*no optimizer trains it"):
        scales_of(RepOptimizer(), frozen)
    with pytest.raises(ValueError, match=r"gives net.0 a scale of the identity"):
        scales_of(RepOptimizer({"net.0": [1, 1, 1]}), Plain().double())
    with pytest.raises(ValueError, match=r"\(scales=\['nett.0'\]\): it matches none of the 5 convolutions"):
        scales_of(RepOptimizer({"nett.0": [1, 1]}), Plain().double())


@pytest.mark.parametrize(
    "wrong", [{"scales": 3}, {"scales": {"a": 1.0}}, {"scales": {"a": [1.0]}}, {"names": "net"}, {"force": 1}]
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        RepOptimizer(**wrong)


def test_a_yaml_of_the_command_line_trains_with_it(tmp_path: Path) -> None:
    module, of = (
        "tests.model.initialization.test_rep_optimizer.Plain",
        "tests.model.initialization.test_rep_optimizer.Pixels",
    )
    fit_yaml(tmp_path, "RepOptimizer", {"scales": {"net.3": [0.5, 0.5, 1.0]}}, model=module, data=of, max_steps=2)


class Pixels(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        x, y = data().tensors
        return DataLoader(TensorDataset(x.float(), y), 4)
