"""How much Python runs where thousands of modules are changed, and in each step. Calls are counted, and no time is taken."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff as eff
from lightning_eff._core.progress import Progress


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Other tests of this process may have compiled code, with which labels are followed by a mode: more calls per step."""
    torch._dynamo.utils.counters.clear()


def pairs(count: int) -> nn.Module:
    return nn.ModuleList(nn.ModuleDict({"q": nn.Linear(4, 4), "v": nn.Linear(4, 4)}) for _ in range(count))


def visited(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many modules all walks over a tree visit, how many states of generators are read, and how many devices entered."""
    found: Counter[str] = Counter()
    walk, state, device = nn.Module.named_modules, np.random.get_state, torch.overrides._push_mode

    def walking(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for one in walk(self, *args, **kwargs):
            found["modules"] += not args  # those of the walk that the caller began, once
            yield one

    def reading(*args: Any, **kwargs: Any) -> Any:
        found["states"] += 1
        return state(*args, **kwargs)

    def entering(*args: Any, **kwargs: Any) -> Any:
        found["modes"] += 1
        return device(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "named_modules", walking)
        patch.setattr(np.random, "get_state", reading)
        patch.setattr(torch.overrides, "_push_mode", entering)
        act()
    return found


def test_thousands_of_layers_are_replaced_in_a_few_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    eff.apply(pairs(2), eff.LoRA(rank=2, target_modules=["q", "v"]))
    few, many = (
        visited(lambda count=count: eff.apply(pairs(count), eff.LoRA(rank=2, target_modules=["q", "v"])), monkeypatch)
        for count in (50, 200)
    )
    assert few["states"] == many["states"] <= 2, "the global generators are saved once, and not for each layer"
    assert few["modes"] == many["modes"] == 0, "a device context would slow each call of torch"
    per_layer = (many["modules"] - few["modules"]) / (400 - 100)
    assert per_layer <= 80, "the cost of a layer does not grow with their number"
    assert many["modules"] <= 4.2 * few["modules"]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallCounter(Callback):
    """Counts calls of functions of this package and by it, from the end of the tenth step to that of the thirtieth."""

    def __init__(self) -> None:
        self.steps, self.calls = 0, Counter[str]()

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        if self.steps in (10, 30):
            sys.setprofile(self._see if self.steps == 10 else None)

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        by = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if "lightning_eff" in frame.f_code.co_filename or "lightning_eff" in by:
            self.calls[frame.f_code.co_name] += 1


def per_step(*techniques: Any) -> Counter[str]:
    """How often each function is called in a step by this package, or in it."""
    counter = CallCounter()
    data = TensorDataset(torch.randn(256, 8), torch.randint(0, 3, (256,)))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=31, accelerator="cpu", enable_model_summary=False, callbacks=[*techniques, counter], **quiet
    )
    trainer.fit(Net(), DataLoader(data, batch_size=4))
    return Counter({name: count // 20 for name, count in counter.calls.items()})


def test_a_light_technique_calls_few_functions_in_a_step() -> None:
    assert per_step().total() == 0
    calls = per_step(eff.LearningRateSchedule("cosine"))
    assert calls.total() <= 126, calls.most_common()
    assert calls["is_a"] == 0, "callbacks are looked through only when they are others"


def test_mixing_calls_few_functions_in_a_step() -> None:
    calls = per_step(eff.Mixup())
    assert calls["inputs"] == 0, "what to mix is found once for each layout of batches"
    assert calls["bind"] == 0
    assert calls.total() <= 390, calls.most_common()


def test_clocks_and_timers_follow_the_callbacks() -> None:
    """As Lightning's tuners replace them for their trials."""
    trainer = pl.Trainer(max_steps=10, logger=False, enable_checkpointing=False, accelerator="cpu")
    progress = Progress(trainer)
    assert progress.limits() == {"max_steps": 10}
    own: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    timer = pl.callbacks.Timer(duration={"seconds": 5})
    own.append(timer)
    assert progress.limits()["max_time"] == 5
    own[own.index(timer)] = Callback()
    assert "max_time" not in progress.limits()
