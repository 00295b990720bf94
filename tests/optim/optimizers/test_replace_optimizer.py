"""ReplaceOptimizer against two optimizers stepped by hand, torch's schedulers made for each group, Lightning's callbacks."""

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from lightning_eff import ExactResume, Lion, Muon, ReplaceOptimizer, cli
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff._core.optimizers import copy_state, keeps_state
from lightning_eff.optim.optimizers._matrices import hidden_matrices
from lightning_eff.optim.optimizers._replacing.kinds import kinds_of
from tests.cases import Case, no_blocks
from tests.models import TinyGPT, flat, hugging_face, loader, module, trainer
from tests.runs import differences, final_state, fit


def _rising(u: float) -> float:
    return 0.85 + 0.1 * u


CASES = {
    "ReplaceOptimizer": Case(
        active=lambda: ReplaceOptimizer(functools.partial(Muon, momentum=_rising), group_lr={"vector": 2e-2}),
        neutral=lambda: ReplaceOptimizer(),
        own_optimizer=True,
        lost=(no_blocks, "classifier", "no hidden matrix among the .* parameters of its SGD"),
    )
}

NUM_STEPS = 12
ROOT = Path(__file__).parent.parent.parent.parent


class FourGroups(pl.LightningModule):
    """An embedding, matrices with decay, vectors without, and a head: four groups of unlike rates."""

    RATES = (3e-2, 1e-2, 2e-2, 5e-3)

    def __init__(self, schedule: Callable[..., Any] | None = None, extra: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.schedule, self.extra = schedule, extra or {"interval": "step"}
        self.net = module("tiny_gpt", num_layers=2, dropout=0.0)

    def groups(self) -> list[dict[str, Any]]:
        net = self.net
        blocks = list(net.blocks.parameters())
        parts = [
            [net.embed.weight, net.position.weight],
            [p for p in blocks if p.ndim == 2],
            [p for p in blocks if p.ndim < 2] + list(net.norm.parameters()),
            [net.head.weight],
        ]
        decays = (0.1, 0.1, 0.0, 0.1)
        return [
            {"params": ps, "lr": lr, "weight_decay": wd} for ps, lr, wd in zip(parts, self.RATES, decays, strict=True)
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.made = torch.optim.AdamW(self.groups(), betas=(0.9, 0.99))
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), **self.extra}}


class Rates(pl.Callback):
    """The rate of chosen parameters at each step."""

    def __init__(self, **names: str) -> None:
        self.names, self.seen, self.momenta = names, [], []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        held = dict(pl_module.named_parameters())
        found = {}
        for key, name in self.names.items():
            (group,) = [g for g in optimizer.param_groups if any(p is held[name] for p in g["params"])]
            found[key] = (float(group["lr"]), group.get("betas", group.get("momentum")))
        self.seen.append({key: rate for key, (rate, _) in found.items()})
        self.momenta.append({key: momentum for key, (_, momentum) in found.items()})


ONE_OF_EACH = {
    "embedding": "net.embed.weight",
    "matrix": "net.blocks.0.qkv.weight",
    "vector": "net.norm.weight",
    "head": "net.head.weight",
}


def run(net: pl.LightningModule, *callbacks: pl.Callback, name: str = "tiny_gpt", **kwargs: Any) -> pl.Trainer:
    pl.seed_everything(1, verbose=False)
    settings = {"max_steps": NUM_STEPS, **kwargs}
    t = trainer(*callbacks, **settings)
    t.fit(net, loader(name, shuffle=False))
    return t


# -- both step, each as it would by itself


def test_each_parameter_is_stepped_by_its_own_optimizer() -> None:
    """Bit for bit what two optimizers do that are stepped by hand, with clipping over all gradients."""
    pl.seed_everything(1, verbose=False)
    net = FourGroups()
    by_hand = copy.deepcopy(net)
    t = run(
        net,
        ReplaceOptimizer(functools.partial(torch.optim.SGD, momentum=0.8), lr=0.3, group_lr={"vector": 7e-3}),
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        max_steps=6,
    )
    matrices = [p for p in by_hand.net.blocks.parameters() if p.ndim == 2]
    groups = by_hand.groups()
    groups = [group for group in groups if group["params"][0] is not matrices[0]]
    groups[1]["lr"] = 7e-3
    adamw, sgd = torch.optim.AdamW(groups, betas=(0.9, 0.99)), torch.optim.SGD(matrices, lr=0.3, momentum=0.8)
    batches = [batch for _ in range(3) for batch in loader("tiny_gpt", shuffle=False)]
    # an epoch has five batches, so its last window is short
    windows = [batches[5 * e + i : 5 * e + min(i + 2, 5)] for e in range(3) for i in (0, 2, 4)][:6]
    for window in windows:
        for batch in window:
            ids, labels = batch["input_ids"], batch["labels"]
            (F.cross_entropy(by_hand.net(ids).flatten(0, 1), labels.flatten()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        for optimizer in (adamw, sgd):
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(flat(net), flat(by_hand))
    (optimizer,) = t.optimizers
    assert isinstance(optimizer, torch.optim.Optimizer) and [type(part).__name__ for part in optimizer.parts] == [
        "AdamW",
        "SGD",
    ]
    assert optimizer.parts[0] is net.made
    # the first groups are the module's four in turn
    found = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert found == [(0.1, 2), (0.0, 8), (0.0, 18), (0.1, 1)]


def test_all_and_patterns_and_groups_that_are_not_decayed() -> None:
    net = FourGroups()
    t = run(net, ReplaceOptimizer(functools.partial(torch.optim.SGD, weight_decay=0.3), "all", 0.1), max_steps=1)
    (optimizer,) = t.optimizers
    assert [type(part) for part in optimizer.parts] == [torch.optim.SGD]
    # the module decays no vectors, and so the other optimizer does not
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0, 0.3]
    net = FourGroups()
    t = run(net, ReplaceOptimizer(torch.optim.SGD, ["net.blocks.1.*", "head"], 0.1), max_steps=1)
    (optimizer,) = t.optimizers
    replaced = {id(p) for group in optimizer.parts[1].param_groups for p in group["params"]}
    assert replaced == {id(p) for p in [*net.net.blocks[1].parameters(), net.net.head.weight]}


def test_rates_by_group_alone_are_the_plain_optimizer_with_those_rates() -> None:
    pl.seed_everything(1, verbose=False)
    net = FourGroups()
    plain = copy.deepcopy(net)
    plain.RATES = (0.05, 1e-2, 4e-3, 5e-3)
    run(net, ReplaceOptimizer(group_lr={"embedding": 0.05, "vector": 4e-3}))
    run(plain)
    assert torch.equal(flat(net), flat(plain))


def test_an_optimizer_is_a_class_path_a_mapping_or_a_function() -> None:
    ends = []
    for optimizer in (
        "torch.optim.SGD",
        "sgd",
        {"class_path": "torch.optim.SGD"},
        {"class_path": "SGD", "init_args": {"lr": 0.1}},
        lambda params: torch.optim.SGD(params),
        functools.partial(torch.optim.SGD),
    ):
        net = module("tiny_gpt")
        pl.seed_everything(1, verbose=False)
        net.load_state_dict(module("tiny_gpt").state_dict())
        run(net, ReplaceOptimizer(optimizer, lr=0.1), max_steps=2)
        ends.append(flat(net))
    assert all(torch.equal(ends[0], end) for end in ends)


@pytest.mark.parametrize(("optimizer", "rate"), [(Muon, 0.02), ("muon", 0.02), (Lion, 1e-4), ("lion", 1e-4)])
def test_settings_of_the_other_optimizer_are_given_as_keywords(optimizer: Any, rate: float) -> None:
    ends = []
    known: Any = {"muon": Muon, "lion": Lion}.get(optimizer, optimizer)
    for technique in (
        ReplaceOptimizer(optimizer, lr=rate, weight_decay=0.3),
        ReplaceOptimizer(functools.partial(known, weight_decay=0.3), lr=rate),
    ):
        net = module("tiny_gpt")
        run(net, technique, max_steps=2)
        (part,) = [part for part in net.optimizers().parts if isinstance(part, known)]
        ends.append({(g["lr"], g["weight_decay"]) for g in part.param_groups})
    assert ends[0] == ends[1] == {(rate, 0.3)}


@pytest.mark.parametrize("path", ["pytorch_optimizer.Lion", "pytorch_optimizer.SOAP", "lightning_eff.Muon"])
def test_optimizers_of_anybody_serve(path: str) -> None:
    pytest.importorskip(path.partition(".")[0])
    net = module("gpt2")
    before = flat(net).clone()
    run(net, ReplaceOptimizer({"class_path": path, "init_args": {"lr": 1e-3}}), name="gpt2", max_steps=3)
    assert flat(net).isfinite().all() and not torch.equal(flat(net), before)


def test_muon_takes_matrices_apart_as_it_does_when_it_knows_the_module() -> None:
    """GPT-2's linear maps are (in, out), and c_attn is three of them: names alone do not tell."""
    net, plain = module("gpt2"), module("gpt2")
    run(net, technique := ReplaceOptimizer(Muon), name="gpt2", max_steps=1)
    del technique
    (muon,) = [part for part in net.optimizers().parts if isinstance(part, Muon)]
    name_of = {p: name for name, p in net.named_parameters()}
    assert {name_of[p]: layout for p, layout in muon._layouts.items()} == hidden_matrices(plain)
    everything = module("gpt2")
    run(everything, ReplaceOptimizer(Muon, "all"), name="gpt2", max_steps=1)
    (muon,) = everything.optimizers().parts
    assert {len(g["params"]) for g in muon.param_groups if g["algorithm"] == "muon"} == {len(hidden_matrices(plain))}


def test_groups_of_named_parameters_keep_their_names() -> None:
    net = module("tiny_gpt")
    net.configure_optimizers = lambda: torch.optim.AdamW(net.named_parameters())  # type: ignore[method-assign]
    t = run(net, ReplaceOptimizer(torch.optim.SGD, group_lr={"vector": 0.1}), max_steps=1)
    name_of = {p: name for name, p in net.named_parameters()}
    named = [group for group in t.optimizers[0].param_groups if "param_names" in group]
    assert len(named) == 2
    assert all(group["param_names"] == [name_of[p] for p in group["params"]] for group in named)


def test_progress_is_told_to_optimizers_that_follow_it() -> None:
    told: list[float] = []
    net = module("tiny_gpt")
    run(net, ReplaceOptimizer(lambda params: Muon(params, momentum=lambda u: told.append(u) or 0.9)), max_steps=4)
    assert told == pytest.approx([0.0, 0.25, 0.5, 0.75])


# -- the module's schedulers


def _lambdas(optimizer: Any, scale: float, k: int | None = None) -> Any:
    fns = [lambda s: 1 / (1 + s), lambda s: 0.9**s, lambda s: 1 - s / 20, lambda s: 1.0 + 0 * s]
    return schedulers.LambdaLR(optimizer, fns if k is None else fns[k])


def _one_cycle(optimizer: Any, scale: float, k: int | None = None) -> Any:
    highest = [0.3, 0.1, 0.2, 0.05]
    return schedulers.OneCycleLR(optimizer, highest if k is None else highest[k] * scale, total_steps=20)


def _cyclic(optimizer: Any, scale: float, k: int | None = None) -> Any:
    highest = [0.3, 0.1, 0.2, 0.05]
    low = [rate / 4 for rate in highest]
    return schedulers.CyclicLR(
        optimizer,
        low if k is None else low[k] * scale,
        highest if k is None else highest[k] * scale,
        step_size_up=3,
        cycle_momentum=False,
    )


def _sequential(optimizer: Any, scale: float, k: int | None = None) -> Any:
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=4)
    return schedulers.SequentialLR(
        optimizer, [warm, schedulers.CosineAnnealingLR(optimizer, 8, eta_min=1e-3 * scale)], milestones=[4]
    )


def _chained(optimizer: Any, scale: float, k: int | None = None) -> Any:
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    )


SCHEDULES: dict[str, Callable[..., Any]] = {
    "LambdaLR with a list of functions": _lambdas,
    "MultiplicativeLR": lambda o, scale, k=None: schedulers.MultiplicativeLR(o, lambda s: 0.95),
    "OneCycleLR": _one_cycle,
    "CyclicLR": _cyclic,
    "SequentialLR": _sequential,
    "ChainedScheduler": _chained,
    "CosineAnnealingLR with a floor": lambda o, scale, k=None: schedulers.CosineAnnealingLR(
        o, 10, eta_min=2e-3 * scale
    ),
    "CosineAnnealingWarmRestarts": lambda o, scale, k=None: schedulers.CosineAnnealingWarmRestarts(
        o, 4, 1, 1e-3 * scale
    ),
    "StepLR": lambda o, scale, k=None: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o, scale, k=None: schedulers.MultiStepLR(o, [2, 5], 0.3),
    "LinearLR": lambda o, scale, k=None: schedulers.LinearLR(o, 0.25, total_iters=6),
    "PolynomialLR": lambda o, scale, k=None: schedulers.PolynomialLR(o, 10, 2.0),
    "transformers, linear": lambda o, scale, k=None: transformers.get_linear_schedule_with_warmup(o, 3, 12),
    "transformers, cosine": lambda o, scale, k=None: transformers.get_cosine_schedule_with_warmup(o, 3, 12),
    "transformers, WSD": lambda o, scale, k=None: transformers.get_wsd_schedule(o, 2, 4, num_stable_steps=4),
}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_group_follows_its_schedule_in_its_own_proportion(name: str) -> None:
    """Against the same scheduler made for a single group of the right rate, one for each group."""
    schedule = SCHEDULES[name]
    net = FourGroups(lambda optimizer: schedule(optimizer, 1.0))
    rates = Rates(**ONE_OF_EACH, bias="net.blocks.0.qkv.bias")
    t = run(
        net,
        ReplaceOptimizer(
            functools.partial(torch.optim.SGD, momentum=0.5), lr=0.4, group_lr={"head": 0.02, "*.bias": 0.06}
        ),
        rates,
    )
    highest = [0.3, 0.1, 0.2, 0.05] if name in ("OneCycleLR", "CyclicLR") else list(net.RATES)
    wanted = {
        "embedding": (0, highest[0]),
        "matrix": (1, 0.4),
        "vector": (2, highest[2]),
        "head": (3, 0.02),
        "bias": (2, 0.06),
    }
    for kind, (k, base) in wanted.items():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base, momentum=0.9)
        scheduler = schedule(optimizer, base / highest[k], k)
        expected = []
        for _ in range(NUM_STEPS):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert [seen[kind] for seen in rates.seen] == pytest.approx(expected, rel=1e-9), kind
    (config,) = t.lr_scheduler_configs
    assert isinstance(config.scheduler, type(schedule(torch.optim.SGD(net.groups(), 0.1, momentum=0.9), 1.0)))
    assert config.scheduler.optimizer is t.optimizers[0]
    assert config.scheduler.get_last_lr() == [group["lr"] for group in t.optimizers[0].param_groups]


def test_momenta_that_a_cycle_moves_are_those_of_what_stays() -> None:
    net = FourGroups(lambda optimizer: _one_cycle(optimizer, 1.0))
    rates = Rates(**ONE_OF_EACH)
    run(net, ReplaceOptimizer(functools.partial(torch.optim.SGD, momentum=0.5), lr=0.4), rates)
    plain = FourGroups(lambda optimizer: _one_cycle(optimizer, 1.0))
    alone = Rates(**ONE_OF_EACH)
    run(plain, alone)
    for ours, theirs in zip(rates.momenta, alone.momenta, strict=True):
        assert ours["head"] == theirs["head"] and ours["matrix"] == 0.5
    assert len({momenta["head"] for momenta in rates.momenta}) > 5


def test_a_plateau_lowers_all_rates_at_once() -> None:
    extra = {"interval": "step", "monitor": "loss", "strict": True}
    net = FourGroups(
        lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0, min_lr=4e-3), extra
    )
    rates = Rates(**ONE_OF_EACH)
    t = run(net, ReplaceOptimizer(torch.optim.SGD, lr=0.4), rates)
    halves = [seen["embedding"] / 3e-2 for seen in rates.seen]
    assert halves[0] == 1.0 and halves[-1] == pytest.approx(4e-3 / 3e-2)
    floor = {"embedding": 4e-3 / 3e-2, "matrix": 4e-3 / 1e-2, "head": 4e-3 / 5e-3}
    for kind, first in (("embedding", 3e-2), ("matrix", 0.4), ("head", 5e-3)):
        expected = [first * max(2.0**-i, floor[kind]) for i in range(NUM_STEPS)]
        assert [seen[kind] for seen in rates.seen] == pytest.approx(expected)
    assert isinstance(t.lr_scheduler_configs[0].scheduler, schedulers.ReduceLROnPlateau)


@pytest.mark.parametrize("form", ["pair", "pair of dicts", "dict", "list of dicts", "list", "two schedulers"])
def test_every_form_of_configure_optimizers(form: str) -> None:
    net = FourGroups()

    def configure_optimizers() -> Any:
        o = torch.optim.AdamW(net.groups())
        s = schedulers.ExponentialLR(o, 0.5)
        return {
            "pair": ([o], [s]),
            "pair of dicts": ([o], [{"scheduler": s, "interval": "epoch"}]),
            "dict": {"optimizer": o, "lr_scheduler": s},
            "list of dicts": [{"optimizer": o, "lr_scheduler": {"scheduler": s}}],
            "list": [o],
            "two schedulers": ([o], [s, schedulers.ConstantLR(o, 1.0)]),
        }[form]

    net.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    rates = Rates(**ONE_OF_EACH)
    run(net, ReplaceOptimizer(torch.optim.SGD, lr=0.4), rates)
    # five batches an epoch, two epochs in twelve steps
    decayed = form != "list"
    assert rates.seen[11]["matrix"] == pytest.approx(0.1 if decayed else 0.4)
    assert rates.seen[11]["head"] == pytest.approx(5e-3 / (4 if decayed else 1))


@pytest.mark.parametrize("name", ["SequentialLR", "OneCycleLR", "CosineAnnealingLR with a floor"])
def test_a_run_under_a_schedule_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    def go(resume: Path | None = None, directory: Path | None = None) -> tuple[dict[str, Tensor], list[Any]]:
        pl.seed_everything(1 if resume is None else 99, verbose=False)
        net = FourGroups(lambda optimizer: SCHEDULES[name](optimizer, 1.0))
        rates = Rates(**ONE_OF_EACH)
        extra = (
            [ModelCheckpoint(directory, every_n_train_steps=5, save_top_k=-1, filename="{step}")] if directory else []
        )
        t = trainer(
            ReplaceOptimizer(Muon, group_lr={"head": 0.02}),
            rates,
            *extra,
            max_steps=NUM_STEPS,
            enable_checkpointing=directory is not None,
        )
        t.fit(net, loader("tiny_gpt"), ckpt_path=resume)
        return final_state(net, t), rates.seen

    whole, rates = go(directory=tmp_path)
    resumed, after = go(resume=tmp_path / "step=5.ckpt")
    assert differences(whole, resumed) == [] and after == rates[5:]
    assert torch.load(tmp_path / "step=5.ckpt", weights_only=True)["optimizer_states"][0].keys() >= {
        "state",
        "param_groups",
    }


# -- what looks at optimizers goes on


@pytest.mark.filterwarnings("ignore:You have set log_momentum=True, but some optimizers do not have momentum")
def test_learning_rate_monitor_sees_every_group(tmp_path: Path) -> None:
    net = FourGroups(lambda optimizer: _lambdas(optimizer, 1.0))
    logger = CSVLogger(tmp_path)
    monitor = LearningRateMonitor(log_momentum=True)
    t = run(net, ReplaceOptimizer(torch.optim.SGD, lr=0.4), monitor, logger=logger, log_every_n_steps=1)
    groups = len(t.optimizers[0].param_groups)
    assert len([name for name in monitor.lrs if "momentum" not in name]) == groups == 4
    assert all(len(values) >= NUM_STEPS - 1 for values in monitor.lrs.values())
    (name,) = [n for n, v in monitor.lrs.items() if v[1] == pytest.approx(0.4 * 0.9)]
    assert monitor.lrs[name][:3] == pytest.approx([0.4, 0.4 * 0.9, 0.4 * 0.81])


def test_the_rate_finder_works_and_leaves_things_as_they_were() -> None:
    net = module("tiny_gpt")
    before = flat(net).clone()
    t = trainer(ReplaceOptimizer(Muon), max_steps=4, enable_checkpointing=False)
    found = Tuner(t).lr_find(net, loader("tiny_gpt"), num_training=10, early_stop_threshold=None, update_attr=True)
    assert found is not None and len(found.results["lr"]) == 10
    assert torch.equal(flat(net), before)
    t.fit(net, loader("tiny_gpt"))
    assert t.global_step == 4 and not torch.equal(flat(net), before)


@pytest.mark.filterwarnings("ignore:Learning rates written into")
def test_lightnings_own_weight_averaging_and_gradient_scaler_go_on() -> None:
    net = FourGroups(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9), {"interval": "epoch"})
    t = run(
        net, ReplaceOptimizer(torch.optim.SGD, lr=0.4), StochasticWeightAveraging(0.05, 0.5), max_steps=-1, max_epochs=4
    )
    assert flat(net).isfinite().all() and t.current_epoch == 4
    pl.seed_everything(1, verbose=False)
    scaled, plain = FourGroups(), FourGroups()
    plain.load_state_dict(scaled.state_dict())
    optimizers = []
    for one in (scaled, plain):
        t = trainer(ReplaceOptimizer(torch.optim.SGD, lr=0.4), max_steps=0)
        t.fit(one, loader("tiny_gpt"))
        optimizers += t.optimizers
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=1000)
    plain.log = scaled.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for batch in loader("tiny_gpt", shuffle=False):
        scaler.scale(scaled.training_step(batch, 0)).backward()
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        plain.training_step(batch, 0).backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert torch.equal(flat(scaled), flat(plain))
    before = flat(scaled).clone()
    scaler.scale(scaled.training_step(batch, 0) * float("inf")).backward()
    scaler.step(optimizers[0])
    assert torch.equal(flat(scaled), before), "a step with gradients that are not finite is left out, of both"


def test_state_is_looked_up_and_copied_in_the_part_that_has_the_parameter() -> None:
    net = FourGroups()
    t = run(net, ReplaceOptimizer(Muon), max_steps=2)
    (optimizer,) = t.optimizers
    one, two = net.net.blocks[0].proj.weight, net.net.blocks[1].proj.weight
    assert set(optimizer.state[one]) == {"momentum_buffer"} and "exp_avg" in optimizer.state[net.net.head.weight]
    assert len(optimizer.state) == len(list(net.parameters())) == len(list(optimizer.state))
    assert copy_state([optimizer], one, two)
    assert torch.equal(optimizer.state[two]["momentum_buffer"], optimizer.state[one]["momentum_buffer"])
    assert optimizer.parts[1].state[two] is optimizer.state[two]
    assert keeps_state(optimizer, one) and keeps_state(optimizer, net.net.head.weight)
    again = copy.deepcopy(optimizer)
    assert isinstance(again, CombinedOptimizer) and len(again.state) == len(optimizer.state)
    new = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [new], "lr": 0.5})
    assert optimizer.part_of(new) is optimizer.parts[0], "the module's own, which a hook writes a group for"
    new.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(new, torch.zeros(3)) and optimizer.param_groups[-1]["params"] == [new]
    saved = optimizer.state_dict()
    assert sorted(saved["state"]) == list(range(len(list(net.parameters())) + 1))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[-1] is optimizer.parts[0].param_groups[-1]


@pytest.mark.parametrize("kind", ["CosineAnnealingLR", "ExponentialLR", "StepLR"])
def test_a_group_that_a_hook_adds_follows_the_modules_scheduler(kind: str) -> None:
    """As in plain training, from the rate that the hook gave it."""
    arguments: Any = {"CosineAnnealingLR": {"T_max": 8}, "ExponentialLR": {"gamma": 0.9}, "StepLR": {"step_size": 2}}[
        kind
    ]

    class Adds(TinyGPT):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW((p for p in self.parameters() if p is not self.head.weight), lr=0.01)
            scheduler = getattr(schedulers, kind)(optimizer, **arguments)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.optimizers[0].add_param_group({"params": [self.head.weight], "lr": 0.005})

    rates: dict[bool, list[float]] = {}
    for replaced in (False, True):
        seen = rates[replaced] = []

        class Watch(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any, seen: list[float] = seen) -> None:
                groups = trainer.optimizers[0].param_groups
                seen += [g["lr"] for g in groups if any(p is module.head.weight for p in g["params"])]

        callbacks = [Watch(), *([ReplaceOptimizer(Muon)] if replaced else [])]
        trainer(*callbacks, max_steps=6).fit(Adds(2), loader("tiny_gpt"))
    assert rates[True] == pytest.approx(rates[False]) and len(rates[True]) == 4 and rates[True][-1] < 0.005


# -- which parameters are of which kind, in any module


class ResNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"a": nn.Conv2d(8, 8, 3, padding=1), "bn": nn.BatchNorm2d(8), "b": nn.Conv2d(8, 8, 1)})
            for _ in range(3)
        )
        self.fc = nn.Linear(8, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.bn(self.stem(batch["pixel_values"]))
        for layer in self.layers:
            x = x + layer["b"](F.relu(layer["bn"](layer["a"](x))))
        return F.cross_entropy(self.fc(x.mean((2, 3))), batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_kinds_of_parameters() -> None:
    def kinds(net: nn.Module) -> dict[str, str]:
        return kinds_of(net, hidden_matrices(net))

    found = kinds(ResNet())
    assert found["stem.weight"] == "other" and found["fc.weight"] == "head" and found["layers.1.a.weight"] == "matrix"
    assert {found["stem.bias"], found["bn.weight"], found["fc.bias"]} == {"vector"}
    gpt2 = kinds(hugging_face("gpt2"))
    assert {n for n, kind in gpt2.items() if kind == "embedding"} == {
        "model.transformer.wte.weight",
        "model.transformer.wpe.weight",
    }
    assert "head" not in gpt2.values()  # tied
    vit = kinds(hugging_face("vit"))
    assert {n.split(".", 1)[1] for n, kind in vit.items() if kind not in ("matrix", "vector")} == {
        "vit.embeddings.cls_token",
        "vit.embeddings.position_embeddings",
        "vit.embeddings.patch_embeddings.projection.weight",
        "classifier.weight",
    }
    assert vit["model.classifier.weight"] == "head"
    llama = kinds(hugging_face("llama"))
    assert llama["model.lm_head.weight"] == "head" and llama["model.model.embed_tokens.weight"] == "embedding"
    # a decoder is a head where it is a linear map, as in BERT, and not where it is half of a network
    by_channel = nn.Conv2d(8, 8, 3, groups=8)
    halves = nn.ModuleDict({"encoder": nn.Conv2d(1, 8, 3), "decoder": nn.Sequential(by_channel, nn.Conv2d(8, 1, 1))})
    assert kinds(halves)["decoder.0.weight"] == "other"
    tail = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), "decoder": nn.Linear(4, 9)})
    assert kinds(nn.ModuleDict({**tail, "aside": nn.Linear(4, 4)}))["decoder.weight"] == "head"
    plain = kinds(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert [plain[f"{i}.weight"] for i in (0, 2, 4)] == ["other", "matrix", "head"]


def test_a_network_of_convolutions_trains() -> None:
    net = ResNet()
    t = run(net, ReplaceOptimizer(Muon, group_lr={"vector": 0.5, "head": 0.05, "other": 0.02}), name="vit", max_steps=4)
    muon = t.optimizers[0].parts[1]
    assert len(muon.param_groups[0]["params"]) == 6 and flat(net).isfinite().all()


def test_what_went_where_is_printed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        technique = ReplaceOptimizer(Muon, group_lr={"embedding": 0.3})
        run(FourGroups(lambda optimizer: _lambdas(optimizer, 1.0)), technique, max_steps=1)
    (text,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("ReplaceOptimizer:")]
    adamw = (
        "AdamW, learning rate 0.3 (AdamW had 0.03) under LambdaLR: 2 tensors (2 matrices), 1,488 weights, 16.4% of the"
    )
    assert f"{adamw} parameters: net.embed.weight, net.position.weight" in text
    muon = "Muon (muon), learning rate 0.02 (AdamW had 0.01) under LambdaLR: 8 tensors (8 matrices)"
    assert muon in text and "parameters: net.blocks.*.qkv.weight (2), net.blocks.*.proj.weight (2)," in text
    assert "AdamW keeps these matrices (embedding): net.embed.weight, net.position.weight" in text
    assert "AdamW keeps these matrices (head): net.head.weight" in text
    assert technique.report()["tensors"] == 8
    assert "Muon" in technique.summary()


# -- from YAML

_SHORT = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.enable_progress_bar=false"]


@pytest.mark.parametrize("source", ["docs/optimizers.md", "examples/gpt/muon.yaml"])
def test_the_recipes_in_yaml_run(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As written, for two steps: a class path with ``init_args``, as LightningCLI takes optimizers."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / source).read_text()
    if source == "docs/optimizers.md":
        (text,) = [part for part in text.split("```yaml")[1:] if "ReplaceOptimizer" in part.partition("```")[0]]
        text = text.partition("```")[0]
        assert len(text.strip().splitlines()) == 10
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    small = [f"--trainer.default_root_dir={tmp_path}", "--data.max_bytes=100000"]
    small += ["--model.dim=16", "--model.num_layers=2", "--model.block_size=32", "--data.block_size=32"]
    if "ModelCheckpoint" in text:
        small += ["--trainer.val_check_interval=2"]
        small += [f"--trainer.logger.init_args.save_dir={tmp_path}"]
    cli.main(["fit", "--config", str(path), *_SHORT, *small])
    out = capsys.readouterr().out
    assert "tensors (6,144 weights) trained by Muon" in out


# -- bad input


class _Two(FourGroups):
    def configure_optimizers(self) -> Any:
        a, b = self.groups()[:2], self.groups()[2:]
        return [torch.optim.AdamW(a), torch.optim.SGD(b)]


class _None(FourGroups):
    def configure_optimizers(self) -> Any:
        return None


class _Forgets(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__([params[0]["params"][0]] if isinstance(params[0], dict) else [params[0]])


class _AnewEachStep(FourGroups):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("net", "technique", "message"),
    [
        (
            _AnewEachStep,
            lambda: ReplaceOptimizer(Muon),
            "module's LBFGS keeps .* parameters and evaluates the loss again",
        ),
        (_AnewEachStep, lambda: ReplaceOptimizer(group_lr={"head": 0.1}), "LBFGS keeps .* parameters='all'"),
        (_Two, lambda: ReplaceOptimizer(Muon), r"returned 2 optimizers \(\['AdamW', 'SGD'\]\)\. Return one optimizer"),
        (_None, lambda: ReplaceOptimizer(Muon), r"returned no optimizers\. Return one optimizer"),
        (FourGroups, lambda: ReplaceOptimizer(torch.optim.LBFGS), "LBFGS evaluates the loss again"),
        (
            FourGroups,
            lambda: ReplaceOptimizer(torch.optim.LBFGS, "all"),
            "LBFGS does not accept these parameters, 4 groups",
        ),
        (
            FourGroups,
            lambda: ReplaceOptimizer(torch.optim.Muon, "all"),
            r"Muon does not accept .*shapes \[\(16,\)",
        ),
        (FourGroups, lambda: ReplaceOptimizer(_Forgets), "_Forgets has 1 parameters but was given 8, without"),
        (FourGroups, lambda: ReplaceOptimizer(lambda params: 3), r"returned int\. Return a torch.optim.Optimizer"),
        (
            FourGroups,
            lambda: ReplaceOptimizer(Muon, ["net.block.*"]),
            r"\['net.block.\*'\]|net.block.*Nearest: net.blocks",
        ),
        (FourGroups, lambda: ReplaceOptimizer(group_lr={"embeding": 0.1}), "matches no parameter.*Nearest: embedding"),
        (FourGroups, lambda: ReplaceOptimizer(group_lr={"net.hed.*": 0.1}), "Nearest: .*net.head"),
        (FourGroups, lambda: ReplaceOptimizer(group_lr={"other": 0.1}), r"of this kind; there are \['embedding'"),
    ],
)
def test_what_cannot_be_done_is_refused_at_setup(net: Any, technique: Any, message: str) -> None:
    one = net()
    before = flat(one).clone()
    with pytest.raises(ValueError, match=f"ReplaceOptimizer.*{message}"):
        run(one, technique())
    assert torch.equal(flat(one), before) and "configure_optimizers" not in vars(one)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            functools.partial(Muon, learning_rate=0.02),
            r"Muon has no argument 'learning_rate'; expected one of lr, weight_decay, .* Did you mean 'lr'\?",
        ),
        (
            {"class_path": "torch.optim.SGD", "init_args": {"momentun": 0.9}},
            r"SGD has no argument 'momentun'; expected one of lr, momentum, .* Did you mean 'momentum'\?",
        ),
        (
            functools.partial(torch.optim.SGD, warmup=3),
            r"SGD has no argument 'warmup'; expected one of lr, .* Remove it",
        ),
    ],
)
def test_an_argument_that_the_optimizer_has_not_is_refused_at_once(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"ReplaceOptimizer: {message}"):
        ReplaceOptimizer(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (functools.partial(Muon, lr="0.02"), r"Muon does not take lr='0.02': .*such as the default 0.02\.$"),
        (
            functools.partial(Muon, momentum=0.9, lr=-1.0),
            r"does not take lr=-1.0: .* finite number >= 0.* default 0.02\.$",
        ),
        (
            functools.partial(torch.optim.AdamW, betas=0.9),
            r"AdamW does not take betas=0.9: .* default \(0.9, 0.999\)\.$",
        ),
        (
            lambda params: Muon(params, rate=0.1),
            r"cannot be created with these arguments .*'rate'\. Correct the arguments",
        ),
    ],
)
def test_a_value_that_the_optimizer_does_not_take_is_named_and_not_the_parameters(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"ReplaceOptimizer: .*{message}"):
        run(FourGroups(), ReplaceOptimizer(optimizer))


def test_a_setting_or_a_name_that_does_not_exist_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Lion has no argument 'wd'.* Did you mean 'weight_decay'\?"):
        ReplaceOptimizer("lion", wd=0.1)
    with pytest.raises(ValueError, match=r"no class is found at 'mun' \(did you mean 'Muon'\?\)"):
        ReplaceOptimizer("mun")
    with pytest.raises(TypeError, match=r"weight_decay=\.\.\.\): this is a setting of an optimizer, and none is named"):
        ReplaceOptimizer(weight_decay=0.1)


def test_a_tied_head_is_named() -> None:
    with pytest.raises(ValueError, match="a head that is tied to the embedding is the embedding"):
        run(module("gpt2"), ReplaceOptimizer(group_lr={"head": 0.1}), name="gpt2")


def test_a_rate_of_zero_has_no_proportion() -> None:
    net = FourGroups(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9))
    net.RATES = (1e-2, 0.0, 1e-2, 1e-2)
    net.configure_optimizers = lambda: _scheduled(torch.optim.SGD(net.groups(), lr=0.0))  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"net.blocks.0.qkv.weight, .* learning rate 0.0, so a scheduler cannot scale 0.02"
    ):
        run(net, ReplaceOptimizer(Muon))


def _scheduled(optimizer: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": schedulers.ExponentialLR(optimizer, 0.9)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"optimizer": Muon, "parameters": "blocks.*"},
            r"expected 'matrices' or 'all' or a list of name patterns: .* Write \['blocks\.\*'\]",
        ),
        ({"optimizer": Muon, "parameters": []}, "expected .* a list of name patterns"),
        ({"optimizer": Muon, "lr": -1.0}, r"lr=-1.0\): expected a finite number >= 0"),
        (
            {"group_lr": {"head": float("nan")}},
            r"group_lr=\{'head': nan\}\): expected .* finite number >= 0, .* The value of 'head' is nan",
        ),
        ({"lr": 0.1}, "none is named. Name one, or give only group_lr="),
        ({"optimizer": "torch.optim.Muno"}, "no class is found at 'torch.optim.Muno'"),
        ({"optimizer": "torch.nn.Linear"}, "is not a torch.optim.Optimizer"),
        ({"optimizer": {"class": "a"}}, "expected the keys class_path and init_args"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplaceOptimizer(**arguments)


def test_an_optimizer_that_is_made_already_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a function that makes an optimizer from parameters"):
        ReplaceOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))  # type: ignore[arg-type]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    fit("tiny_gpt", lambda: [ExactResume()], directory=tmp_path / "plain", max_steps=1)
    (plain,) = (tmp_path / "plain").glob("*.ckpt")
    with pytest.raises(ValueError, match="saved without it"):
        fit("tiny_gpt", lambda: [ReplaceOptimizer(Muon)], resume=plain)
    fit("tiny_gpt", lambda: [ReplaceOptimizer(Muon)], directory=tmp_path / "muon", max_steps=1)
    (muon,) = (tmp_path / "muon").glob("*.ckpt")
    with pytest.raises(ValueError, match="Resume with the settings of the run"):
        fit("tiny_gpt", lambda: [ReplaceOptimizer(Muon, "all")], resume=muon)
    with pytest.raises(ValueError, match=r"Cannot load the optimizer state of AdamW and Muon, .* into AdamW and SGD, "):
        fit("tiny_gpt", lambda: [ReplaceOptimizer(torch.optim.SGD)], resume=muon)


def test_matrices_that_are_frozen_are_none() -> None:
    """Else the other optimizer would step nothing, in silence."""
    net = TinyGPT()
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    with pytest.raises(ValueError, match=r"no hidden matrix among .*'vector': 25.*; 28 others are frozen"):
        trainer(ReplaceOptimizer(Muon), max_steps=1).fit(net, loader("tiny_gpt"))
