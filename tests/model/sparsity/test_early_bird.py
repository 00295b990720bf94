"""EarlyBird: a ticket is drawn once masks agree, and a coefficient of zero is a head that is removed."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff import EarlyBird
from lightning_eff.model.sparsity._masks.units import Units
from lightning_eff.model.sparsity.early_bird import has_emerged, smallest, step_coefficients
from tests.cases import Case, no_map
from tests.families import module as family
from tests.model.sparsity.sparse import fit_on
from tests.models import TinyClassifier, TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

CASES = {
    "EarlyBird": Case(
        active=lambda: EarlyBird(window=2, distance=1.0, interval=2),
        neutral=lambda: EarlyBird(sparsity=0.0),
        lost=(no_map, "classifier", "found no units to prune"),
    )
}


# -- the rules


def drawn_at(masks: list[Tensor], **settings: Any) -> int | None:
    return next((n for n in range(1, len(masks) + 1) if has_emerged(masks[:n], **settings)), None)


def test_masks_that_stay_the_same_are_a_ticket_once_the_queue_is_full() -> None:
    same = [torch.arange(20) % 2 == 0] * 9
    assert [drawn_at(same, window=w, distance=0.1) for w in (2, 5, 8)] == [2, 5, 8]
    # one that moved 10 % is not nearer than 0.1, until it has left the queue
    other = same[0].clone()
    other[:2] = ~other[:2]
    assert drawn_at([other, *same], window=5, distance=0.1) == 6
    assert drawn_at([other, *same], window=5, distance=0.11) == 5
    assert drawn_at([same[0], other] * 9, window=5, distance=0.1) is None


def test_a_coefficient_steps_along_its_gradient_shrinks_and_stays_at_zero() -> None:
    c, g = torch.tensor([1.0, 0.5, 0.005, 0.0, -1.0]), torch.tensor([2.0, -1.0, 0.0, -5.0, 0.0])
    after = step_coefficients(c, g, rate=0.1, penalty=0.1)
    assert after.tolist() == pytest.approx([0.79, 0.59, 0.0, 0.0, -0.99])


def test_heads_are_pruned_by_layers_and_others_over_all_layers() -> None:
    units = [Units("head", ["a"], 1, 4, 2), Units("head", ["b"], 1, 4, 2), Units("neuron", ["c"], 1, 2, 1)]
    units += [Units("neuron", ["d"], 1, 6, 1)]
    scores = [torch.arange(n).float() + 10 * i for i, n in enumerate((4, 4, 2, 6))]
    assert [int(m.sum()) for m in smallest(scores, units, 0.5)] == [2, 2, 0, 4]
    assert [int(m.sum()) for m in smallest(scores, units, 0.99)] == [1, 1, 0, 1]


# -- the run


class Epochs(pl.Callback):
    """By epoch: BatchNorm's scales and shifts."""

    def __init__(self) -> None:
        self.zeros: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.zeros.append(float((pl_module.norm.weight == 0).float().mean()))
        assert not bool((pl_module.norm.bias[pl_module.norm.weight == 0]).any()), "a pruned channel gives zero"


def test_a_fit_draws_at_the_end_of_the_epoch_at_which_masks_agree() -> None:
    torch.manual_seed(0)
    net, epochs, technique = TinyClassifier(lr=1e-4), Epochs(), EarlyBird(window=3)
    with torch.no_grad():
        net.norm.weight.copy_(torch.linspace(0.1, 1.0, 8))  # pyright: ignore[reportArgumentType]
    trainer(technique, epochs, max_epochs=5, max_steps=-1).fit(net, loader("classifier"))
    assert epochs.zeros == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert technique.report() == {"sparsity": 0.5, "kept": 8, "masks": 3, "distance": 0.0, "drawn": 15}
    assert (net.norm.weight != 0).tolist() == [False] * 4 + [True] * 4


@pytest.mark.filterwarnings("ignore:EarlyBird. the run ends after 1 step")
def test_scales_are_drawn_to_zero_by_the_sign_of_their_own() -> None:
    ends: list[Tensor] = []
    for penalty in (0.0, 0.01):
        torch.manual_seed(0)
        net = TinyClassifier(lr=0.1, momentum=0.0)
        trainer(EarlyBird(penalty=penalty), max_steps=1).fit(net, loader("classifier", shuffle=False))
        ends.append(net.norm.weight.detach().clone())  # pyright: ignore[reportArgumentType, reportCallIssue]
    torch.testing.assert_close(ends[0] - ends[1], torch.full((8,), 0.1 * 0.01), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
def test_a_coefficient_of_zero_is_a_head_removed(name: str) -> None:
    """Against the module without the head: nothing reads its values, whatever they are."""
    net: Any = hugging_face(name, 2)
    technique = EarlyBird(window=2, distance=1.0, interval=1)
    counts = fit_on(net, make_batch(name), technique, steps=3)
    heads = [u for u in technique.units if u.kind == "head"]
    neurons = [u for u in technique.units if u.kind == "neuron"]
    assert len(heads) == len(neurons) == 2 and counts.leaks == []
    heads_of = net.model.config.num_attention_heads
    assert all(u.number == heads_of and int(technique.masks[u.names[0]].sum()) * 2 >= u.width for u in heads)
    total = sum(u.number for u in neurons)
    kept = sum(int(u.sums(technique.masks[u.names[0]].float()).bool().sum()) for u in neurons)
    assert kept == round(0.5 * total)
    batch, seen = make_batch(name, seed=3), list[float]()
    net.eval()
    for noise in (0.0, 5.0):
        handles = []
        for u in heads:
            gone = u.sums(technique.masks[u.names[0]].float()) == 0

            def disturb(m: Any, args: Any, u: Units = u, gone: Tensor = gone, noise: float = noise) -> Any:
                return (args[0] + noise * gone.repeat_interleave(u.width), *args[1:])

            handles.append(net.get_submodule(u.names[0].rpartition(".")[0]).register_forward_pre_hook(disturb))
            assert bool(gone.any())
        seen.append(float(net.model(**batch).loss.detach()))
        for handle in handles:
            handle.remove()
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:EarlyBird. the run ends after 1 step")
def test_coefficients_are_those_of_a_network_that_has_them_beside_its_maps() -> None:
    """One step at which the optimizer stands still: ``c`` moves by the gradient of a loss with ``c`` in it."""
    torch.manual_seed(0)
    net = TinyGPT(1, dropout=0.0)
    batch = make_batch("tiny_gpt")
    proj, fc = net.get_submodule("blocks.0.proj"), net.get_submodule("blocks.0.mlp.2")
    c: dict[Any, Tensor] = {proj: torch.ones(2, requires_grad=True), fc: torch.ones(64, requires_grad=True)}

    def scale(m: Any, args: Any) -> Any:
        return (args[0] * c[m].repeat_interleave(args[0].shape[-1] // len(c[m])),)

    handles = [m.register_forward_pre_hook(scale) for m in c]
    net.log = lambda *args, **kwargs: None  # pyright: ignore[reportAttributeAccessIssue]
    grads = torch.autograd.grad(net.training_step(batch, 0), [*c.values()])
    del net.log
    for handle in handles:
        handle.remove()
    before = {m: m.weight.detach().clone() for m in c}
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)
    technique = EarlyBird(rate=0.5, penalty=0.01)
    trainer(technique, max_steps=1).fit(net, DataLoader([batch], batch_size=None))  # pyright: ignore[reportArgumentType]
    for (m, name), g in zip(((proj, "blocks.0.proj.weight"), (fc, "blocks.0.mlp.2.weight")), grads, strict=True):
        expected = 1 - 0.5 * g - 0.5 * 0.01
        torch.testing.assert_close(technique.coefficients[name], expected, rtol=1e-5, atol=1e-6)
        wide = expected.repeat_interleave(m.weight.shape[1] // len(expected))  # pyright: ignore[reportIndexIssue, reportCallIssue]
        torch.testing.assert_close(m.weight.detach(), before[m] * wide, rtol=1e-5, atol=1e-6)  # pyright: ignore[reportCallIssue]


def test_a_resnet_written_by_hand() -> None:
    net: Any = family("resnet")
    technique = EarlyBird(sparsity=0.3, window=2, interval=1, distance=1.0)
    counts = fit_on(net, make_batch("vit"), technique, steps=3)
    assert counts.leaks == [] and {u.kind for u in technique.units} == {"channel"}
    total = sum(u.number for u in technique.units)
    kept = sum(int(technique.masks[u.names[0]].sum()) for u in technique.units)
    assert kept == round(0.7 * total)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, r"EarlyBird\(sparsity=1.0\): expected a number in \[0, 1\): the fraction of units"),
        ({"of": "rows"}, "of='rows'.: expected 'channels'"),
        ({"window": 1}, "window=1.: expected an integer >= 2: the number of masks"),
        ({"distance": 0.0}, r"distance=0.0.: expected a number in \(0, 1\]"),
        ({"interval": 0}, "interval=0.: expected an integer >= 1, or None: the number of optimizer steps"),
        ({"rate": 0.0}, "rate=0.0.: expected a finite number > 0: the learning rate"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyBird(**settings)


@pytest.mark.filterwarnings("ignore:EarlyBird. the run ends after 1 step")
def test_what_has_no_such_units_is_refused() -> None:
    with pytest.raises(ValueError, match=r"EarlyBird\(of='channels'\): TinyGPT has no BatchNorm"):
        trainer(EarlyBird(of="channels"), max_steps=1).fit(TinyGPT(1), loader("tiny_gpt"))
    with pytest.raises(
        ValueError,
        match="found no units to prune in TinyClassifier: no BatchNorm",
    ):
        trainer(EarlyBird(of="heads"), max_steps=1).fit(TinyClassifier(), loader("classifier"))


@pytest.mark.parametrize(
    ("settings", "steps", "every"), [({}, 20, "epoch"), ({"interval": 2, "window": 3}, 5, "2 steps")]
)
def test_a_run_that_is_too_short_is_told(settings: Any, steps: int, every: str) -> None:
    technique = EarlyBird(**settings)
    told = f"EarlyBird: the run ends after {steps} steps, and it draws a mask every {every}, of which"
    with pytest.warns(UserWarning, match=rf"{told} window={technique.window} must agree.* Give a smaller `interval`"):
        trainer(technique, max_steps=steps).fit(TinyClassifier(), loader("classifier"))
    assert technique.report()["drawn"] == 0
    technique = EarlyBird(distance=1e-9, window=2, interval=1)
    trainer(technique, max_steps=2).fit(TinyClassifier(), loader("classifier"))  # long enough: no warning


def test_from_yaml(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "EarlyBird", {"sparsity": 0.3, "window": 2, "interval": 1}, max_steps=3)
