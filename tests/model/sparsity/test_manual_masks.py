"""Masks of a GAN that steps its optimizers itself, against the same training in plain PyTorch."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_eff import (
    SET,
    SNIP,
    BlockSparsity,
    DiffAugment,
    EarlyBird,
    GraSP,
    LotteryTickets,
    RigL,
    SemiStructuredSparsity,
    TrainLargeThenCompress,
)
from lightning_eff.model.sparsity._random_mask import RandomMask
from lightning_eff.model.sparsity.rig_l import cosine_fraction
from tests.model.sparsity.gan import GAN, Masks, Plain, Zeros, batches, gan_loader, run
from tests.models import trainer
from tests.runs import SaveBatches, differences, final_state

KINDS: dict[str, dict[str, Any]] = {
    "one graph for both steps": {"shared": True},
    "toggled, several steps": {"shared": False, "critic": 2, "clip": 0.1},
    "seldom generated": {"shared": False, "every": 3},
    "closures": {"shared": False, "by": "closure", "clip": 0.1},
    "torch's optimizers": {"shared": False, "by": "torch", "clip": 0.1},
    "torch's clipping": {"clip": -0.1},
}
TECHNIQUES: dict[str, Any] = {
    "RandomMask": lambda: RandomMask(sparsity=0.5),
    "SNIP": lambda: SNIP(0.5),
    "GraSP": lambda: GraSP(0.5, temperature=1.0),
    "RigL": lambda: RigL(0.5, interval=2, until=1.0),
    "SET": lambda: SET(0.5, interval=3),
    "BlockSparsity": lambda: BlockSparsity(0.5, size=2, start=0.3, names=["generator.*", "discriminator.0"]),
    "LotteryTickets": lambda: LotteryTickets(2, share=0.5),
    "TrainLargeThenCompress": lambda: TrainLargeThenCompress(0.5, bits=None, patience=None, latest=0.3, retrain=0.7),
    "EarlyBird": lambda: EarlyBird(0.5, window=2, distance=1.0, interval=2),
}
NETWORKS = ("generator", "discriminator")


def same(net: GAN, other: GAN) -> None:
    for (name, a), b in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {float((a - b).abs().max())}"


def of_network(tensors: dict[str, Tensor], network: str) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if name.startswith(network)}


def largest_half(scores: dict[str, Tensor]) -> Masks:
    """Masks of the larger half of all scores."""
    every = torch.cat([s.flatten() for s in scores.values()])
    least = every.sort(descending=True).values[round(every.numel() / 2) - 1]
    return {name: s >= least for name, s in scores.items()}


class Begun(pl.Callback):
    """Masks and the module's state as each batch begins, after the technique."""

    def __init__(self, technique: Any) -> None:
        self.technique, self.masks, self.states = technique, list[Masks](), list[dict[str, Tensor]]()

    def on_train_batch_start(self, trainer: Any, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.masks.append(dict(self.technique.masks))
        self.states.append({name: t.clone() for name, t in pl_module.state_dict().items()})


# -- training with masks


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_mask_trains_as_in_plain_pytorch(kind: str) -> None:
    net, technique = GAN(**KINDS[kind]), RandomMask(sparsity=0.5)
    zeros = Zeros(technique)
    trainer(technique, zeros, max_epochs=1).fit(net, gan_loader(6))
    other = Plain(GAN(**KINDS[kind]))
    other.put(technique.masks)
    other.train(batches(6))
    same(net, other.net)
    assert zeros.leaks == []
    assert any(name.startswith("discriminator.0.parametrizations") for name in technique.masks), "also when normalized"


@pytest.mark.parametrize(
    ("name", "kind"),  # Lightning does not count the steps of torch's optimizers, by which EarlyBird draws masks
    [(n, k) for n in TECHNIQUES for k in KINDS if (n, k) != ("EarlyBird", "torch's optimizers")],
)
def test_masked_weights_and_momenta_are_zero_after_each_optimizers_step(name: str, kind: str) -> None:
    net, technique = GAN(**KINDS[kind]), TECHNIQUES[name]()
    zeros = Zeros(technique)
    fit = trainer(technique, zeros, max_epochs=1)
    fit.fit(net, gan_loader(9))
    assert zeros.steps > 0 and (net.by == "torch" or fit.global_step == zeros.steps)
    assert zeros.leaks == []
    networks = {name.partition(".")[0] for name, mask in technique.masks.items() if not bool(mask.all())}
    assert networks == ({"generator"} if name == "EarlyBird" else {*NETWORKS})


def test_the_generator_can_be_masked_alone() -> None:
    net, technique = GAN(), RandomMask(sparsity=0.5, names=["generator.*"])
    trainer(technique, max_epochs=1).fit(net, gan_loader(4))
    assert all(name.startswith("generator") for name in technique.masks)
    other = Plain(GAN())
    other.put(technique.masks)
    other.train(batches(4))
    same(net, other.net)


class TwoOfFour(Plain):
    """Straight-through training of dense weights, of which the module holds the two largest of every four inputs."""

    def __init__(self, net: GAN, names: list[str], decay: float) -> None:
        super().__init__(net)
        self.names, self.decay, self.dense = names, decay, dict[str, Tensor]()
        self.mask(names)

    @torch.no_grad()
    def mask(self, names: list[str]) -> None:
        for name in names:
            p = self.net.get_parameter(name)
            self.dense[name] = p.clone()
            inputs = 0 if p.ndim == 4 else 1  # a transposed convolution is (in, out, ...)
            rows = p.abs().movedim(inputs, -1).unflatten(-1, (-1, 4))
            kept = torch.zeros_like(rows).scatter_(-1, rows.topk(2, dim=-1).indices, 1.0)
            self.masks[name] = kept.flatten(-2).movedim(-1, inputs) > 0
            p.mul_(self.masks[name])

    def step(self, optimizer: Any, loss: Any) -> None:
        self.net.zero_grad()
        loss().backward()
        own = [p for group in optimizer.param_groups for p in group["params"]]
        names = [name for name in self.names if any(self.net.get_parameter(name) is p for p in own)]
        with torch.no_grad():
            for name in names:
                p = self.net.get_parameter(name)
                p.copy_(self.dense[name])
                assert p.grad is not None
                p.grad.add_(p * ~self.masks[name], alpha=self.decay)
        if self.net.clip is not None:
            nn.utils.clip_grad_norm_(own, self.net.clip)
        optimizer.step()
        self.mask(names)


@pytest.mark.parametrize("until", [1.0, 0.5])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "torch's clipping"])
def test_two_of_four_trains_as_in_plain_pytorch(kind: str, until: float) -> None:
    net, technique = GAN(**KINDS[kind]), SemiStructuredSparsity(0.01, until=until)
    trainer(technique, max_epochs=1).fit(net, gan_loader(6))
    names = ["generator.0.weight", "generator.4.weight", "discriminator.3.weight"]
    assert [*technique.masks] == names
    other = TwoOfFour(GAN(**KINDS[kind]), names, 0.01)
    if until == 1.0:
        other.train(batches(6))
    else:
        other.train(batches(3))
        for name in names:
            other.net.get_parameter(name).data.copy_(other.dense[name])
        dense = Plain(other.net)
        dense._generator, dense._discriminator = other._generator, other._discriminator
        dense.train(batches(6)[3:], 3)
    same(net, other.net)


class Scaled(Precision):
    """Skips every fourth step, as a gradient scaler does after an overflow."""

    def __init__(self) -> None:
        self.steps = 0

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        closure()
        self._after_closure(model, optimizer)
        self.steps += 1
        return None if self.steps % 4 == 0 else optimizer.step(**kwargs)


@pytest.mark.parametrize("name", ["EarlyBird", "SemiStructuredSparsity"])
def test_steps_that_a_gradient_scaler_skips_change_nothing(name: str) -> None:
    kind = KINDS["toggled, several steps"]
    technique = (
        SemiStructuredSparsity(0.01) if name != "EarlyBird" else EarlyBird(0.5, window=50, penalty=0.05, interval=4)
    )
    net = GAN(**kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "EarlyBird: the run ended")
        trainer(technique, max_epochs=1, plugins=[Scaled()]).fit(net, gan_loader(8))
    names = ["generator.0.weight", "generator.4.weight", "discriminator.3.weight"]
    other = (
        TwoOfFour(GAN(**kind), names, 0.01)
        if name != "EarlyBird"
        else Plain(GAN(**kind), penalties={"generator.2.weight": 0.05})
    )
    step, steps = other.step, itertools.count(1)
    other.step = lambda optimizer, loss: loss() if next(steps) % 4 == 0 else step(optimizer, loss)
    other.train(batches(8))
    same(net, other.net)


# -- how masks are found


@pytest.mark.parametrize("names", [None, ["generator.*"]])
@pytest.mark.parametrize("kind", ["one graph for both steps", "toggled, several steps"])
def test_tickets_are_those_of_trainings_from_the_first_weights_in_plain_pytorch(kind: str, names: Any) -> None:
    net, technique = GAN(**KINDS[kind]), LotteryTickets(2, share=0.5, names=names)
    trainer(technique, max_epochs=1).fit(net, gan_loader(9))
    masks = {name: torch.ones_like(m) for name, m in technique.masks.items()}
    data, other = batches(9), Plain(GAN())
    for period in range(3):
        other = Plain(GAN(**KINDS[kind]))  # weights, buffers and states of both optimizers are the first ones
        other.put(masks)
        other.train(data[3 * period : 3 * period + 3], 3 * period)
        if period == 2:
            break
        for network in NETWORKS if names is None else NETWORKS[:1]:
            kept = of_network(masks, network)
            left = sum(int(m.sum()) for m in kept.values())
            sizes = {
                name: other.net.get_parameter(name).detach().abs().masked_fill(~m, -1.0) for name, m in kept.items()
            }
            least = torch.cat([s.flatten() for s in sizes.values()]).sort(descending=True).values[round(left / 2) - 1]
            masks |= {name: s >= least for name, s in sizes.items()}
    assert all(torch.equal(technique.masks[name], mask) for name, mask in masks.items())
    same(net, other.net)


def gradients(net: GAN, passes: int = 1) -> dict[str, Tensor]:
    """The gradient of each network's own loss on the first batch, with its graph; a mean over the discriminator's steps."""
    for m in net.modules():
        m.train(isinstance(m, _BatchNorm))
    found: dict[str, list[Tensor]] = {}

    def of(network: str) -> Any:
        own = {name: p for name, p in net.named_parameters() if name.startswith(network)}

        def note(loss: Any) -> None:
            for name, g in zip(own, torch.autograd.grad(loss(), [*own.values()], create_graph=True), strict=True):
                found.setdefault(name, []).append(g)

        return note

    run(net, batches(1)[0], 0, of("discriminator"), of("generator"))
    return {name: torch.stack(all_).mean(0) for name, all_ in found.items()}


@pytest.mark.parametrize("critic", [1, 2])
@pytest.mark.parametrize("name", ["SNIP", "GraSP"])
def test_scores_follow_from_each_networks_own_loss(name: str, critic: int) -> None:
    settings: dict[str, Any] = {"shared": False, "critic": critic}
    net, technique = GAN(**settings), TECHNIQUES[name]()
    before = {n: p.clone() for n, p in net.state_dict().items()}
    look = Begun(technique)
    trainer(technique, look, max_epochs=1).fit(net, gan_loader(1))
    first = {n: p * technique.masks.get(n, 1) for n, p in before.items()}
    assert all(torch.equal(p, first[n]) for n, p in look.states[0].items()), "scores leave no trace but zeros"

    other = GAN(**settings)
    g = gradients(other)
    for network in NETWORKS:
        named = {n: other.get_parameter(n) for n in of_network(technique.masks, network)}
        if name == "SNIP":
            scores = {n: (g[n] * p).abs().detach() for n, p in named.items()}
        else:
            held = [*named.values()]
            dot: Any = sum((g[n] * g[n].detach()).sum() for n in named)
            hg = torch.autograd.grad(dot, held, retain_graph=True)
            scores = {n: (p * h).detach() for (n, p), h in zip(named.items(), hg, strict=True)}
        for n, mask in largest_half(scores).items():
            assert float((technique.masks[n] != mask).float().mean()) < 1e-3, n


def test_no_step_on_these_batches_is_an_error_and_more_batches_help() -> None:
    class Windows(GAN):
        """Gradients of two batches for each step."""

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            g, d = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]

            def collect(optimizer: Any, loss: Any) -> None:
                self.toggle_optimizer(optimizer)
                self.manual_backward(loss() / 2)
                if batch_idx % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

            run(self, batch, batch_idx, lambda loss: collect(d, loss), lambda loss: collect(g, loss))

    with pytest.raises(
        ValueError, match=r"SNIP\(batches=1\): 4 weights have no gradient in an optimizer's step on these"
    ):
        trainer(SNIP(0.5), max_epochs=1).fit(Windows(shared=False), gan_loader(4))
    technique = SNIP(0.5, batches=2)
    zeros = Zeros(technique)
    trainer(technique, zeros, max_epochs=1).fit(Windows(shared=False), gan_loader(4))
    assert zeros.steps == 4 and zeros.leaks == []


@pytest.mark.parametrize("kind", ["one graph for both steps", "closures", "torch's optimizers"])
def test_masks_change_by_the_dense_gradients_of_each_optimizers_own_steps(kind: str) -> None:
    net, technique = GAN(**KINDS[kind]), RigL(0.5, interval=3, until=1.0, fraction=0.5)
    look = Begun(technique)
    trainer(technique, look, max_epochs=1).fit(net, gan_loader(8))
    made: dict[int, int] = {}
    moved: dict[str, int] = {}

    def rewire(optimizer: Any, dense: dict[str, Tensor]) -> None:
        made[id(optimizer)] = count = made.get(id(optimizer), 0) + 1
        masks = dict(other.masks)
        for name in dense.keys() & masks.keys() if count % 3 == 0 else ():
            p, kept = other.net.get_parameter(name), masks[name].flatten()
            k = int(cosine_fraction((count - 1) / 8, fraction=0.5, until=1.0) * int(kept.sum()))
            new = kept.clone()
            new[p.abs().flatten().masked_fill(~kept, torch.inf).argsort(stable=True)[:k]] = False
            grown = dense[name].abs().flatten().masked_fill(new, -1.0).argsort(descending=True, stable=True)[:k]
            new[grown] = True
            masks[name] = new.view_as(p)
            moved[name] = moved.get(name, 0) + int((new != kept).sum())
            for state in optimizer.state[p].values():
                if isinstance(state, Tensor) and state.shape == p.shape:
                    state.masked_fill_(masks[name] != other.masks[name], 0.0)
            p.mul_(masks[name])
        other.masks = masks

    other = Plain(GAN(**KINDS[kind]), rewire)
    other.put(look.masks[0])
    other.train(batches(8))
    assert all(torch.equal(mask, other.masks[name]) for name, mask in technique.masks.items())
    same(net, other.net)
    assert all(any(count for name, count in moved.items() if name.startswith(network)) for network in NETWORKS)


@pytest.mark.parametrize("kind", ["toggled, several steps", "closures", "torch's optimizers"])
def test_the_penalty_on_scales_is_added_once_per_step(kind: str) -> None:
    net, technique = GAN(**KINDS[kind]), EarlyBird(0.5, window=50, penalty=0.05, interval=1)
    with pytest.warns(UserWarning, match="EarlyBird: the run ended"):
        trainer(technique, max_epochs=1).fit(net, gan_loader(5))
    other = Plain(GAN(**KINDS[kind]), penalties={"generator.2.weight": 0.05})
    other.train(batches(5))
    same(net, other.net)


class Both(GAN):
    """The generator's first layer is in both optimizers, and gradients of earlier batches are kept."""

    def configure_optimizers(self) -> Any:
        g, d = super().configure_optimizers()
        d.add_param_group({"params": [self.generator[0].weight], "lr": 0.01})
        return g, d

    def losses(self, real: Tensor, fake: Tensor) -> Tensor:
        return super().losses(real, fake) + self.get_parameter("generator.0.weight").pow(2).sum()


def test_each_optimizer_gets_its_own_states_back_and_old_gradients_go() -> None:
    net, technique = Both(shared=False), LotteryTickets(1, share=0.5, rewind=0.5)
    states: list[list[Tensor]] = []
    gradients: list[int] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            held = [o.state.get(net.generator[0].weight, {}) for o in trainer.optimizers]
            states.append([t.clone() for state in held for t in state.values() if t is not None])
            gradients.append(sum(p.grad is not None for p in net.parameters()))

    trainer(technique, Look(), max_epochs=1).fit(net, gan_loader(8))
    mask = technique.masks["generator.0.weight"]
    assert len(states[2]) == 4, "Adam's step and moments, and SGD's momentum"
    for then, now in zip(states[2], states[4], strict=True):
        assert torch.equal(now, then * mask if then.shape == mask.shape else then)
    assert gradients[3] > 0 and gradients[4] == 0


def test_tickets_are_found_with_differentiable_augmentation() -> None:
    net, technique, augment = GAN(), LotteryTickets(2, share=0.5), DiffAugment(["translation", "cutout"])
    zeros = Zeros(technique)
    trainer(technique, augment, zeros, max_epochs=1).fit(net, gan_loader(9))
    assert zeros.leaks == [] and technique.report()["rounds"] == 2
    assert augment.report()["calls"] == 3, "of the discriminator in the last batch"


# -- resuming, and what is refused


@pytest.mark.parametrize("kind", ["one graph for both steps", "toggled, several steps"])
@pytest.mark.parametrize("name", [*TECHNIQUES, "SemiStructuredSparsity"])
def test_a_resumed_run_is_the_uninterrupted_one(name: str, kind: str, tmp_path: Path) -> None:
    made = TECHNIQUES.get(name, lambda: SemiStructuredSparsity(until=0.6))

    def fit(*callbacks: pl.Callback, **settings: Any) -> dict[str, Tensor]:
        net, t = GAN(**KINDS[kind]), trainer(made(), *callbacks, max_epochs=2)
        t.fit(net, gan_loader(5), **settings)
        return final_state(net, t)

    whole = fit(SaveBatches(tmp_path))
    for batch in (1, 4, 5, 6, 7):
        assert differences(whole, fit(ckpt_path=tmp_path / f"batch={batch}.ckpt")) == [], f"after batch {batch}"


class Unnormed(GAN):
    def __init__(self) -> None:
        super().__init__()
        self.generator[2] = nn.Identity()


def test_what_cannot_work_is_refused() -> None:
    told = "has automatic_optimization=False, so its training_step"
    with pytest.raises(ValueError, match="EarlyBird: found no units to prune in Unnormed: no BatchNorm"):
        trainer(EarlyBird(), max_epochs=1).fit(Unnormed(), gan_loader(2))
    with pytest.raises(ValueError, match=rf"TrainLargeThenCompress\(patience=3\): GAN {told} need not return"):
        trainer(TrainLargeThenCompress(), max_epochs=1).fit(GAN(), gan_loader(2))
    net = GAN()
    net.configure_optimizers = lambda: torch.optim.LBFGS(net.parameters())
    with pytest.raises(
        ValueError, match="SemiStructuredSparsity: GAN has automatic_optimization=False and steps LBFGS"
    ):
        trainer(SemiStructuredSparsity(), max_epochs=1).fit(net, gan_loader(2))
