"""SeqNorm: groups of channels, and then ghost batches; without the first it is GhostNorm."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_eff as eff
from lightning_eff import GhostNorm, SeqNorm
from lightning_eff.model.layers.seq_norm import SequentialNorm
from tests import families
from tests.cases import Case
from tests.models import TinyClassifier, TinyGPT, flat, loader, module, trainer
from tests.runs import fit, fit_yaml

_NONE: dict[str, str] = dict.fromkeys(("tiny_gpt", "gpt2", "llama", "bert", "vit"), "has no BatchNorm to act on")
CASES = {
    "SeqNorm": Case(
        active=lambda: SeqNorm(8),
        on_classifier=lambda: SeqNorm(2),
        neutral=lambda: SeqNorm(names=[]),
        model="normed",
        architecture=True,
        stays="SeqNorm replaced BatchNorm1d at .*: samples are first normalised over groups of channels",
        refuses=_NONE,
        lost=(TinyGPT, "tiny_gpt", r"TinyGPT has no BatchNorm to act on, but 9 LayerNorm"),
    )
}


def swapped(norm: nn.Module, **settings: Any) -> Any:
    return eff.apply(nn.Sequential(copy.deepcopy(norm)), SeqNorm(**settings))[0]


@pytest.mark.parametrize("shape", [(9, 8), (9, 8, 5), (9, 8, 3, 2)])
def test_it_is_its_equations(shape: tuple[int, ...]) -> None:
    """Samples over channel groups, then channels over ghost batches, by hand in float64; in evaluation by running ones."""
    kind: Any = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    plain = kind(8, eps=1e-4).double()
    nn.init.normal_(plain.weight)
    nn.init.normal_(plain.bias)
    norm = swapped(plain, size=3, channel_groups=2)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    z = x.reshape(9, 2, -1)
    z = ((z - z.mean(2, keepdim=True)) / (z.var(2, keepdim=True, correction=0) + 1e-4).sqrt()).reshape(shape)
    dims, across = (0, *range(2, len(shape))), (1, -1, *[1] * (len(shape) - 2))
    parts = [
        (p - p.mean(dims, keepdim=True)) / (p.var(dims, keepdim=True, correction=0) + 1e-4).sqrt() for p in z.split(3)
    ]
    torch.testing.assert_close(norm(x), torch.cat(parts) * plain.weight.view(across) + plain.bias.view(across))
    torch.testing.assert_close(norm.running_mean, 0.1 * z.mean(dims))
    expected = plain.eval()
    expected.running_mean, expected.running_var = norm.running_mean, norm.running_var
    torch.testing.assert_close(norm.eval()(x), expected(z))


def test_without_groups_of_channels_it_is_ghost_norm_to_the_bit() -> None:
    by_groups, _ = fit("normed", lambda: [SeqNorm(3, channel_groups=None)], max_steps=4)
    ghost, _ = fit("normed", lambda: [GhostNorm(3)], max_steps=4)
    assert torch.equal(flat(by_groups), flat(ghost))
    statistics = {key: value for key, value in by_groups.state_dict().items() if not key.endswith("_mark")}
    assert all(torch.equal(value, ghost.state_dict()[key]) for key, value in statistics.items())
    other, _ = fit("normed", lambda: [SeqNorm(3, channel_groups=4)], max_steps=4)
    assert not torch.equal(flat(other), flat(ghost))


def test_a_residual_network_of_images() -> None:
    net = eff.apply(families.module("resnet"), SeqNorm(4, channel_groups=4))
    norms = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == 13 and all(type(m) is SequentialNorm for m in norms)
    plain = families.module("resnet").state_dict()
    assert {key for key in net.state_dict() if "mark" not in key} == plain.keys()
    with pytest.raises(RuntimeError, match="lightning_eff_mark"):
        families.module("resnet").load_state_dict(net.state_dict())
    with pytest.raises(ValueError, match=r"of the checkpoint is not a norm that starts with 8 groups of channels"):
        eff.apply(families.module("resnet"), SeqNorm(channel_groups=8)).load_state_dict(net.state_dict())


def test_what_cannot_be_says_why() -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match=r"channel_groups=.*expected an integer >= 1, or None"):
            SeqNorm(channel_groups=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"SeqNorm\(size=1\): expected an integer >= 2"):
        SeqNorm(1)
    with pytest.raises(
        ValueError,
        match=r"no BatchNorm .* can be changed\. norm: its 8 channels cannot be divided into channel_groups=3",
    ):
        eff.apply(TinyClassifier(), SeqNorm(channel_groups=3))
    with pytest.raises(ValueError, match=r"norm \(BatchNorm1d\) cannot be changed: its 8 channels"):
        eff.apply(TinyClassifier(), SeqNorm(channel_groups=3, names=["norm"]))
    made = eff.apply(nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(8)), SeqNorm(channel_groups=4))
    assert type(made[0]) is nn.BatchNorm1d and type(made[1]) is SequentialNorm
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        made[1](torch.randn(2, 8, 3, 3))
    with pytest.raises(ValueError, match=r"Trainer\(sync_batchnorm=True\) takes statistics over all"):
        t = trainer(SeqNorm(2), max_steps=1, strategy="ddp", sync_batchnorm=True)
        t.fit(module("classifier"), loader("classifier"))


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "SeqNorm", {"size": 2, "channel_groups": 2}, keeps_state=False, max_steps=3)
