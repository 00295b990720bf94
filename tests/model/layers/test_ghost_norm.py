"""Ghost batches: each has mean 0 and variance 1, one of the whole batch is BatchNorm bit for bit, and statistics are right."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from lightning_eff import GhostNorm
from lightning_eff.model.layers._ghosts.groups import ghost_batch_norm, group_sizes
from tests import families
from tests.cases import Case
from tests.models import TinyClassifier, TinyGPT, flat, loader, module, trainer
from tests.runs import fit, fit_yaml

_NONE: dict[str, str] = dict.fromkeys(("tiny_gpt", "gpt2", "llama", "bert", "vit"), "has no BatchNorm to act on")
CASES = {
    "GhostNorm": Case(
        active=lambda: GhostNorm(8),
        on_classifier=lambda: GhostNorm(2),
        neutral=lambda: GhostNorm(names=[]),
        model="normed",
        refuses=_NONE,
        lost=(TinyGPT, "tiny_gpt", r"TinyGPT has no BatchNorm to act on, but 9 LayerNorm"),
    )
}


def test_groups_are_of_the_size_and_the_last_of_what_is_left() -> None:
    assert group_sizes(12, 4) == [4, 4, 4] and group_sizes(10, 4) == [4, 4, 2] and group_sizes(3, 4) == [3]
    assert group_sizes(9, 4) == [4, 4, 1] and group_sizes(9, 4, least=2) == [4, 5] and group_sizes(1, 4, least=2) == [1]


@pytest.mark.parametrize("shape", [(11, 6), (11, 6, 5), (11, 6, 3, 4)])
def test_each_group_has_mean_0_and_variance_1(shape: tuple[int, ...]) -> None:
    """Against numpy's, in float64; gain and bias after it; gradients by finite differences."""
    x = 3 * torch.randn(shape, dtype=torch.float64) + torch.arange(11.0).view(-1, *[1] * (len(shape) - 1))
    x.requires_grad_()
    dims = (0, *range(2, len(shape)))
    y = ghost_batch_norm(x, None, None, None, None, sizes=[4, 4, 3], momentum=0.1, eps=1e-15)
    start = 0
    for size in (4, 4, 3):
        part = y[start : start + size].detach().numpy()
        assert abs(part.mean(dims)).max() < 1e-12 and abs(part.var(dims) - 1).max() < 1e-12
        start += size
    w, b = torch.rand(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    across = (1, -1, *[1] * (len(shape) - 2))
    scaled = ghost_batch_norm(x, None, None, w, b, sizes=[4, 4, 3], momentum=0.1, eps=1e-15)
    torch.testing.assert_close(scaled, y * w.view(across) + b.view(across))
    if len(shape) == 2:
        assert torch.autograd.gradcheck(
            lambda t: ghost_batch_norm(t, None, None, w, b, sizes=[4, 4, 3], momentum=0.1, eps=1e-3), (x,)
        )


def test_running_statistics_move_as_far_as_by_one_batch() -> None:
    """The mean is BatchNorm's own; the variance is that within groups, each with n - 1, weighted by its samples."""
    x = torch.randn(10, 3, 4, dtype=torch.float64) * 2 + torch.arange(10.0).view(-1, 1, 1)
    plain = nn.BatchNorm1d(3, momentum=0.3).double()
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for _ in range(2):
        plain(x)
        ghost_batch_norm(x, mean, var, None, None, sizes=[4, 4, 2], momentum=0.3, eps=1e-5)
    torch.testing.assert_close(mean, plain.running_mean)
    within = sum(
        n * part.transpose(0, 1).flatten(1).var(1) for n, part in zip((4, 4, 2), x.split((4, 4, 2)), strict=True)
    )
    torch.testing.assert_close(var, 0.49 * torch.ones(3, dtype=torch.float64) + 0.51 * within / 10)


def loaded(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]


class Nets(nn.Module):
    """A convolutional network with two norms."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=momentum)
        self.last = nn.BatchNorm1d(4, momentum=momentum, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


def run(size: int, batch: int, momentum: float | None = 0.1, **settings: Any) -> tuple[Any, GhostNorm]:
    """Two training steps and a validation of a small network, its gradients summed into a step."""
    torch.manual_seed(0)
    net: Any = TinyClassifier()
    net.blocks, net.norm, net.head = Nets(momentum), nn.Identity(), nn.Linear(4, 3)
    data = [(torch.randn(batch, 1, 8, 8), torch.randint(0, 3, (batch,))) for _ in range(2)]
    technique = GhostNorm(size, **settings)
    trainer(technique, max_steps=2, limit_val_batches=1).fit(net, loaded(data), loaded(data[:1]))
    return net, technique


def test_one_group_is_plain_training_to_the_bit_and_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"size=12\): each BatchNorm saw the batch as one group.*plain training"):
        net, technique = run(12, 12)
    plain, _ = run(12, 12, names=[])
    assert torch.equal(flat(net), flat(plain)) and technique.report() == {"norms": 2, "groups": 1}
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_run_is_that_of_norms_called_group_by_group(momentum: float | None) -> None:
    """By plain BatchNorms, of which each group has its own call, and running statistics by hand; 9 samples are 4 and 5."""
    net, technique = run(4, 9, momentum)
    assert technique.report() == {"norms": 2, "groups": 3}, "of 2-D images, a sample alone has a variance"
    expected, _ = run(4, 9, momentum, names=[])
    assert not torch.equal(flat(net), flat(expected))
    torch.manual_seed(0)
    hand: Any = TinyClassifier()
    hand.blocks, hand.norm, hand.head = Nets(momentum), nn.Identity(), nn.Linear(4, 3)
    data = [(torch.randn(9, 1, 8, 8), torch.randint(0, 3, (9,))) for _ in range(2)]
    optimizer = torch.optim.SGD(hand.parameters(), hand.lr, hand.momentum)
    means = []
    for x, label in data:
        b = hand.blocks
        y = b.conv(x)
        means.append(y.detach().mean((0, 2, 3)))
        y = torch.cat([nn.functional.batch_norm(p, None, None, b.norm.weight, b.norm.bias, True) for p in y.split(4)])
        y = y.relu().mean((2, 3))
        y = torch.cat([nn.functional.batch_norm(p, None, None, training=True) for p in y.split((4, 5))])
        optimizer.zero_grad()
        nn.functional.cross_entropy(hand.head(y), label).backward()
        optimizer.step()
    torch.testing.assert_close(flat(net), flat(hand))
    wanted = (means[0] + means[1]) / 2 if momentum is None else 0.09 * means[0] + 0.1 * means[1]
    torch.testing.assert_close(net.blocks.norm.running_mean, wanted)
    assert int(net.blocks.norm.num_batches_tracked) == 2


def test_evaluation_and_the_module_afterwards_are_plain() -> None:
    net = families.module("resnet")
    before = {path: type(m) for path, m in net.named_modules()}
    t = trainer(GhostNorm(2), max_steps=2, limit_val_batches=1)
    data = [families.batch("resnet", 8)] * 2
    t.fit(net, loaded(data), loaded(data))
    assert {path: type(m) for path, m in net.named_modules()} == before
    twin = copy.deepcopy(net).eval()
    net.eval()
    assert torch.equal(net.model(**data[0]).loss, twin.model(**data[0]).loss)


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_what_cannot_be_says_why() -> None:
    for wrong in (1, 0, 2.0, True):
        with pytest.raises(ValueError, match=r"size=.*expected an integer >= 2"):
            GhostNorm(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"none of the 1 BatchNorms of TinyClassifier; .*Nearest: norm"):
        trainer(GhostNorm(2, names=["nrm"]), max_steps=1).fit(TinyClassifier(), loader("classifier"))
    net: Any = TinyClassifier()
    net.norm = Own(8)
    with pytest.raises(ValueError, match=r"no BatchNorm of TinyClassifier can be changed\. norm: it is a subclass"):
        trainer(GhostNorm(2), max_steps=1).fit(net, loader("classifier"))
    with pytest.raises(
        ValueError, match=r"norm \(Own\) cannot be changed: it is a subclass of BatchNorm with its own forward"
    ):
        trainer(GhostNorm(2, names=["norm"]), max_steps=1).fit(net, loader("classifier"))
    net.norm = nn.SyncBatchNorm(8)
    with pytest.raises(ValueError, match="norm: it takes statistics over the samples of all processes"):
        trainer(GhostNorm(2), max_steps=1).fit(net, loader("classifier"))
    t = trainer(GhostNorm(2), max_steps=1, strategy="ddp", sync_batchnorm=True)
    with pytest.raises(ValueError, match=r"Trainer\(sync_batchnorm=True\) takes statistics over all"):
        eff.GhostNorm(2).check(type("S", (), {"trainer": t})())  # pyright: ignore[reportArgumentType]


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "GhostNorm", {"size": 2}, keeps_state=False, max_steps=3)


def test_groups_change_what_is_learnt() -> None:
    nets = [fit("normed", lambda t=t: [t], max_steps=3)[0] for t in (GhostNorm(8), GhostNorm(names=[]))]
    assert not torch.equal(*map(flat, nets)) and module("normed").load_state_dict(nets[0].state_dict())
