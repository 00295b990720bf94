"""JointSpar: the mean over all draws is the whole gradient; what is not drawn is neither computed nor sent."""

from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_eff._core.session import Session
from lightning_eff.strategies.joint_spar import JointSpar, drawn, losses, next_probabilities, projected
from tests.cases import Case
from tests.conftest import Once
from tests.families import module as family
from tests.models import TinyClassifier, TinyGPT, hugging_face, make_batch, trainer
from tests.runs import fit_yaml
from tests.strategies.communication_launch import launch

CASES = {
    "JointSpar": Case(
        active=lambda: JointSpar(share=0.5, rate=0.1),
        neutral=lambda: JointSpar(share=1.0),
        anywhere=True,
    )
}

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    return once("joint_spar", lambda: launch("all_drawn", "some_drawn", of="joint_spar_jobs"))


class Four(pl.LightningModule):
    """Four maps in a row, by plain SGD with a rate of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.maps(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


class Set(JointSpar):
    """Of these layers, at these probabilities."""

    def __init__(self, z: tuple[bool, ...], p: Tensor) -> None:
        super().__init__(share=0.5, rate=0.0)
        self.z, self.p = torch.tensor(z), p

    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        self._p = self.p

    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._z = self.z
        layers = zip(self._layers, self.z.tolist(), strict=True)
        self._sent.left = {id(p) for layer, z in layers if not z for p in layer.values()}


def step(net: pl.LightningModule, *techniques: Any, batch: Any = None, steps: int = 1) -> dict[str, Tensor]:
    """How steps move the weights."""
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    data: Any = [batch if batch is not None else make_batch("classifier", 8)] * steps
    trainer(*techniques, max_steps=steps).fit(net, DataLoader(data, batch_size=None))
    return {name: p.detach() - before[name] for name, p in net.named_parameters()}


def made() -> Four:
    torch.manual_seed(0)
    return Four()


# -- unbiased


def test_the_mean_over_all_draws_by_their_probabilities_is_the_whole_gradient() -> None:
    whole = step(made())
    p = torch.tensor([0.9, 0.3, 0.5, 0.2], dtype=torch.float64)
    mean = {name: torch.zeros_like(g, dtype=torch.float64) for name, g in whole.items()}
    total = 0.0
    for z in product((False, True), repeat=4):
        likely = float(torch.where(torch.tensor(z), p, 1 - p).prod())
        moves = step(made(), Set(z, p))
        for i, name in enumerate((0, 2, 4, 5)):
            own = {part: moves[f"maps.{name}.{part}"] for part in ("weight", "bias")}
            for part, g in own.items():
                expected = whole[f"maps.{name}.{part}"] / float(p[i]) if z[i] else torch.zeros_like(g)
                torch.testing.assert_close(g, expected, rtol=1e-4, atol=1e-6)
        mean = {name: m + likely * moves[name].double() for name, m in mean.items()}
        total += likely
    assert total == pytest.approx(1.0)
    for name, g in whole.items():
        torch.testing.assert_close(mean[name], g.double(), rtol=1e-4, atol=1e-6)


def test_layers_are_drawn_with_their_probabilities() -> None:
    p = torch.tensor([0.1, 0.5, 0.73, 1.0], dtype=torch.float64)
    n = 4000
    counts = sum(drawn(p, torch.Generator().manual_seed(i)).double() for i in range(n))
    assert isinstance(counts, Tensor)
    bound = 4.5 * (p * (1 - p) / n).sqrt()  # which one of four passes once in some 30,000 runs
    assert bool(((counts / n - p).abs() <= bound).all())


# -- probabilities


def test_the_projection_is_the_nearest_of_all_by_divergence() -> None:
    def divergence(q: Tensor, w: Tensor) -> float:
        return float((q * (q / w).log() - q + w).sum())

    for seed in range(30):
        g = torch.Generator().manual_seed(seed)
        w, floor = torch.rand(7, generator=g, dtype=torch.float64).add(1e-3), 0.05 + 0.2 * seed / 30
        total = 7 * (floor + (0.98 - floor) * float(torch.rand((), generator=g)))
        q = projected(w, total, floor)
        assert float(q.sum()) == pytest.approx(total, abs=1e-9) and float(q.min()) >= floor and float(q.max()) <= 1.0
        for _ in range(200):  # no exchange between two of them is nearer
            i, j = torch.randperm(7, generator=g)[:2].tolist()
            some = q.clone()
            some[i], some[j] = some[i] + 1e-4, some[j] - 1e-4
            if float(some.min()) >= floor and float(some.max()) <= 1.0:
                assert divergence(some, w) >= divergence(q, w) - 1e-12


def test_a_step_of_mirror_descent_by_hand() -> None:
    p, z = [0.4, 0.6, 0.5], [1.0, 0.0, 1.0]
    norms, largest, floor, rate = [2.0, 0.0, 0.5], 3.0, 0.2, 0.3
    estimated = [-((n / q) ** 2) / (largest / floor) ** 2 * i / q for n, q, i in zip(norms, p, z, strict=True)]
    n, drawn_ones, q = (torch.tensor(v, dtype=torch.float64) for v in (norms, z, p))
    own = losses(n, drawn_ones, q, largest, floor)
    assert own.tolist() == pytest.approx(estimated)
    w = [q * 2.718281828459045 ** (-rate * e) for q, e in zip(p, estimated, strict=True)]
    after = next_probabilities(torch.tensor(p, dtype=torch.float64), own, rate=rate, total=1.5, floor=floor)
    assert after.tolist() == pytest.approx([1.5 * q / sum(w) for q in w])  # none comes to a bound
    assert after[0] > 0.4 and after[1] < 0.6


def test_layers_of_large_gradients_come_to_be_drawn_more_often() -> None:
    torch.manual_seed(0)
    p, norms = torch.full((6,), 0.5, dtype=torch.float64), torch.tensor([4.0, 1, 1, 1, 1, 0.1], dtype=torch.float64)

    for i in range(1000):
        z = drawn(p, torch.Generator().manual_seed(i))
        p = next_probabilities(p, losses(norms * z, z.double(), p, 4.0, 0.25), rate=0.05, total=3.0, floor=0.25)
    # the variance is least where probabilities are as norms, within their bounds: 1, (3 - 1 - 0.25) / 4, 0.25
    assert p.tolist() == pytest.approx([1.0, 0.4375, 0.4375, 0.4375, 0.4375, 0.25], abs=0.03)


# -- the run


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("z", "products"),
    [
        ((True, True, True, True), 4 + 4 + 3),
        ((False, True, False, True), 4 + 2 + 2),  # no product back behind the second
        ((False, False, False, True), 4 + 1),
        ((True, False, False, False), 4 + 1 + 3),
        ((False, False, False, False), 4 + 4 + 3),  # all are made, and none counts
    ],
)
def test_what_is_not_drawn_is_not_computed(z: tuple[bool, ...], products: int) -> None:
    net = made()
    with Products() as seen:
        step(net, Set(z, torch.full((4,), 0.5, dtype=torch.float64)))
    assert seen.count == products
    assert all(p.requires_grad for p in net.parameters())


def test_all_layers_at_one_are_plain_training_bit_for_bit() -> None:
    plain = step(made(), steps=3)
    for name, g in step(made(), Set((True,) * 4, torch.ones(4, dtype=torch.float64)), steps=3).items():
        assert torch.equal(g, plain[name])


@pytest.mark.parametrize("name", ["gpt2", "vit", "resnet", "qwen3_moe", "bert"])
def test_unchanged_modules(name: str) -> None:
    net: Any = family(name) if name in ("resnet", "qwen3_moe") else hugging_face(name, 2)
    technique = JointSpar(share=0.5, rate=0.1)
    moves = step(net, technique, batch=make_batch("vit" if name in ("vit", "resnet") else "gpt2"), steps=4)
    report = technique.report()
    assert 0 < report["sent"] < 1 and report["least"] < 0.5 < report["most"]
    assert all(p.requires_grad and bool(p.isfinite().all()) for p in net.parameters())
    assert sum(bool(move.any()) for move in moves.values()) > len(moves) / 2


def test_reentrant_checkpoints_are_refused() -> None:
    net = hugging_face("gpt2", 2)
    net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match=r"JointSpar: HuggingFace is checkpointed with use_reentrant=True"):
        step(net, JointSpar(), batch=make_batch("gpt2"))


class Passed(Four):
    """The first map is passed over, as blocks are that are dropped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = nn.functional.pad(batch[0], (0, -2))
        return {"loss": nn.functional.cross_entropy(self.maps[1:](x), batch[1])}


def test_a_step_in_which_no_layer_that_was_drawn_has_a_part_changes_nothing() -> None:
    net = Passed()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    t = trainer(Set((True, False, False, False), torch.full((4,), 0.5)), max_steps=2)
    data: Any = [make_batch("classifier", 8)] * 2
    t.fit(net, DataLoader(data, batch_size=None))
    assert t.global_step == 2
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())


def test_an_exception_leaves_no_layer_frozen() -> None:
    class Fails(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert not all(p.requires_grad for p in self.parameters())
            raise RuntimeError("no")

    net = Fails(2)
    with pytest.raises(RuntimeError, match="no"):
        step(net, JointSpar(share=0.3), batch=make_batch("tiny_gpt"))
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0.0}, r"JointSpar\(share=0.0\): expected a number in \(0, 1\]: the average fraction of layers"),
        ({"floor": 0.8}, r"floor=0.8, share=0.7\): the minimum probability is above"),
        ({"rate": -1.0}, r"rate=-1.0\): expected a finite number >= 0: the step size"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JointSpar(**arguments)


def test_nothing_that_trains_is_refused() -> None:
    net = TinyClassifier()
    net.requires_grad_(False)
    with pytest.raises(ValueError, match=r"JointSpar: no parameter of TinyClassifier requires a gradient"):
        step(net, JointSpar())


# -- two processes


def test_all_layers_at_one_are_plain_ddp_bit_for_bit(two: dict[str, Any]) -> None:
    assert two["all_drawn"] == {"same": True, "bytes": [1.0] * 4}


def test_only_what_is_drawn_is_sent_and_ranks_stay_alike(two: dict[str, Any]) -> None:
    found = two["some_drawn"]
    assert found["alike"] == [True] * 8
    assert found["bytes"] == pytest.approx(found["drawn"]) and 0.0 < min(found["bytes"]) < max(found["bytes"]) < 1.0
    assert found["error"] < 1e-6, "the mean over ranks of what each would compute"


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "JointSpar", {"share": 0.5}, max_steps=3)
