"""Lookahead against a loop written by hand: slow weights every k steps, resumed between them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff._core.session import Session
from lightning_eff.optim.averaging.lookahead import Lookahead, slow_step
from tests.cases import Case
from tests.core.nop import Nop
from tests.models import TinyClassifier, loader, module, trainer
from tests.optim.watch import State, Watch, differing, state_of
from tests.runs import checkpoints, fit, resume_from_batches

CASES = {
    "Lookahead": Case(
        active=lambda: Lookahead(interval=5, alpha=0.5),
        neutral=lambda: Lookahead(alpha=1.0),
        anywhere=True,
    )
}


def test_the_slow_weights_go_a_share_of_the_way() -> None:
    slow, fast = torch.randn(50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    torch.testing.assert_close(slow_step(slow, fast, alpha=0.3), 0.7 * slow + 0.3 * fast, rtol=1e-14, atol=1e-14)
    assert torch.equal(slow_step(slow, fast, alpha=1.0), fast)


def by_hand(net: Any, batches: list[Any], *, k: int, alpha: float, accumulate: int = 1) -> tuple[State, State]:
    """Train without Lightning; the slow weights if they went at the end, and the fast ones."""
    net.train()
    net.log = lambda *args, **kwargs: None
    optimizer: Any = net.configure_optimizers()
    params = dict(net.named_parameters())
    slow = {name: p.detach().clone() for name, p in params.items()}
    step = 0
    for i, batch in enumerate(batches):
        (net.training_step(batch, i) / accumulate).backward()
        if (i + 1) % accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % k == 0:
            with torch.no_grad():
                for name, p in params.items():
                    slow[name] = slow[name] + alpha * (p - slow[name])
                    p.copy_(slow[name])
    shown = {name: slow[name] + alpha * (p.detach() - slow[name]) for name, p in params.items()}
    del net.log
    return shown, {name: p.detach().clone() for name, p in params.items()}


@pytest.mark.parametrize(("samples", "accumulate"), [(40, 1), (48, 1), (48, 2)])
@pytest.mark.parametrize("name", ["classifier", "tiny_gpt"])
def test_equals_the_loop_by_hand(name: str, samples: int, accumulate: int) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(module(name))
        nets[-1].configure_optimizers = lambda net=nets[-1]: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, reference = nets
    technique, watch = Lookahead(interval=5, alpha=0.4), Watch()
    batches = loader(name, samples, shuffle=False)
    for each in (*net.modules(), *reference.modules()):
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    trainer(technique, watch, max_epochs=1, accumulate_grad_batches=accumulate).fit(net, batches)
    shown, fast = by_hand(reference, list(batches), k=5, alpha=0.4, accumulate=accumulate)
    state, steps = state_of(net), samples // 4 // accumulate
    for key, value in shown.items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(watch.raw[steps][key], fast[key], rtol=1e-5, atol=1e-6)
    assert technique.report() == {"slow_steps": steps // 5}
    assert (differing(state, watch.raw[steps]) == []) == (steps % 5 == 0), (
        "in step with the slow ones, they are the same"
    )


def test_validation_and_checkpoints_see_slow_weights(tmp_path: Path) -> None:
    watch = Watch()
    fit(
        "classifier",
        lambda: [Lookahead(interval=4)],
        callbacks=[watch],
        directory=tmp_path,
        limit_val_batches=1,
        val_check_interval=3,
    )
    for step, (state, _) in watch.validated.items():
        saved = torch.load(checkpoints(tmp_path)[step - 1], weights_only=True)
        parameters = {name: value for name, value in state.items() if "norm." not in name}
        assert differing(saved["state_dict"], parameters) == []
        assert (differing(watch.raw[step], parameters) == []) == (step % 4 == 0)
        assert differing(watch.raw[step], saved["callbacks"]["Lookahead"]["raw"]) == []
    assert sorted(watch.validated) == [3, 8]


def test_buffers_are_those_of_the_trained_network() -> None:
    net, watch = TinyClassifier(), Watch()
    trainer(Lookahead(interval=5), watch, max_steps=7).fit(net, loader("classifier"))
    assert differing(state_of(net), {k: v for k, v in watch.raw[7].items() if "running" in k}) == []


def test_another_network_starts_its_own_slow_weights() -> None:
    class Grows(Nop):
        def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
            if session.trainer.global_step == 4:
                session.blocks_changed(self)

    watch = Watch()
    fit("tiny_gpt", lambda: [Grows(), Lookahead(interval=3, alpha=0.5)], callbacks=[watch], max_steps=7)
    plain = Watch()
    fit("tiny_gpt", lambda: [Lookahead(interval=3, alpha=0.5)], callbacks=[plain], max_steps=7)
    assert differing(watch.raw[5], plain.raw[5]) == []
    assert differing(watch.raw[6], plain.raw[6]) != [], "the slow weights go after step 7, from those of step 4 on"
    fast, slow = watch.raw[7], plain.raw[4]
    assert [name for name in fast if name.startswith("blocks") and torch.equal(fast[name], slow[name])] == []


def test_weights_that_are_thawed_later_start_where_they_are() -> None:
    class Thaws(TinyClassifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.head.requires_grad_(self.global_step >= 2)

    net = Thaws()
    net.head.requires_grad_(False)
    before = net.get_parameter("head.1.weight").detach().clone()
    technique = Lookahead(interval=4)
    trainer(technique, max_steps=4).fit(net, loader("classifier"))
    assert torch.equal(technique.saved()["held"]["head.1.weight"], net.get_parameter("head.1.weight"))
    assert not torch.equal(net.get_parameter("head.1.weight"), before)


def test_resumes_within_windows_between_its_steps(tmp_path: Path) -> None:
    assert resume_from_batches("classifier", lambda: [Lookahead(interval=2)], tmp_path, None) == {}


def test_a_run_that_is_too_short_is_told() -> None:
    technique = Lookahead(interval=13, alpha=0.25)
    with pytest.warns(
        UserWarning, match=r"Lookahead: the run ends after 12 steps, and .* every 13 steps, .* 25% of the way"
    ):
        fit("tiny_gpt", lambda: [technique])
    assert technique.report() == {"slow_steps": 0}
    technique = Lookahead(interval=12)
    fit("tiny_gpt", lambda: [technique])
    assert technique.report() == {"slow_steps": 1}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"interval": 0}, r"Lookahead\(interval=0\): expected an integer >= 1: the number of optimizer steps"),
        ({"interval": 2.5}, r"Lookahead\(interval=2.5\): expected an integer"),
        ({"alpha": 0.0}, r"Lookahead\(alpha=0.0\): expected a number in \(0, 1\]"),
        ({"alpha": 1.1}, r"Lookahead\(alpha=1.1\): expected a number in \(0, 1\]"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lookahead(**kwargs)


def test_16_bit_weights_have_slow_ones_of_32() -> None:
    class Half(TinyClassifier):
        def __init__(self) -> None:
            super().__init__(batch_norm=False)
            self.to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.bfloat16())

    technique = Lookahead(interval=2)
    trainer(technique, max_steps=4).fit(Half(), loader("classifier"))
    assert {value.dtype for value in technique.saved()["held"].values()} == {torch.float32}
