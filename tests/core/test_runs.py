"""Blocks in an nn.Sequential that has other modules beside them: found, named, and trained as in a container of their own."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lightning_eff as le
from lightning_eff._core._stack.finding import find_stages, runs
from lightning_eff._core.blocks import BlockStack, candidates, find_stack, refuse_compiled_around
from lightning_eff._core.technique import Technique
from lightning_eff.model.execution.regional_compilation import check_stack, stacks_of
from tests.models import flat, loader, trainer


class Residual(nn.Module):
    """A residual block of an image network, which may halve the resolution."""

    def __init__(self, dim: int = 8, entered: int | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(entered or dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.halves = entered is not None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu()
        return F.avg_pool2d(h, 2) if self.halves else x + h


class Images(pl.LightningModule):
    """A network for images, in one ``nn.Sequential`` or with its blocks in one of their own."""

    def __init__(self, *, mixed: bool, blocks: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        stem = nn.Conv2d(1, 8, 3, padding=1)
        blocks = blocks or [Residual() for _ in range(4)]
        last: Any = blocks[-1]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last.conv.out_channels, 5)]
        self.net: Any = None
        if mixed:
            self.net = nn.Sequential(stem, *blocks, *head)
        else:
            self.stem, self.blocks, self.head = stem, nn.Sequential(*blocks), nn.Sequential(*head)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.net is not None else self.head(self.blocks(self.stem(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["pixel_values"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def of_widths() -> Images:
    """Two stages of three blocks, of 8 and of 16 channels, in one ``nn.Sequential``."""
    blocks = [*(Residual() for _ in range(3)), Residual(16, 8), *(Residual(16) for _ in range(2))]
    return Images(mixed=True, blocks=blocks)


# -- found and named


def test_a_run_of_blocks_is_found_and_named() -> None:
    net = Images(mixed=True)
    assert candidates(net) == [], "which is for those who need the whole container"
    for layers in (None, "net", "net[1:5]"):
        found = find_stack(net, layers, who="Test", in_runs=True)
        assert str(found) == "'net[1:5]' (4 x Residual)"
        assert list(found.named_blocks) == [f"net.{i}" for i in range(1, 5)]
        assert BlockStack(found).blocks == list(net.net[1:5])


def test_runs_are_of_one_width_and_together_they_are_stages() -> None:
    net = of_widths()
    assert [str(run) for run in runs(net)] == [
        "'net[1:4]' (3 x Residual)",
        "'net[4:5]' (1 x Residual)",
        "'net[5:7]' (2 x Residual)",
    ]
    assert find_stack(net, None, who="Test", in_runs=True).path == "net[1:4]"
    for layers in (None, "net", ["net[1:4]", "net[4:5]", "net[5:7]"]):
        assert find_stages(net, layers, who="Test") == runs(net)
    assert [c.path for c in find_stages(net, "net[5:7]", who="Test")] == ["net[5:7]"]


def test_of_runs_of_one_length_one_must_be_named() -> None:
    net = nn.Module()
    net.net = nn.Sequential(*(Residual() for _ in range(2)), nn.ReLU(), *(Residual() for _ in range(2)))
    for layers in (None, "net"):
        with pytest.raises(
            ValueError, match=r"2 .* are equally long: 'net\[0:2\]' .*, 'net\[3:5\]'.* layers='net\[0:2\]'"
        ):
            find_stack(net, layers, who="Test", in_runs=True)
    assert find_stack(net, "net[3:5]", who="Test", in_runs=True).start == 3


def test_a_container_of_blocks_alone_goes_before_a_longer_run() -> None:
    net = Images(mixed=True)
    net.own = nn.ModuleList(Residual() for _ in range(2))
    assert find_stack(net, None, who="Test", in_runs=True).path == "own"
    assert find_stack(net, "net", who="Test", in_runs=True).path == "net[1:5]"


def test_bare_layers_and_blocks_one_by_one_are_no_run() -> None:
    net = nn.Module()
    net.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Residual(), nn.ReLU(), Residual())
    with pytest.raises(
        ValueError, match=r"put the blocks into their own container \(self.blocks = nn.Sequential\(\*blocks\)\)"
    ):
        find_stack(net, None, who="Test", in_runs=True)
    with pytest.raises(
        ValueError, match=r"holds .*; expected blocks of one class\. Name another, or put the blocks into"
    ):
        find_stack(net, "net", who="Test", in_runs=True)


def test_a_part_of_a_run_is_refused_with_the_run() -> None:
    with pytest.raises(
        ValueError, match=r"'net\[2:4\]'\): that path names no submodule.* Candidates: 'net\[1:5\]' \(4 x"
    ):
        find_stack(Images(mixed=True), "net[2:4]", who="Test", in_runs=True)


def test_a_compiled_container_is_refused() -> None:
    net = Images(mixed=True)
    refuse_compiled_around(net, "net[1:5]", who="Test")
    net.net.compile()
    with pytest.raises(ValueError, match=r"the blocks at 'net\[1:5\]' are inside 'net', which is compiled as a whole"):
        refuse_compiled_around(net, "net[1:5]", who="Test")


def test_blocks_that_are_compiled_are_told_by_their_paths() -> None:
    net = Images(mixed=True)
    (stack,) = stacks_of(net, None)
    check_stack(net, stack)
    net.net[2].conv.compile()
    with pytest.raises(ValueError, match=r"'net\.2\.conv' is already compiled"):
        check_stack(net, stack)


# -- shown in part


def test_blocks_that_do_not_run_hand_their_input_on_and_leave_no_trace() -> None:
    net = Images(mixed=True).eval()
    parts, x = list(net.net), torch.randn(2, 1, 8, 8)
    stack = BlockStack(find_stack(net, None, who="Test", in_runs=True), net)

    def through(*indices: int) -> Tensor:
        return nn.Sequential(*(parts[i] for i in indices))(x)

    whole = net(x)
    stack.active = 2
    with stack.view(training=True):
        assert torch.equal(net(x), through(0, 1, 2, 5, 6, 7))
        assert len(net.net) == 8 and list(net.net) == parts and net.net[-1] is parts[-1]
        assert torch.equal(net.net[:5](x), through(0, 1, 2))
        with stack.shortened(1):
            assert torch.equal(net(x), through(0, 1, 5, 6, 7))
        assert torch.equal(copy.deepcopy(net)(x), whole), "a copy is of the plain module"
    stack.active, stack.absent = 4, frozenset({2})
    with stack.view(training=True):
        assert torch.equal(net(x), through(0, 1, 2, 4, 5, 6, 7))
    with stack.view(training=False):
        assert torch.equal(net(x), whole)
    assert [type(m) for m in net.net.modules()] == [type(m) for m in Images(mixed=True).net.modules()]


def test_a_part_of_a_block_that_does_not_run_is_told_by_its_path() -> None:
    net = Images(mixed=True)
    stack = BlockStack(find_stack(net, None, who="Test", in_runs=True), net)
    stack.active = 2
    stack.freeze_inactive()
    with (
        stack.view(training=True),
        pytest.raises(ValueError, match=r"net\.4\.conv was called .* first 2 blocks of 'net\[1:5\]'"),
    ):
        net.net[4].conv(torch.randn(1, 8, 8, 8))  # pyright: ignore[reportCallIssue]


# -- trained

TECHNIQUES: dict[str, Callable[[], pl.Callback]] = {
    "stacking": lambda: le.ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)]),
    "depth": lambda: le.CompoundGrowth(depth=[(0.0, 0.5), (0.5, 1.0)], width=None),
    "automatic": lambda: le.AutoProg(depth=0.25, resolution=1.0, search=0.5, alpha=1.0, half_life=0.1),
    "groups": lambda: le.ShallowToDeep(group=2),
    "identity": lambda: le.DropIn(first=2),
    "layer dropping": le.ProgressiveLayerDropping,
    "stochastic depth": le.StochasticDepth,
    "freezing": lambda: le.LayerFreezing(start=0.1),
    "greedy": lambda: le.GreedyLayerwise(until=0.7),
    "proxy": lambda: le.ProxySelection(layers=None),
    "mixup": lambda: le.ManifoldMixup(),
    "recomputed": le.Rematerialization,
    "offloaded": lambda: le.ActivationOffload(min_bytes=64),
    "compressed": le.ActivationCompression,
}


def trained(callback: pl.Callback | None, *, mixed: bool, **settings: Any) -> Tensor:
    net = Images(mixed=mixed)
    pl.seed_everything(1, verbose=False)
    path = settings.pop("ckpt_path", None)
    callbacks = [callback] if callback is not None else []
    trainer(*callbacks, *settings.pop("callbacks", []), **{"max_steps": 10, **settings}).fit(
        net, loader("vit", samples=12), ckpt_path=path
    )
    return flat(net)


@pytest.mark.parametrize("what", TECHNIQUES)
@pytest.mark.filterwarnings("ignore:The fit ended before all blocks ran")
def test_a_network_in_one_sequential_trains_as_with_its_blocks_in_one_of_their_own(what: str) -> None:
    """Bit for bit, and otherwise than plainly, except where the technique is exact."""
    mixed, apart = (trained(TECHNIQUES[what](), mixed=mixed) for mixed in (True, False))
    assert torch.equal(mixed, apart)
    assert torch.equal(mixed, trained(None, mixed=True)) == (what in ("recomputed", "offloaded"))


@pytest.mark.parametrize("what", ["stacking", "stochastic depth", "freezing"])
@pytest.mark.filterwarnings("ignore:.*(before all blocks run|ended before)")
def test_a_run_is_resumed_exactly_and_its_checkpoints_are_of_the_plain_module(what: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    whole = trained(TECHNIQUES[what](), mixed=True, callbacks=[saver], enable_checkpointing=True)
    path = tmp_path / "step=4.ckpt"
    Images(mixed=True).load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    assert torch.equal(trained(TECHNIQUES[what](), mixed=True, ckpt_path=path), whole)


def test_blocks_of_several_widths_are_dropped_and_frozen_as_stages() -> None:
    for technique in (le.StochasticDepth(), le.LayerFreezing(start=0.1)):
        net = of_widths()
        trainer(technique, max_steps=10).fit(net, loader("vit", samples=12))
        assert "6 blocks of 'net[1:4]', 'net[4:5]', 'net[5:7]'" in technique._where


class Paths(pl.Callback):
    """Which stacks the techniques of a run have asked for."""

    def __init__(self, of: Technique) -> None:
        self.of, self.paths = of, list[str]()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.paths = [path for path, _, _ in self.of.session.signature()]


def test_techniques_stand_together_on_one_run() -> None:
    def together() -> tuple[list[str], Tensor]:
        stacking = le.ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)])
        more = [le.StochasticDepth(layers="net[1:5]"), le.LayerFreezing(layers="net", start=0.1)]
        paths = Paths(stacking)
        weights = trained(stacking, mixed=True, callbacks=[*more, paths])
        return paths.paths, weights

    (paths, first), (_, second) = together(), together()
    assert torch.equal(first, second)
    assert not torch.equal(first, trained(TECHNIQUES["stacking"](), mixed=True))
    assert paths == ["net[1:5]"]


def test_a_search_counts_the_blocks_that_techniques_will_find() -> None:
    from lightning_eff.tune.inspection.profiling import Look

    m, eye = Images(mixed=True), Look()
    trainer(eye, max_steps=1).fit(m, loader("vit", samples=12))
    (run,) = (run for run in runs(m) if run.length > 1)
    assert eye.fields["num_blocks"] == run.length > 1 and str(run) in eye.why["num_blocks"]
