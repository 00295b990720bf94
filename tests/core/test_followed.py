"""Labels are followed by their class after the first step. Their calls give what a mode gives, and no other call is seen."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lightning_eff as eff
from lightning_eff._core._targets import followed, window
from lightning_eff._core._targets.calls import mixed
from lightning_eff._core._targets.passing import Window
from lightning_eff._core.losses import LossNotVisible
from tests.core.test_targets import STEPS, B, C, D, OtherTargets, Probe, T, classes, draw, one_step


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Other tests of this process may have compiled code, with which labels are followed by a mode."""
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each pass that is changed follows by class, in order."""
    found: list[bool] = []
    enter = Window.__enter__

    def entering(self: Window) -> Window:
        found.append(self.follower.by_class)
        return enter(self)

    monkeypatch.setattr(Window, "__enter__", entering)
    return found


def by_mode(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(window, "can_follow", lambda tensors: False)
        return act()


@pytest.mark.parametrize("name", STEPS)
def test_later_steps_are_those_of_a_mode(name: str, seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = draw(B, T, D), classes(B, T, ignore=0.0 if name in ("loop", "copied") else 0.3)
    weights = torch.linspace(0, 1, B)

    def run() -> Probe:
        return one_step(STEPS[name], batch, OtherTargets(mixed(weights, 1 - weights)), steps=3)

    got = run()
    assert seen[-2:] == [True, True]
    expected = by_mode(monkeypatch, run)
    assert seen[-2:] == [False, False]
    assert got.losses == expected.losses
    assert all(torch.equal(g, expected.gradient[key]) for key, g in got.gradient.items())


def test_two_changes_wrap_each_other_as_modes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = draw(B, D), classes(B)

    def run() -> Probe:
        torch.manual_seed(1)
        both = [OtherTargets(), eff.LabelSmoothing(0.2)]
        return one_step(lambda z, b, m: F.cross_entropy(z, b[1]), batch, *both, steps=3)

    got = run()
    assert got.losses == by_mode(monkeypatch, run).losses
    plain = [one_step(lambda z, b, m, y=y: F.cross_entropy(z, y, label_smoothing=0.2), batch) for y in
             (batch[1], batch[1].flip(0))]  # fmt: skip
    assert got.losses[-1] == pytest.approx(0.7 * plain[0].losses[0] + 0.3 * plain[1].losses[0], rel=1e-6)


def test_only_calls_on_labels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    by_class, by_mode = list[str](), list[str]()
    on_call, function = Window.on_call, Window.__torch_function__

    def called(self: Window, func: Any, args: Any, kwargs: Any) -> Any:
        if self.follower.by_class:
            by_class.append(func.__name__)
        return on_call(self, func, args, kwargs)

    def seen(self: Window, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mode.append(func.__name__)
        return function(self, func, types, args, kwargs)

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        for _ in range(50):
            z = z.relu() + z
        counts.append(len(by_mode))
        return F.cross_entropy(z, b[1])

    counts: list[int] = []
    monkeypatch.setattr(Window, "on_call", called)
    monkeypatch.setattr(Window, "__torch_function__", seen)
    one_step(step, (draw(B, D), classes(B)), OtherTargets(), steps=4)
    assert counts[0] > 100 and counts[1] - counts[0] > 100, "the first pass and the first step are seen by a mode"
    assert len(by_mode) - counts[2] == 0 == counts[-1] - counts[2], "later steps have no call that is seen"
    assert by_class == ["cross_entropy"] * 3, "but those on labels"


def test_labels_have_their_own_class_after_the_step_and_in_copies() -> None:
    x, y = draw(B, D), classes(B)
    within, copies = list[type](), list[Any]()

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        within.append(type(b[1]))
        held = io.BytesIO()
        torch.save(b[1], held)
        held.seek(0)
        copies.extend((torch.load(held, weights_only=True), copy.deepcopy(b[1]), copy.copy(b[1])))
        assert repr(b[1]) == repr(copies[-1]) and f"{b[1]}" == f"{copies[-1]}"
        kept.append(b[1].view(-1))
        if len(within) == fails_at:
            raise RuntimeError("in the middle of a step")
        return F.cross_entropy(z, b[1].view(-1))

    kept: list[Tensor] = []
    for fails_at in (0, 4):
        within.clear()
        if fails_at:
            with pytest.raises(RuntimeError, match="in the middle"):
                one_step(step, (x, y), OtherTargets(), steps=5)
        else:
            one_step(step, (x, y), OtherTargets(), steps=3)
        assert within[-1] is followed.Followed and within[0] is Tensor
        assert {type(t) for t in (y, *copies, *kept)} == {Tensor}
        assert not followed._ACTIVE and not followed._HOLDERS


def test_a_mode_that_is_entered_before_sees_its_calls_in_the_same_order(seen: list[bool]) -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    batch = draw(B, D), classes(B)
    with Doubles():
        one_step(lambda z, b, m: F.cross_entropy(z, b[1]), batch, OtherTargets(), steps=3)
    assert not any(seen)
    one_step(lambda z, b, m: F.cross_entropy(z, b[1]), batch, OtherTargets(), steps=3)
    assert seen[-1]


class Foreign(Tensor):
    """Handles its own calls, as a user's class may."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, [cls for _ in types], args, kwargs or {})


def test_a_process_with_compiled_code_keeps_the_mode(seen: list[bool]) -> None:
    torch._dynamo.utils.counters["frames"]["total"] += 1
    one_step(lambda z, b, m: F.cross_entropy(z, b[1]), (draw(B, D), classes(B)), OtherTargets(), steps=3)
    torch._dynamo.utils.counters.clear()
    assert seen and not any(seen)


def test_outputs_that_handle_torch_calls_are_seen_by_a_mode(seen: list[bool]) -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        return F.cross_entropy(z.as_subclass(Foreign), b[1]).as_subclass(Tensor)

    batch = draw(B, D), classes(B)
    got = one_step(step, batch, OtherTargets(), steps=3)
    assert not any(seen)
    plain = one_step(step, batch), one_step(step, (batch[0], batch[1].flip(0)))
    assert got.losses[-1] == pytest.approx(0.7 * plain[0].losses[0] + 0.3 * plain[1].losses[0], rel=1e-6)


def test_a_later_step_without_a_call_on_labels_is_refused() -> None:
    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        y = b[1] if len(m.losses) < 2 else torch.zeros(B, dtype=torch.long)
        return F.cross_entropy(z, y)

    with pytest.raises(LossNotVisible, match=r"\(none was called on labels\)"):
        one_step(step, (draw(B, D), classes(B)), OtherTargets(), steps=5)


def test_labels_as_a_mask_an_index_and_a_number() -> None:
    """Calls that do not become targets give plain tensors, as without techniques."""
    made: list[Any] = []

    def step(z: Tensor, b: Any, m: Probe) -> Tensor:
        y = b[1]
        made.extend(
            (z[y > 1], z[y], y.tolist(), y.numpy(), int(y[0]), y.sum(), [*y], y.new_zeros(2), torch.where(y > 0, y, 0))
        )
        return F.cross_entropy(z, y)

    y = classes(B)
    one_step(step, (draw(B, D), y), OtherTargets(), steps=3)
    rows, indexed, listed, array, number, total, items, zeros, where = made[-9:]
    assert rows.shape == (int((y > 1).sum()), C) and indexed.shape == (B, C)
    assert listed == y.tolist() == array.tolist() and number == y[0] and total == y.sum()
    assert {type(t) for t in (rows, indexed, total, zeros, where, *items)} == {Tensor}
