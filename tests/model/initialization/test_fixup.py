"""Fixup: multiples of weights against its formula, blocks against their skips, scalars against the paper's own block."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from lightning_eff import Fixup
from lightning_eff.model.initialization._scales.fixed import Fixed
from lightning_eff.model.initialization.fixup import fixup_factor
from tests.cases import Case, classifier
from tests.model.initialization.test_re_zero import EVERY, Plain, loss_of, skips
from tests.model.initialization.test_zero_projections import NETWORKS, Images, images, resnet
from tests.models import TinyGPT, hugging_face, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "Fixup": Case(
        active=lambda: Fixup(),
        neutral=lambda: Fixup(branches=[]),
        architecture=True,
        lost=(classifier, "classifier", "found no residual branch"),
    )
}
SCALARS = ("branch_scale", "bias_before", "bias_behind")


def scalars(m: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in m.named_parameters() if name.endswith(SCALARS)}


def trained(m: Any) -> Any:
    """With scalars that are not those of the beginning, and last weights that are not zero."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if name.endswith(SCALARS) or not p.any():
                p.copy_(0.3 * torch.randn(p.shape, generator=g) + 0.2)
    return m


@pytest.mark.parametrize(("branches", "maps", "factor"), [(16, 2, 0.25), (16, 3, 0.5), (1, 2, 1.0), (9, 1, 1.0)])
def test_the_factor_is_the_papers(branches: int, maps: int, factor: float) -> None:
    assert fixup_factor(branches, maps) == pytest.approx(factor)


@pytest.mark.parametrize("name", EVERY)
def test_blocks_begin_as_their_skips_and_the_loss_as_log_c(name: str) -> None:
    build, batch = EVERY[name]
    m, seen = eff.apply(build(), Fixup()), list[Any]()
    first: Any = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    for block, skip in skips(name, m):
        block.register_forward_hook(lambda b, args, y, skip=skip: seen.append((skip(args[0]), first(y))))
    loss = loss_of(m, batch())
    assert len(seen) > 1
    for skip, output in seen:
        assert skip.abs().sum() > 0
        torch.testing.assert_close(output, skip, rtol=0, atol=0)
    if name in NETWORKS:  # the others' heads are an embedding's too, or not looked at
        assert loss.item() == pytest.approx(math.log(NETWORKS[name][3]), rel=1e-6)


def test_other_maps_begin_at_their_share(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = TinyGPT(4)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    m = eff.apply(plain, Fixup())
    inner, last = (
        ("qkv.weight", "mlp.0.weight"),
        ("proj.weight", "proj.bias", "mlp.2.weight", "mlp.2.bias", "head.weight"),
    )
    for name, p in m.named_parameters():
        if name in before:
            factor = 8**-0.5 if name.endswith(inner) else 0.0 if name.endswith(last) else 1.0
            torch.testing.assert_close(p, before[name] * factor, rtol=0, atol=0)
    assert len(scalars(m)) == 4 * (4 * 2 + 2)


class PapersBlock(nn.Module):
    """The basic block of the paper's own code, in which each scalar is a parameter that is added or multiplied."""

    def __init__(self, block: Any, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.block, self.values = block, values

    def forward(self, x: Tensor) -> Tensor:
        v, one, two = self.values, self.block.one, self.block.two
        out = F.conv2d(x + v["one.bias_before"], one._parameters["weight"], one._parameters["bias"], one.stride, 1)
        out = F.relu(out + v["one.bias_behind"])
        out = F.conv2d(out + v["two.bias_before"], two._parameters["weight"], two._parameters["bias"], 1, 1)
        out = out * v["two.branch_scale"] + v["two.bias_behind"]
        return F.relu(out + self.block.skip(x))


def test_scalars_are_where_the_papers_block_has_them() -> None:
    torch.manual_seed(0)
    m = trained(eff.apply(resnet(lambda _: nn.Identity()), Fixup()))
    x = torch.randn(2, 4, 8, 8)
    for block in m.network[1:3]:
        values = {name: p for name, p in block.named_parameters() if name.endswith(SCALARS)}
        assert sorted(values) == [
            *("one.bias_before", "one.bias_behind", "two.bias_before", "two.bias_behind", "two.branch_scale")
        ]
        torch.testing.assert_close(block(x), PapersBlock(block, values)(x), rtol=1e-4, atol=1e-5)


FOLDS = ("hand-written", "post-norm", "gpt2", "experts", "vit")


@pytest.mark.parametrize("name", EVERY)
def test_folded_export_computes_the_same(name: str) -> None:
    build, batch = EVERY[name]
    plain = build()
    for biases in {False, name in FOLDS}:
        m = trained(eff.apply(copy.deepcopy(plain), Fixup(biases=biases)))
        whole = loss_of(m, batch())
        folded = eff.export(m)
        assert [*folded.state_dict()] == [*plain.state_dict()]
        assert not any(isinstance(part, Fixed) for part in folded.modules())
        torch.testing.assert_close(loss_of(folded, batch()), whole, rtol=0, atol=1e-5)
        assert abs(loss_of(plain, batch()) - whole) > 1e-5


@pytest.mark.parametrize(
    ("name", "why"), [("llama", "the plain layer has none"), ("no norms", "not added to the padding")]
)
def test_what_does_not_fold_is_said(name: str, why: str) -> None:
    m = eff.apply(EVERY[name][0](), Fixup())
    eff.export(m)  # nothing learnt yet
    with pytest.raises(ValueError, match=rf"cannot be made plain.*{why}.*Fixup\(biases=False\)"):
        eff.export(trained(m))


def test_a_convolution_that_does_not_pad_with_zeros_folds() -> None:
    class Circular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
            self.two = nn.Conv2d(4, 4, 1, groups=2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(F.relu(self.one(x)))

    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    m = trained(eff.apply(Images(nn.Sequential(nn.Conv2d(3, 4, 1), Circular(), Circular(), *head)), Fixup()))
    torch.testing.assert_close(loss_of(eff.export(m), images()), loss_of(m, images()), rtol=0, atol=1e-5)


def test_branches_and_the_head_by_hand() -> None:
    net = nn.Sequential(nn.Linear(4, 16), Plain(), Plain(), nn.Linear(16, 2))
    found = eff.apply(copy.deepcopy(net), Fixup())
    given = eff.apply(net, Fixup(branches=[[f"{i}.up", f"{i}.down.weight"] for i in (1, 2)], head="3"))
    assert [*found.state_dict()] == [*given.state_dict()]
    for name, p in given.named_parameters():
        torch.testing.assert_close(p, found.get_parameter(name), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no weight, or module with a weight, that matches"):
        eff.apply(nn.Sequential(nn.Linear(4, 16), Plain(), Plain()), Fixup(head="7"))


class Own(nn.Module):
    """It has the last weight itself, beside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.up = nn.Sequential(nn.Linear(4, 16), Plain()), nn.Linear(16, 16)
        self.down = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x + torch.tanh(self.up(x)) @ self.down


class InStep(pl.LightningModule):
    """A residual network whose classifier is called in ``training_step`` alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[_Added() for _ in range(3)])
        self.neck, self.top = nn.Linear(8, 8), nn.Linear(8, 10)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.top(self.neck(self.body(x))), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


class _Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(x)))


def test_the_first_batch_shows_a_classifier_that_only_the_step_calls() -> None:
    g = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(8, 8, generator=g), torch.randint(0, 10, (8,), generator=g)), 4)
    net = InStep()
    trainer(Fixup(), max_steps=1).fit(net, loader)
    assert net.losses == pytest.approx([math.log(10)])

    class Features(InStep):
        def forward(self, x: Tensor) -> Tensor:
            return self.neck(self.body(x))

    with pytest.raises(ValueError, match=r"neck.weight was set to zero .* from top.weight.*Fixup\(head='top.weight'\)"):
        trainer(Fixup(), max_steps=1).fit(Features(), loader)
    named = Features()
    trainer(Fixup(head="top"), max_steps=1).fit(named, loader)
    assert named.losses == pytest.approx([math.log(10)])


def test_what_fails_leaves_all_as_it_was() -> None:
    m = Own()
    before = {name: (p, p.detach().clone()) for name, p in m.named_parameters()}
    with pytest.raises(ValueError, match="the module itself is a layer of a residual branch"):
        eff.apply(m, Fixup())
    assert not any(isinstance(part, Fixed) for part in m.modules())
    for name, p in m.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1])


def test_on_the_meta_device_copies_and_pickles() -> None:
    with torch.device("meta"):
        m: Any = eff.apply(TinyGPT(2), Fixup())
    m.to_empty(device="cpu")
    for part in m.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert not m.blocks[0].proj.weight.any() and not m.head.weight.any()
    assert 0.45 / 4 < m.blocks[0].qkv.weight.abs().max() <= 0.5 / 4  # nn.Linear's bound, times 4^(-1/2)
    assert all((p == (1.0 if name.endswith("scale") else 0.0)).all() for name, p in scalars(m).items())
    m = trained(eff.apply(TinyGPT(2), Fixup()))
    ids = make_batch("tiny_gpt")
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        torch.testing.assert_close(loss_of(other, ids), loss_of(m, ids), rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrong", [{"biases": 1}, {"force": None}, {"head": ""}, {"head": 3}, {"branches": "x"}, {"branches": ["x"]}]
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Fixup(**wrong)
    loaded = hugging_face("gpt2", 2)
    loaded.model.config._name_or_path = "some/checkpoint"
    with pytest.raises(ValueError, match=r"loaded from 'some/checkpoint'.*force=True"):
        eff.apply(loaded, Fixup())


def test_a_yaml_of_the_command_line_trains_with_it(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "Fixup", {"biases": False}, model="TinyGPT", data="Sequences", keeps_state=False, max_steps=2)
