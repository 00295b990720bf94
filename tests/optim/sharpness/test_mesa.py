"""MESA against a loop written by hand: a teacher that is a moving average, its one pass a step, and what it leaves alone."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from lightning_eff import MESA, EfficientSAM, LayerFreezing, ShallowToDeep, SharpnessAwareMinimization
from lightning_eff._core._targets.window import Targets
from lightning_eff._core.session import Session
from lightning_eff.optim.sharpness.mesa import follow
from tests.cases import Case, own_loss
from tests.core.nop import Nop
from tests.models import Samples, TinyClassifier, TinyGPT, flat, loader, make_batch, module, trainer
from tests.runs import differences, final_state, fit, fit_yaml

CASES = {
    "MESA": Case(
        active=lambda: MESA(weight=1.0, decay=0.8, start=0.0),
        neutral=lambda: MESA(weight=0.0),
        lost=(own_loss, "classifier", "MESA: no loss call of training_step was seen"),
    )
}


def test_the_teacher_is_the_closed_form_sum() -> None:
    """``v_n = beta^n w_0 + (1 - beta) sum_i beta^(n - i) w_i``."""
    path = torch.randn(9, 5, dtype=torch.float64)
    teacher = [path[0].clone()]
    for w in path[1:]:
        follow(teacher, [w], beta=0.7)
    n = len(path) - 1
    expected = 0.7**n * path[0] + 0.3 * sum(0.7 ** (n - i) * path[i] for i in range(1, n + 1))
    torch.testing.assert_close(teacher[0], expected, rtol=1e-12, atol=1e-14)


class Watched(TinyClassifier):
    """BatchNorm, and dropout before it, so that both passes of a step would show what they did with either."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.drop(self.blocks(x))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class SeedsEach(pl.Callback):
    """Each step draws its dropout from a stream of its own, which a loop by hand can repeat."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(100 + trainer.global_step)


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_equals_the_loop_by_hand(start: float) -> None:
    """With dropout and batch statistics: the teacher has no dropout, the batch's statistics, and no buffers of its own."""
    torch.manual_seed(4)
    net = Watched()
    reference = copy.deepcopy(net)
    batches = loader("classifier", 40, shuffle=False)
    technique = MESA(weight=2.0, temperature=2.0, decay=0.6, start=start)
    trainer(SeedsEach(), technique, max_epochs=1).fit(net, batches)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.3)
    teacher = copy.deepcopy(reference)
    teacher.drop.eval()
    for step, (x, y) in enumerate(batches):
        torch.manual_seed(100 + step)
        with torch.no_grad():
            q = (teacher(x) / 2).softmax(-1)
        z = reference(x)
        loss = F.cross_entropy(z, y)
        kl = F.kl_div((z / 2).log_softmax(-1), q, reduction="batchmean")
        optimizer.zero_grad()
        (loss + 2.0 * kl * (step / 10 >= start)).backward()
        optimizer.step()
        with torch.no_grad():
            for v, w in zip(teacher.parameters(), reference.parameters(), strict=True):
                v.copy_(0.6 * v + 0.4 * w)
    for (name, got), expected in zip(net.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert float(technique.report()["divergence"]) == pytest.approx(kl.item(), rel=1e-3)
    for name, v in teacher.named_parameters():
        followed = technique._teacher[name].clone()
        follow(
            [followed], [net.get_parameter(name).detach()], beta=0.6
        )  # the last step's, which no further one has asked for
        torch.testing.assert_close(followed, v.detach(), rtol=1e-4, atol=1e-5)


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    """Equal scores, and so a loss and a gradient of zero: to the bit, plain training."""
    ends = []
    for technique in (MESA(weight=5.0, decay=0.0, start=0.0), Nop()):
        torch.manual_seed(4)
        net = TinyGPT(num_layers=2, dropout=0.0)
        trainer(technique, max_steps=8).fit(net, loader("tiny_gpt", shuffle=False))
        ends.append(flat(net))
    assert torch.equal(ends[0], ends[1])


class Counts(TinyClassifier):
    """Counts passes, and in which of them it had gradients and logged."""

    def __init__(self) -> None:
        super().__init__()
        self._passes: list[bool] = []
        self.seen_here = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._passes.append(torch.is_grad_enabled())
        self.seen_here += 1
        return super().training_step(batch, batch_idx)


def test_one_pass_a_step_is_run_and_counted() -> None:
    net, technique = Counts(), MESA(start=0.5, decay=0.9)
    trainer(technique, max_steps=10).fit(net, loader("classifier"))
    # a look for the labels, five plain steps, and five with the teacher's pass before
    assert net._passes == [False] + [True] * 5 + [False, True] * 5
    assert net.seen_here == 10, "attributes of the module are as if the teacher's pass had not been"
    session = technique._past
    assert session is not None
    cost = session.chain.cost
    assert (cost.forward_passes, cost.forward_samples, cost.backward_passes) == (6, 24, 0)


@pytest.mark.parametrize(
    ("other", "passes"),
    [(lambda: SharpnessAwareMinimization(rho=0.1), 1), (lambda: EfficientSAM(rho=0.1, beta=1.0, gamma=0.5), 2)],
    ids=["one batch", "two batches"],
)
def test_a_second_pass_has_the_teacher_of_its_own_batch(
    other: Callable[[], Any], passes: int, monkeypatch: Any
) -> None:
    """SAM's second pass is on the same batch, ESAM's on some of its samples."""
    sizes: list[int] = []
    seen = Targets.seen

    def counted(self: Any, step: Any, batch: Any) -> Any:
        sizes.append(len(batch[1]))
        return seen(self, step, batch)

    monkeypatch.setattr(Targets, "seen", counted)
    trainer(other(), MESA(weight=1.0, decay=0.8, start=0.0), max_steps=6).fit(
        module("classifier"), loader("classifier")
    )
    assert sizes == [4, 2][:passes] * 6


def test_the_teacher_is_for_training_alone() -> None:
    """Validation sees the trained weights, and so it is that of plain training where the teacher changes nothing."""
    ends = []
    for build in (lambda: MESA(weight=3.0, decay=0.9, start=0.99), Nop):
        net, t = fit("classifier", lambda b=build: [b()], limit_val_batches=2, val_check_interval=3)
        ends.append((final_state(net, t), float(t.callback_metrics["val_loss"])))
    assert differences(ends[0][0], ends[1][0]) == [] and ends[0][1] == ends[1][1]


def test_weights_that_thaw_have_a_teacher_from_then_on() -> None:
    class Thaws(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            pl_module.head.requires_grad_(trainer.global_step >= 3)

    technique = MESA(weight=1.0, decay=0.5, start=0.0)
    names: list[int] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            names.append(len(technique._teacher))

    net = module("classifier")
    trainer(Thaws(), technique, Looks(), max_steps=5).fit(net, loader("classifier"))
    whole = len(list(net.named_parameters()))
    assert names == [whole - 2] * 3 + [whole] * 2


@pytest.mark.parametrize("model", ["gpt2", "vit", "bert", "llama"])
def test_tied_weights_and_hugging_face_models_hold_the_trained_weights_between_steps(model: str) -> None:
    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            self.held = flat(pl_module).clone()

        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
            assert torch.equal(self.held, flat(pl_module)), "after the step's passes, before it moves them"

    technique = MESA(weight=1.0, decay=0.5, start=0.0)
    net, _ = fit(model, lambda: [technique], callbacks=[Looks()], max_steps=3)
    assert float(technique.report()["divergence"]) > 0
    assert len(technique._teacher) == len(list(net.named_parameters()))


def test_scores_of_another_shape_in_evaluation_mode_are_refused() -> None:
    class Shorter(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            kept = slice(None) if self.training else slice(2)
            return F.cross_entropy(self(batch[0])[kept], batch[1][kept])

    with pytest.raises(ValueError, match=r"MESA: an F.cross_entropy .* had scores of shape \(4, 3\), and \(2, 3\)"):
        trainer(MESA(start=0.0), max_steps=2).fit(Shorter(), loader("classifier"))


def test_streams_are_as_good_as_data_sets() -> None:
    class Streams(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            samples = Samples("classifier", 20)
            return (samples[i] for i in range(20))

    technique = MESA(start=0.0, decay=0.9)
    trainer(technique, max_steps=4).fit(module("classifier"), DataLoader(Streams(), 4))
    assert float(technique.report()["divergence"]) > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": float("nan")}, r"MESA\(weight=nan\): expected a finite number >= 0"),
        ({"temperature": -1.0}, r"MESA\(temperature=-1.0\): expected a finite number > 0"),
        ({"decay": 1.0}, r"MESA\(decay=1.0\): expected a number in \[0, 1\)"),
        ({"start": -0.1}, r"MESA\(start=-0.1\): expected a number in \[0, 1\]"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MESA(**kwargs)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_yaml(tmp_path, "MESA", {"weight": 1.0, "start": 0.0}, max_steps=4)
    assert "MESA, lambda 1: the last batch diverged by" in capsys.readouterr().out


def test_another_network_has_another_teacher() -> None:
    """At once, of the weights as they are then, and it has followed no step that was made before."""
    held: list[bool] = []

    class Grows(Nop):
        def on_batch_end(self, session: Session, batch_idx: int) -> None:
            if session.trainer.global_step == 4:
                session.blocks_changed(self)
                named = dict(session.module.named_parameters())
                held.extend(torch.equal(v, named[name]) for name, v in technique._teacher.items())
                held.append(not technique._stepped)

    technique = MESA(weight=1.0, decay=0.8, start=0.0)
    trainer(technique, Grows(), max_steps=5).fit(module("classifier"), loader("classifier"))
    assert len(held) > 4 and all(held)


def test_who_has_a_teacher_once_blocks_have_grown_goes_by_no_order() -> None:
    """What is frozen as the network grows has one in either order, and is its own mean."""
    found = []
    for order in (1, -1):
        technique = MESA(start=0.0, decay=0.5)
        every = [technique, LayerFreezing(start=0.1, end=0.8), ShallowToDeep(group=2, until=0.4)][::order]
        fit("tiny_gpt", partial(list, every))
        found.append(set(technique._teacher))
    assert found[0] == found[1] and len(found[0]) > 10


def test_the_teacher_follows_optimizer_steps_in_single_precision() -> None:
    """Not the micro-batches between them; and of weights in bfloat16 it is finer than they are."""
    path: list[Tensor] = []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2 == 0:
                path.append(pl_module.head.weight.detach().float())

    technique, net = MESA(weight=1.0, decay=0.75, start=1.0 - 1e-9), Watched()
    trainer(technique, Looks(), max_steps=4, accumulate_grad_batches=2, precision="bf16-true").fit(
        net, loader("classifier", 40)
    )
    expected = path[0]
    for w in path[1:]:
        expected = 0.75 * expected + 0.25 * w
    assert len(path) == 4 and not torch.equal(path[0], path[3])
    torch.testing.assert_close(technique._teacher["head.weight"], expected, rtol=1e-6, atol=1e-7)


def test_a_batch_that_comes_again_is_shown_to_the_teacher_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One object, as Lightning hands over what moves itself to the device; the teacher has moved since."""
    shown: list[Any] = []
    seen = Targets.seen
    monkeypatch.setattr(Targets, "seen", lambda self, step, batch: shown.append(batch) or seen(self, step, batch))
    data = DataLoader([BatchEncoding(make_batch("tiny_gpt"))] * 4, batch_size=None, collate_fn=lambda batch: batch)
    trainer(MESA(weight=1.0, decay=0.8, start=0.0), max_steps=4).fit(TinyGPT(num_layers=1), data)
    assert len(shown) == 4 and all(batch is shown[0] for batch in shown)
