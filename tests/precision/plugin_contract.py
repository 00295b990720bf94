"""What a plugin that exchanges linear maps must keep, as functions that one test file a plugin calls."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from lightning_eff import ACTPrecision, Rematerialization
from lightning_eff._core.technique import Technique
from tests.cases import CASES
from tests.models import flat, loader, make_batch, module, trainer
from tests.runs import NUM_STEPS, checkpoints, differences, final_state, fit, resume_from_every_step

Make = Callable[..., Precision]
"""``make(base=...)`` is a plugin."""


def saved_by(compute: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that autograd saves in ``compute()``."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        compute()
    return saved


def backward_ignores_autocast(compute: Callable[..., Tensor]) -> None:
    """``manual_backward`` runs inside the training step's autocast, which must not narrow the products."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 70, generator=g).requires_grad_(), torch.randn(5, 70, generator=g).requires_grad_()
    grad, y = torch.randn(6, 5, generator=g), compute(x, w, None)
    expected = torch.autograd.grad(y, (x, w), grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, (x, w), grad)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, found, strict=True))


def loss_of(net: pl.LightningModule, model: str) -> float:
    """The plain module's loss on samples that it has not seen, without dropout."""
    net.eval()
    batch = make_batch(model, 32, seed=7)
    with torch.no_grad():
        if model == "tiny_gpt":
            logits = net(batch["input_ids"])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
        loss = net.training_step(batch, 0)
        assert isinstance(loss, Tensor)
        return loss.item()


def apart(make: Make, model: str, base: Any, **settings: Any) -> float:
    """How far the loss after a run is from the base plugin's run's, as a share of what the base's run takes off it."""
    pl.seed_everything(1, verbose=False)
    before = loss_of(module(model), model)
    net, t = fit(model, list, plugins=[make(base=base)], **settings)
    plain, _ = fit(model, list, precision=base, **settings)
    assert t.global_step == settings.get("max_steps", NUM_STEPS)
    assert flat(net).isfinite().all()
    assert not torch.equal(flat(net), flat(plain)), "the plugin did nothing"
    assert [p.dtype for p in net.parameters()] == [p.dtype for p in plain.parameters()]
    return abs(loss_of(net, model) - loss_of(plain, model)) / abs(before - loss_of(plain, model))


def resuming() -> list[Technique]:
    """What makes a run resume its data and its random numbers exactly, and changes no weight."""
    return [CASES["LatestWeightAveraging"].neutral()]


def resumes(make: Make, directory: Path, base: str = "bf16-mixed") -> None:
    """From every step, a resumed run ends bit for bit as the undisturbed one; with accumulation and clipping."""
    plugins = [make(base=base)]
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    assert resume_from_every_step("tiny_gpt", resuming, directory, plugins=plugins, **settings) == {}


def checkpoints_are_the_plain_modules(make: Make, directory: Path) -> None:
    """Each checkpoint loads strictly into the plain module, and either plugin goes on from the other's."""
    fit("tiny_gpt", list, directory=directory / "this", plugins=[make(base="32-true")])
    fit("tiny_gpt", list, directory=directory / "plain")
    saved = checkpoints(directory / "this")
    assert len(saved) == NUM_STEPS
    for path in saved:
        module("tiny_gpt").load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    for path, plugins in ((saved[4], []), (checkpoints(directory / "plain")[4], [make(base="32-true")])):
        net, t = fit("tiny_gpt", list, resume=path, plugins=plugins)
        assert t.global_step == NUM_STEPS and flat(net).isfinite().all()


def the_same_when_rematerialized(make: Make, base: str = "bf16-mixed") -> None:
    """Blocks that run again in the backward pass give the weights that they give when they do not."""
    once = final_state(*fit("tiny_gpt", list, plugins=[make(base=base)]))
    again = fit("tiny_gpt", lambda: [Rematerialization(policy="full")], plugins=[make(base=base)])
    assert differences(once, final_state(*again)) == []


class Maps(pl.LightningModule):
    """Linear maps after one another, and a gain that learns from what they give but sends no gradient back to them.

    What a pass saves for the maps is their own; what it saves for the gain is any activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        self.gain = nn.Parameter(torch.ones(64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        y = self.maps(batch[0].repeat(8, 8))
        return (y * 0.01).sum() + nn.functional.gelu(y.detach() * self.gain).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def compressed_activations_leave_its_tensors_alone(make: Make) -> None:
    """Inside of ACTPrecision a network trains; and one of maps alone trains to the bit as it does without."""
    act = ACTPrecision(bits=2, inner=make(base="32-true"))
    net, t = fit("tiny_gpt", list, plugins=[act])
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()
    assert not torch.equal(flat(net), flat(fit("tiny_gpt", list, plugins=[make(base="32-true")])[0]))

    def run(*plugins: Any) -> tuple[Tensor, Tensor]:
        pl.seed_everything(1, verbose=False)
        net = Maps()
        trainer(max_steps=4, plugins=list(plugins)).fit(net, loader("classifier", 20))
        return flat(net.maps), net.gain.detach()

    maps, gain = run(make(base="32-true", skip=()))
    same, other = run(ACTPrecision(bits=2, inner=make(base="32-true", skip=())))
    assert torch.equal(same, maps)
    assert not torch.equal(other, gain), "nothing is compressed here"


def leaves_no_trace(make: Make, fails: bool) -> None:
    """After a run, or an exception in it, the maps' instances are as they were."""
    plugin, net = make(base="32-true"), module("tiny_gpt")
    trainer(max_steps=1).fit(net, loader("tiny_gpt"))  # Lightning leaves attributes of its own
    before = {path: sorted(m.__dict__) for path, m in net.named_modules()}
    step, calls = net.training_step, []

    def failing(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if fails and len(calls) > 2:
            raise RuntimeError("planted")
        return step(batch, batch_idx)

    net.training_step = failing
    try:
        trainer(max_steps=4, plugins=[plugin]).fit(net, loader("tiny_gpt"))
        assert not fails
    except RuntimeError as error:
        assert fails and str(error) == "planted"
    del net.training_step
    assert {path: sorted(m.__dict__) for path, m in net.named_modules()} == before
