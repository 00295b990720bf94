"""Compressed activations as a precision plugin: everything else is the inner plugin's."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn

from lightning_eff import ActivationCompression, ExactResume, LatestWeightAveraging
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory.act_precision import ACTPrecision
from tests.models import TinyGPT, flat, loader, trainer
from tests.plugins import PluginCase
from tests.runs import SaveBatches, differences, final_state, fit, resume_from_every_step

PLUGINS = {
    "ACTPrecision": PluginCase(
        build=lambda precision: ACTPrecision(bits=2, inner=precision),
        precisions=("32-true", "bf16-mixed", "bf16-true"),
        lossy=True,
    )
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 3}, "bits=3.*expected 2, 4 or 8"),
        ({"bits": True}, "bits=True"),
        ({"bits": "auto"}, r"ActivationCompression\(bits='auto'\)"),
        ({"inner": "8-mixed"}, "inner='8-mixed'.*bf16-mixed"),
        ({"method": "mesa"}, "bits=4, method='mesa'.*bits=8"),
        ({"group_size": 100}, "group_size=100.*power of two"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ACTPrecision(**arguments)


def test_inner_must_be_another_plugin() -> None:
    for inner in (ACTPrecision(), 32):
        with pytest.raises(TypeError, match="inner of"):
            ACTPrecision(inner=inner)


@pytest.mark.parametrize("inner", ["32-true", "bf16-mixed"])
def test_trains_as_the_inner_plugin_does_but_for_the_noise(inner: str) -> None:
    build = {"max_steps": 3, "gradient_clip_val": 0.5}
    plugin = ACTPrecision(bits=8, inner=inner)
    net, t = fit("tiny_gpt", list, plugins=[plugin], **build)
    assert t.precision == inner
    plain, _ = fit("tiny_gpt", list, precision=inner, **build)
    begun, _ = fit("tiny_gpt", list, precision=inner, max_steps=0)
    moved, apart = (flat(plain) - flat(begun)).float().norm(), (flat(plain) - flat(net)).float().norm()
    assert 0 < apart < 0.5 * moved
    assert {p.dtype for p in net.parameters()} == {p.dtype for p in plain.parameters()}


def test_gradients_are_those_of_the_engine() -> None:
    """The plugin's hooks surround the forward pass of the training step, and nothing else."""
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.0)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=1.0)
    before = flat(net).clone()
    plugin = ACTPrecision(bits=2)
    batches: list[Any] = []
    net.on_train_batch_start = lambda batch, batch_idx: batches.append(batch)  # type: ignore[method-assign]
    trainer(max_steps=1, plugins=[plugin]).fit(net, loader("tiny_gpt"))
    stepped = before - flat(net)
    torch.nn.utils.vector_to_parameters(before, net.parameters())
    net.log = lambda *args, **kwargs: None
    assert plugin.state_dict()["passes"] == 1
    plugin._passes = 0  # as it was in that pass
    engine = Engine(net, bits=2)
    net.zero_grad()
    with engine.forward(plugin.seed(), ()):
        loss = net.training_step(batches[0], 0)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert torch.allclose(stepped, expected, atol=1e-6)
    assert engine.ledger.saved_bytes < engine.ledger.exact_bytes / 4


def test_evaluation_is_plain() -> None:
    plugin = ACTPrecision()
    seen: list[int] = []
    net = TinyGPT()
    net.on_validation_batch_end = lambda *args: seen.append(plugin._passes)  # type: ignore[method-assign]
    trainer(max_steps=2, limit_val_batches=1, num_sanity_val_steps=1, plugins=[plugin]).fit(
        net, loader("tiny_gpt"), loader("tiny_gpt")
    )
    assert seen[0] == 0 and plugin._passes == 2


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    inner = "bf16-mixed"

    def build() -> list:
        return [LatestWeightAveraging(window=3, interval=2)]  # resumes the loader and the random state

    found = resume_from_every_step("tiny_gpt", build, tmp_path, plugins=[ACTPrecision(bits=4, inner=inner)])
    assert found == {}
    whole = final_state(*fit("tiny_gpt", build, plugins=[ACTPrecision(bits=4, inner=inner)]))
    assert differences(whole, final_state(*fit("tiny_gpt", build, plugins=[ACTPrecision(bits=2, inner=inner)]))) != []


def test_takes_up_a_checkpoint_of_the_inner_plugin_alone() -> None:
    class Counting(Precision):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    plugin = ACTPrecision(inner=Counting())
    plugin.on_load_checkpoint({Counting.__qualname__: {"count": 7}})
    assert plugin.inner.count == 7  # pyright: ignore[reportAttributeAccessIssue]


def test_compiled_modules_are_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0]._compiled_call_impl = net[0].forward  # as nn.Module.compile leaves it
    with pytest.raises(ValueError, match="ACTPrecision: '0' is compiled"):
        ACTPrecision().convert_module(net)


def test_a_named_inner_plugin_follows_the_module() -> None:
    plugin = ACTPrecision(inner="bf16-mixed")
    plugin.convert_module(nn.Linear(2, 2, device="meta"))
    plugin._place()
    assert isinstance(plugin.inner, MixedPrecision) and plugin.inner.device == "meta"
    given = ACTPrecision(inner=MixedPrecision("bf16-mixed", "cpu"))
    given.convert_module(nn.Linear(2, 2, device="meta"))
    given._place()
    assert isinstance(given.inner, MixedPrecision) and given.inner.device == "cpu"
    assert isinstance(ACTPrecision(inner="16-true").inner, HalfPrecision)


class _Scoring(pl.Callback):
    """The first pass of a run differentiates the loss alone, as one that scores samples does."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def scores(ids: torch.Tensor) -> torch.Tensor:
            del pl_module.forward
            return pl_module(ids).detach().requires_grad_()

        pl_module.forward = scores


@pytest.mark.parametrize("who", ["ACTPrecision", "ActivationCompression"])
def test_a_resumed_run_may_begin_with_a_pass_that_saves_nothing_to_compress(who: str, tmp_path: Path) -> None:
    """The run that saved the checkpoint was seen to act; one that begins anew is asked at once."""

    def run(**kwargs: Any) -> Any:
        plugins = [ACTPrecision(bits=2)] if who == "ACTPrecision" else []
        techniques = [ExactResume()] if plugins else [ActivationCompression(bits=2)]
        return fit("tiny_gpt", lambda: techniques, plugins=plugins, **kwargs)

    run(callbacks=[SaveBatches(tmp_path, [3])], max_steps=4)
    _, t = run(callbacks=[_Scoring()], resume=tmp_path / "batch=3.ckpt")
    assert t.global_step == 12
    with pytest.raises(ValueError, match=f"{who}: none of the"):
        run(callbacks=[_Scoring()])
