"""EightBitOptimizer: each rule against the module's own, states of a byte an element, and the paper's blocks written out."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from lightning_eff import LAMB, EightBitOptimizer, LearningRateSchedule, Lion, ReplaceOptimizer
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff.memory._eight_bit.equivalents import EIGHT_BIT, eight_bit, equivalent_of, four_bit
from lightning_eff.memory.eight_bit_optimizer import state_bytes
from tests.cases import Case, classifier
from tests.models import TinyGPT, flat, hugging_face, loader, module, trainer
from tests.runs import checkpoints, differences, final_state, fit, fit_yaml

CASES = {
    "EightBitOptimizer": Case(
        active=lambda: EightBitOptimizer(min_size=48),
        neutral=lambda: EightBitOptimizer(bits=32),
        own_optimizer=True,
        lost=(
            classifier,
            "classifier",
            r"min_size=4096\): .* hold no tensor as large .* largest of all has 64",
        ),
        as_is=lambda: EightBitOptimizer(),
    )
}

OWN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, alpha=0.9, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, weight_decay=0.1),
    "Lion": lambda p: Lion(p, 1e-3, weight_decay=0.1),
    "LAMB": lambda p: LAMB(p, 1e-2, weight_decay=0.1),
}


def trajectory(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: int = 20) -> Tensor:
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        p.grad = torch.randn(p.shape, generator=g) + 0.3
        optimizer.step()
    return p.detach()


def weights() -> nn.Parameter:
    return nn.Parameter(torch.randn(64, 100, generator=torch.Generator().manual_seed(0)))


def in_few_bits(name: str, p: nn.Parameter, min_size: int) -> torch.optim.Optimizer:
    own = OWN[name]([p])
    return eight_bit(equivalent_of(own, 8), [dict(own.param_groups[0])], min_size=min_size)


# -- the rules


def test_every_equivalent_is_tried() -> None:
    assert {name for _, name in EIGHT_BIT} == set(OWN)


@pytest.mark.parametrize("name", sorted(OWN))
def test_in_32_bits_it_is_the_modules_own_rule(name: str) -> None:
    own, other = weights(), weights()
    expected = trajectory(OWN[name]([own]), own)
    got = trajectory(in_few_bits(name, other, min_size=10**6), other)
    assert float((got - expected).norm() / (expected - weights()).norm().detach()) < 2e-6


@pytest.mark.parametrize("name", sorted(OWN))
def test_in_8_bits_it_stays_close_and_takes_a_byte(name: str) -> None:
    """T: a byte an element; the way of 20 steps is off by a few per cent of its length (sign flips cost Lion more)."""
    own, other = weights(), weights()
    expected = trajectory(OWN[name]([own]), own)
    optimizer = in_few_bits(name, other, min_size=1)
    got = trajectory(optimizer, other)
    off = float((got - expected).norm() / (expected - weights()).norm().detach())
    assert 1e-4 < off < (0.08 if name == "Lion" else 0.03)
    states = [v for v in optimizer.state[other].values() if isinstance(v, Tensor) and v.shape == other.shape]
    assert len(states) == (2 if name in ("Adam", "AdamW", "LAMB") else 1)
    assert all(s.dtype is torch.uint8 and s.element_size() == 1 for s in states)
    assert state_bytes(optimizer, [other]) == (6400 * len(states), 6400 * len(states))


def codes(signed: bool) -> Tensor:
    """The paper's dynamic tree: a power of ten, and as many bits for an even division of [0.1, 1] as are left."""
    found = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent if signed else exponent + 1) + 1, dtype=torch.float64)
        values = 10.0 ** (exponent - 6) * (bounds[1:] + bounds[:-1]) / 2
        found += values.tolist() + ((-values).tolist() if signed else [])
    assert len(found) == 256
    return torch.tensor(sorted(found)).float()


def blockwise(x: Tensor, signed: bool) -> Tensor:
    """``x`` as it is read back: each block of 256 divided by its largest entry, each entry the nearest code."""
    code, blocks = codes(signed), F.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
    largest = blocks.abs().amax(1, keepdim=True)
    at = (blocks / largest.clamp(min=1e-30)).unsqueeze(-1).sub(code).abs().argmin(-1)
    return (code[at] * largest).flatten()[: x.numel()].view_as(x)


def test_it_is_the_papers_blockwise_adam() -> None:
    """Adam, whose moments pass through the paper's quantisation after every step, against bitsandbytes' as it is put in."""
    p = weights()
    got = trajectory(in_few_bits("AdamW", p, min_size=1), p)
    w, m, v = weights().detach().clone(), torch.zeros(64, 100), torch.zeros(64, 100)
    lr, b1, b2, eps, decay = 1e-2, 0.8, 0.95, 1e-8, 0.1
    g = torch.Generator().manual_seed(1)
    for t in range(1, 21):
        gradient = torch.randn(w.shape, generator=g) + 0.3
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        w = w * (1 - lr * decay) - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        m, v = blockwise(m, signed=True), blockwise(v, signed=False)
    plain = weights()
    exact = trajectory(OWN["AdamW"]([plain]), plain)
    quantized, off = (w - exact).norm(), (got - w).norm()
    # 0.14: entries half way between two codes fall to either; two quantisations that had nothing in common would be 1.4 apart
    assert float(off / quantized) < 0.25, "what differs from 32 bits is the paper's quantisation"


def test_what_is_read_back_is_the_nearest_of_the_papers_codes() -> None:
    x = torch.randn(6400, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(torch.zeros(64, 100))
    optimizer = in_few_bits("SGD", p, min_size=1)
    p.grad = x.view(64, 100)
    optimizer.step()  # the first momentum is the gradient
    state = optimizer.state[p]
    read = (state["qmap1"][state["state1"].int().flatten()].view(-1, 256) * state["absmax1"][:, None]).flatten()
    # on the boundary of two codes, which bitsandbytes rounds, either is as near
    torch.testing.assert_close((read - x).abs(), (blockwise(x, signed=True) - x).abs(), rtol=1e-4, atol=1e-4)


# -- in an unchanged module


class Grouped(pl.LightningModule):
    """Four groups of rates and decays of their own, a list of functions over them, and a tied head."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.net, self.make = TinyGPT(), make
        self.net.head.weight = self.net.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.net.named_parameters() if "blocks" not in n]
        blocks: Any = self.net.blocks
        groups = [
            {"params": list(blocks[i].parameters()), "lr": 1e-3 * (i + 1), "weight_decay": 0.1 * i} for i in range(3)
        ]
        groups.append({"params": [*blocks[3].parameters(), *rest]})
        optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.5)
        make = self.make or (lambda o: schedulers.LambdaLR(o, [lambda s, k=k: 0.9 ** (s * k) for k in range(4)]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step"}}


class Rates(pl.Callback):
    """What is logged of rates and betas by group."""

    def __init__(self) -> None:
        self.seen: list[dict[int, tuple[float, Any, float]]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        by_tensor = {
            id(p): (float(g["lr"]), g["betas"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]
        }
        self.seen.append({i: by_tensor[id(p)] for i, p in enumerate(pl_module.parameters())})


@pytest.mark.parametrize(
    "make", [None, lambda o: schedulers.OneCycleLR(o, [0.01, 0.02, 0.03, 0.04], total_steps=20, base_momentum=0.7)]
)
def test_groups_rates_decays_and_schedules_are_kept(make: Any) -> None:
    """Tensor by tensor, in every step: what a plain run's optimizer has."""
    told = []
    for techniques in ([], [EightBitOptimizer(min_size=256)]):
        rates = Rates()
        trainer(*techniques, rates, max_steps=6).fit(Grouped(make), loader("tiny_gpt"))
        told.append(rates.seen)
    for plain, ours in zip(*told, strict=True):
        for tensor, (rate, betas, decay) in plain.items():
            assert ours[tensor] == (pytest.approx(rate), pytest.approx(betas), decay)
    assert len({rate for rate, _, _ in told[0][3].values()}) == 4


def test_tables_stay_in_32_bits_and_the_rest_takes_a_byte() -> None:
    technique, net = EightBitOptimizer(min_size=256), Grouped()
    t = trainer(technique, max_steps=3)
    t.fit(net, loader("tiny_gpt"))
    (optimizer,) = t.optimizers
    assert isinstance(optimizer, CombinedOptimizer) and [type(p).__name__ for p in optimizer.parts] == [
        "AdamW",
        "AdamW8bit",
    ]
    elements = 0
    for name, p in net.named_parameters():
        states = [s for s in optimizer.state[p].values() if isinstance(s, Tensor) and s.shape == p.shape]
        small = p.numel() >= 256 and "embed" not in name and "position" not in name
        assert len(states) == 2 and {s.dtype for s in states} == {torch.uint8 if small else torch.float32}, name
        elements += 2 * p.numel() * small
    assert technique.report() == {"state_bytes": elements, "saved_bytes": 3 * elements}
    assert technique.summary().startswith("AdamW8bit: states take ")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_it_trains_as_32_bits_do(name: str) -> None:
    ends = []
    for techniques in ([], [EightBitOptimizer(min_size=256)]):
        pl.seed_everything(1, verbose=False)
        net = hugging_face(name)
        start = flat(net)
        trainer(*techniques, max_steps=12, gradient_clip_val=1.0).fit(net, loader(name))
        ends.append(flat(net) - start)
    assert 0 < float((ends[1] - ends[0]).norm() / ends[0].norm()) < 0.25


def test_beside_a_schedule_and_a_monitor_of_rates(tmp_path: Path) -> None:
    rates = Rates()
    watch = LearningRateMonitor("step", log_momentum=True)
    t = trainer(
        EightBitOptimizer(min_size=256), LearningRateSchedule(), rates, watch, logger=CSVLogger(tmp_path), max_steps=4
    )
    t.fit(Grouped(), loader("tiny_gpt"))
    assert [max(r for r, _, _ in seen.values()) for seen in rates.seen] == pytest.approx([0.05, 0.0375, 0.025, 0.0125])


class Two(TinyGPT):
    """Two optimizers, stepped by hand, one under a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        assert self.blocks is not None
        first = torch.optim.AdamW(self.blocks.parameters(), 1e-3)
        second = torch.optim.SGD(self.head.parameters(), 1e-2, momentum=0.9)
        return [first, second], [schedulers.ExponentialLR(second, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        optimizers: Any = self.optimizers()
        loss = F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()


def test_several_optimizers_by_hand_are_each_replaced() -> None:
    net = Two()
    t = trainer(EightBitOptimizer(min_size=64), max_steps=8)
    t.fit(net, loader("tiny_gpt"))
    assert [[type(p).__name__ for p in o.parts] for o in t.optimizers] == [["AdamW", "AdamW8bit"], ["SGD8bit"]]  # pyright: ignore[reportAttributeAccessIssue]
    assert t.optimizers[1].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**4)
    assert flat(net).isfinite().all()


def test_a_resumed_run_under_a_schedule_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Codes, scales and the schedule's place, with what autocast and clipping add."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(**kwargs: Any) -> dict[str, Any]:
        pl.seed_everything(1, verbose=False)
        net, save = Grouped(), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        t = trainer(
            EightBitOptimizer(min_size=256), save, max_steps=8, gradient_clip_val=0.5, enable_checkpointing=True
        )
        t.fit(net, loader("tiny_gpt"), **kwargs)
        return final_state(net, t)

    whole = run()
    path = checkpoints(tmp_path)[3]
    assert torch.load(path, weights_only=True)["callbacks"]["EightBitOptimizer"] == {"bits": 8}
    assert differences(whole, run(ckpt_path=path)) == []


def test_a_plain_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    fit("tiny_gpt", list, directory=tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="the checkpoint was saved without it"):
        fit("tiny_gpt", lambda: [EightBitOptimizer(min_size=64)], resume=checkpoints(tmp_path)[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_bits_by_torchao() -> None:
    """Half a byte an element; torchao compiles its step."""
    pytest.importorskip("torchao")
    pl.seed_everything(1, verbose=False)
    ends = []
    for techniques in ([], [EightBitOptimizer(bits=4)]):
        pl.seed_everything(1, verbose=False)
        net = TinyGPT(num_layers=2, dim=64, dropout=0.0)
        start = flat(net)
        trainer(*techniques, max_steps=6).fit(net, loader("tiny_gpt"))
        ends.append(flat(net) - start)
        for technique in techniques:
            told = technique.report()
            # a state of n elements: n / 2 bytes, where 32 bits take 4 n
            assert told["state_bytes"] * 7 == told["saved_bytes"] > 0
    assert float((ends[1] - ends[0]).norm() / ends[0].norm()) < 0.5


def test_states_of_four_bits_are_saved_as_plain_tensors(tmp_path: Path) -> None:
    """Lightning loads a checkpoint with a function as ``map_location``, and with ``weights_only=True``."""
    pytest.importorskip("torchao")

    def made() -> Any:
        own = torch.optim.AdamW([nn.Parameter(torch.zeros(64, 128))], 1e-3)
        return four_bit(equivalent_of(own, 4), own.param_groups)

    optimizer, other = made(), made()
    (p,) = optimizer.param_groups[0]["params"]
    values = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    state = {
        "step": torch.tensor(3.0),
        "exp_avg": optimizer._new_buffer(p, True),
        "exp_avg_sq": optimizer._new_buffer(p, False),
    }
    state["exp_avg"].copy_(values)
    state["exp_avg_sq"].copy_(values.square())
    optimizer.state[p] = state
    torch.save(optimizer.state_dict(), tmp_path / "saved")
    loaded = torch.load(tmp_path / "saved", map_location=lambda storage, location: storage, weights_only=True)
    other.load_state_dict(loaded)
    (again,) = other.state.values()
    assert float(again["step"]) == 3.0
    for name in ("exp_avg", "exp_avg_sq"):
        assert type(again[name]) is type(state[name])
        assert float(state[name].dequantize().abs().max()) > 1.0
        for part in ("codes", "scale", "qmap"):
            assert torch.equal(getattr(again[name], part), getattr(state[name], part))


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "EightBitOptimizer", {"bits": 8, "min_size": 64}, max_steps=3)
    assert "SGD8bit: states take" in capsys.readouterr().out


# -- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: torch.optim.Adam(p, 1e-3, weight_decay=0.1),
            r"Adam has weight_decay=0.1 within the gradient.*use AdamW",
        ),
        (lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True), "AdamW has amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, 1e-3, maximize=True), "maximize=True"),
        (lambda p: torch.optim.SGD(p, 1e-3), "momentum=0, which keeps no state"),
        (lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, nesterov=True), "nesterov=True"),
        (lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (lambda p: torch.optim.RMSprop(p, 1e-3, centered=True), "centered=True"),
        (lambda p: torch.optim.Adagrad(p, 1e-3, lr_decay=0.1), "lr_decay=0.1"),
        (
            lambda p: torch.optim.NAdam(p, 1e-3),
            r"NAdam has no 8-bit equivalent\. Use torch.optim.Adam, torch",
        ),
    ],
)
def test_what_has_no_equivalent_is_refused_with_what_has(make: Any, message: str) -> None:
    net: Any = module("classifier")
    net.configure_optimizers = lambda: make(net.parameters())
    with pytest.raises(ValueError, match=message) as raised:
        trainer(EightBitOptimizer(min_size=1), max_steps=2).fit(net, loader("classifier"))
    assert "lightning_eff.LAMB" in str(raised.value)


def test_bad_arguments_and_lacking_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        ({"bits": 16}, r"bits=16\): expected 8, 4 or 32"),
        ({"min_size": 0}, "min_size=0"),
        ({"bits": 4, "min_size": 10}, "torchao keeps 32 bits below 4096 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            EightBitOptimizer(**arguments)
    with pytest.raises(ValueError, match="cannot train together: both replace the module's optimizer"):
        trainer(EightBitOptimizer(), ReplaceOptimizer(Lion), max_steps=1).fit(module("tiny_gpt"), loader("tiny_gpt"))
    for name in ("bitsandbytes", "bitsandbytes.optim", "torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, None)
    for bits, package in ((8, "bitsandbytes"), (4, "torchao")):
        technique: Any = EightBitOptimizer(bits=bits)  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            ImportError, match=rf"bits={bits}\): cannot import {package} .*pip install .*\[{package}\]'"
        ):
            trainer(technique, max_steps=1).fit(module("tiny_gpt"), loader("tiny_gpt"))
