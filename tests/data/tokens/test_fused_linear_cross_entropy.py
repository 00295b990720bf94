"""FusedLinearCrossEntropy: losses and gradients of the plain head in float64, of any module; and logits never exist."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_eff import FusedLinearCrossEntropy
from lightning_eff.data.tokens._head.finding import site_at
from lightning_eff.data.tokens._head.stand_in import Logits
from tests import families, models
from tests.cases import Case, own_loss
from tests.data.tokens.heads import HEADS, LOGITS, LOSSES, B, D, Head, Largest, Loss, Net, T, V, data, flat, module
from tests.models import trainer
from tests.runs import differences, final_state

CASES = {
    "FusedLinearCrossEntropy": Case(
        active=lambda: FusedLinearCrossEntropy(rows=7),
        neutral=lambda: FusedLinearCrossEntropy(min_classes=math.inf),
        rounds=True,
        lost=(own_loss, "classifier", "found no cross-entropy of a linear layer's output in training_step"),
    )
}


class Gradients(pl.Callback):
    """The loss and the gradients of the last backward pass."""

    def __init__(self) -> None:
        self.loss, self.found = math.nan, {}

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self.loss = float(loss.detach())

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}


def exact(net: pl.LightningModule, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of the plain step on a copy in float64."""
    twin = copy.deepcopy(net).double()
    twin.__dict__["log"] = lambda *args, **kwargs: None
    loss = twin.training_step(batch, 0)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}


def check(net: pl.LightningModule, loader: Any, near: float = 3e-6, **settings: Any) -> FusedLinearCrossEntropy:
    """Train one step, and hold its loss and gradients against the plain ones in float64."""
    loss, wanted = exact(net, next(iter(loader)))
    technique, seen = FusedLinearCrossEntropy(), Gradients()
    trainer(technique, seen, max_steps=1, **settings).fit(net, loader)
    assert abs(seen.loss - loss) <= near * abs(loss)
    assert seen.found.keys() == wanted.keys()
    whole = max(float(gradient.norm()) for gradient in wanted.values())  # that of a key's bias is rounding alone
    for name, gradient in wanted.items():
        error = float((seen.found[name].double() - gradient).norm())
        assert error <= near * max(float(gradient.norm()), 1e-3 * whole), name
    return technique


def without_logits(head: Head, loss: Loss) -> FusedLinearCrossEntropy:
    technique = check(Net(head, loss), data())
    with Largest() as seen:
        trainer(FusedLinearCrossEntropy(), max_steps=2).fit(Net(head, loss), data(2))
    assert seen.numel <= LOGITS / 2, "logits were made"
    with Largest() as seen:
        trainer(max_steps=1).fit(Net(head, loss), data())
    assert seen.numel == LOGITS, "so they would have been seen"
    return technique


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head(name: str) -> None:
    assert without_logits(HEADS[name], flat).report()["reads"] == 0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss(name: str) -> None:
    figures = without_logits(module, LOSSES[name]).report()
    assert figures["reads"] == 0 and figures["rows"] > 0 and figures["logits_bytes"] > 0


def test_only_what_counts_is_computed() -> None:
    """Of 128 positions those with a label, in three products each."""
    from torch.utils.flop_counter import FlopCounterMode

    def flops(share: float, *callbacks: pl.Callback) -> int:
        with FlopCounterMode(display=False) as counter:
            trainer(*callbacks, max_steps=1).fit(Net(module, flat), data(share=share))
        return counter.get_total_flops()

    technique = FusedLinearCrossEntropy()
    labels = next(iter(data(share=0.15)))["labels"]
    kept = int((labels != -100).sum())
    plain, product = flops(0.15), 2 * D * V
    look = 2 * B * T * D * D + kept * product  # the first batch's one forward pass more
    assert plain - (flops(0.15, technique) - look) == 3 * (B * T - kept) * product
    assert technique.report()["rows"] == kept
    assert technique.report()["ignored_share"] == 1 - kept / (B * T)
    assert technique.report()["logits_bytes"] == 4 * LOGITS


# -- whatever else is done with logits is right


class Identity(torch.autograd.Function):
    """Neither seen by torch's functions nor computed by them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 2 * grad_outputs[0]


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad_outputs[0] * 2 * x / x.numel()


def metric(net: Net, z: Tensor, y: Tensor) -> Tensor:
    accuracy = (z.argmax(-1) == y).float().mean()
    with torch.no_grad():
        entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
    assert 0 <= accuracy <= 1 and 0 < entropy <= math.log(V) + 1e-5 and z.shape == (B, T, V)
    return flat(net, z, y)


def z_loss(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return flat(net, z, y) + 1e-2 * z.logsumexp(-1).square().mean()


def hooked_part(net: Net, z: Tensor, y: Tensor) -> Tensor:
    part = z[:, :5]
    part.register_hook(lambda g: 3 * g)
    return F.cross_entropy(part.flatten(0, 1), y[:, :5].flatten()) + shifted_late(z, y)


def shifted_late(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z[:, 6:].flatten(0, 1), y[:, 6:].flatten())


def twice(net: Net, z: Tensor, y: Tensor) -> Tensor:
    """A loss with a gradient taken of it on the way."""
    loss = flat(net, z, y)
    (gradient,) = torch.autograd.grad(loss, net.inner.weight, retain_graph=True)
    return loss * (1 + float(gradient.norm()))


READERS: dict[str, Loss] = {
    "metric": metric,
    "z-loss": z_loss,
    "function": lambda net, z, y: flat(net, z, y) + 0.1 * Squares.apply(z),  # pyright: ignore[reportOperatorIssue]
    "function of a part": lambda net, z, y: flat(net, z, y) + 0.1 * Squares.apply(z[:, 2:] * 0.5),  # pyright: ignore[reportOperatorIssue]
    "scripted": lambda net, z, y: flat(net, z, y) + 0.1 * torch.einsum("btv,btv->", z, z) / LOGITS,
    "twice": twice,
    "soft targets": lambda net, z, y: flat(net, z, y) + F.cross_entropy(z[:, 0], torch.full((B, V), 1 / V)),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(READERS))
def test_who_reads_logits_gets_them(name: str) -> None:
    figures = check(Net(module, READERS[name]), data(), near=1e-5).report()
    assert figures["logits_bytes"] == 4 * LOGITS, "the loss itself is computed without them"
    assert (figures["reads"] > 0) == (name != "twice")


def in_place(net: Net, z: Tensor, y: Tensor) -> Tensor:
    first = flat(net, z * 1.0, y)
    kept = z.clone()
    z[..., 3] = -5.0
    z.mul_(0.5)
    return first + flat(net, z, y) + flat(net, kept, y)


def aliased(net: Net, z: Tensor, y: Tensor) -> Tensor:
    first = flat(net, z, y)
    z.detach().mul_(0.5)
    return first + flat(net, z.view(B, T, V), y)


def hooked(net: Net, z: Tensor, y: Tensor) -> Tensor:
    first = flat(net, z * 1.0, y)
    other = net.out(net.hidden(y.clamp(min=0)))
    other.register_hook(lambda g: 3 * g)
    return first + flat(net, other, y)


OTHERWISE: dict[str, Loss] = {
    "in place": in_place,
    "aliased": aliased,
    "hooked": hooked,
    "identity": lambda net, z, y: flat(net, z, y) + flat(net, Identity.apply(z), y),  # pyright: ignore[reportArgumentType]
    "classes cut": lambda net, z, y: flat(net, z, y) + flat(net, z[..., :200], y.clamp(max=199)),
    "classes first": lambda net, z, y: flat(net, z, y) + flat(net, z.flatten(0, 1).t().reshape(V, B, T).permute(1, 2, 0), y),
    "nll_loss of logits": lambda net, z, y: flat(net, z, y) + F.nll_loss(z.flatten(0, 1), y.flatten()),
    "softmax over tokens": lambda net, z, y: flat(net, z, y) + F.nll_loss(z.log_softmax(1).flatten(0, 1), y.flatten()),
    "log_softmax, scaled": lambda net, z, y: flat(net, z, y) + flat(net, z.log_softmax(-1) * 2, y),
    "to float16 and back": lambda net, z, y: flat(net, z, y) + 1e-9 * flat(net, z.half().float(), y),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_what_is_not_understood_is_as_it_would_be(name: str) -> None:
    """SideOutputs a loss that is, since a step without one is refused."""
    check(Net(module, OTHERWISE[name]), data(), near=1e-5)


def test_a_head_that_a_later_batch_uses_otherwise_trains_rightly() -> None:
    class Later(Net):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            z = self(batch["ids"])
            if batch_idx == 1:
                z[..., 0] = 0.0
                return flat(self, z.clamp(-1, 1), batch["labels"])
            if batch_idx == 2:
                with torch.no_grad():
                    z = z + 1
                return flat(self, self.out(self.hidden(batch["ids"])).mul(z.mean()), batch["labels"])
            return flat(self, z, batch["labels"])

    nets = Later(module, flat), Later(module, flat)
    trainer(FusedLinearCrossEntropy(), max_steps=4).fit(nets[0], data(4))
    trainer(max_steps=4).fit(nets[1], data(4))
    for (name, ours), plain in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_logits_that_are_kept_are_those_before_the_weights_moved() -> None:
    class Keeps(Net):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            z = self(batch["ids"])
            self.__dict__["kept"] = z[:, :3]
            with torch.no_grad():
                self.__dict__["wanted"] = F.linear(self.hidden(batch["ids"]), self.out.weight, self.out.bias)[:, :3]
            return {"loss": flat(self, z, batch["labels"]), "logits": z}

    net = Keeps(module, flat)
    trainer(FusedLinearCrossEntropy(), max_steps=1).fit(net, data())
    torch.testing.assert_close(net.kept * 1.0, net.wanted)
    moved = F.linear(net.hidden(next(iter(data()))["ids"]), net.out.weight, net.out.bias)[:, :3]
    assert not torch.allclose(moved, net.wanted)


def test_notes_say_who_reads_and_where(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        technique = check(Net(module, metric), data())
    notes = [r.getMessage() for r in caplog.records if r.getMessage().startswith("FusedLinearCrossEntropy")]
    assert any("computes the loss without the logits of out (300 classes)" in note for note in notes)
    assert sum("torch's 'argmax' at" in note and "also reads the logits of out" in note for note in notes) == 1
    assert all(__file__ in note for note in notes if "also reads" in note)
    assert "out: saved 0.1 MiB of logits" in technique.summary()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        from tests.runs import fit

        fit("classifier", lambda: [FusedLinearCrossEntropy()], max_steps=1)
    assert "Little is gained" in caplog.text and "3 classes for 8 features" in caplog.text


# -- Hugging Face's


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "qwen3",
        "gemma2",
        "cohere",
        "granite",
        "bert",
        "modernbert",
        "albert",
        "bart",
        "t5",
        "olmoe",
        "vit",
        "mamba",
    ],
)
def test_hugging_face(name: str) -> None:
    net = families.module(name)
    net.model.config._experts_implementation = "eager"  # torch's grouped product knows no float64
    batch = families.batch(name, 4)
    if families.FAMILIES[name].kind != "image":
        batch["labels"][:, ::3] = -100
    technique = check(net, DataLoader([batch], batch_size=None), near=2e-5)
    assert technique.report()["reads"] == 0 and technique.report()["logits_bytes"] > 0


def test_hugging_face_with_items_counted_by_the_caller() -> None:
    class Counted(families.HuggingFace):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            found = self.model(**batch, num_items_in_batch=torch.tensor(57))
            assert type(found.logits) is (Logits if self.trainer_is_there() else Tensor)
            return found.loss

        def trainer_is_there(self) -> bool:
            return self._trainer is not None

    net = families.module("gpt2", Counted)
    check(net, DataLoader([families.batch("gpt2", 4)], batch_size=None), near=2e-5)


# -- precision, checkpoints, evaluation


@pytest.mark.parametrize(
    ("precision", "head"),
    [
        ("bf16-mixed", "module"),
        ("bf16-true", "module"),
        ("bf16-mixed", "bias"),  # in float32, as BART's
        ("bf16-mixed", "learned scale, (1,)"),
    ],
)
def test_bfloat16_is_as_near_as_the_plain_head(precision: Any, head: str) -> None:
    errors = []
    loss, wanted = exact(Net(HEADS[head], shifted_float), next(iter(data())))
    for callbacks in ([FusedLinearCrossEntropy()], []):
        seen = Gradients()
        net = Net(HEADS[head], shifted_float)
        trainer(*callbacks, seen, max_steps=1, precision=precision).fit(net, data())
        assert {g.dtype for g in seen.found.values()} == {p.dtype for p in net.parameters()}
        far = max(float((seen.found[n].double() - g).norm() / g.norm()) for n, g in wanted.items())
        errors.append((abs(seen.loss - loss) / loss, far))
    assert errors[0][1] <= 1.5 * errors[1][1] < 0.1 and errors[0][0] < 0.01


def shifted_float(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return LOSSES["shifted"](net, z.float(), y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_losses() -> None:
    def head(net: Net, h: Tensor) -> Any:
        return h

    def loss(reentrant: bool) -> Loss:
        def compute(net: Net, h: Tensor, y: Tensor) -> Tensor:
            part = lambda x: flat(net, net.out(x.sin()), y)  # noqa: E731
            return checkpoint(part, h, use_reentrant=reentrant)  # pyright: ignore[reportReturnType]

        return compute

    check(Net(head, loss(reentrant=False)), data())
    with pytest.raises(ValueError, match=r"found no cross-entropy of the logits of out in.*use_reentrant=True"):
        trainer(FusedLinearCrossEntropy(), max_steps=1).fit(Net(head, loss(reentrant=True)), data())


def test_evaluation_and_later_calls_are_plain() -> None:
    seen: list[type] = []

    class Looks(Net):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            seen.append(type(self(batch["ids"])))

    net = Looks(module, flat)
    trainer(FusedLinearCrossEntropy(), max_steps=2, limit_val_batches=1, val_check_interval=1).fit(net, data(2), data())
    assert seen == [Tensor, Tensor] and "forward" not in vars(net.out)
    assert type(net(next(iter(data()))["ids"])) is Tensor


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_without_a_loss_are_looked_at_later() -> None:
    class Skips(Net):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
            return None if batch_idx == 0 else flat(self, self(batch["ids"]), batch["labels"])

    technique = FusedLinearCrossEntropy()
    trainer(technique, max_epochs=1).fit(Skips(module, flat), data(3))
    assert technique.report()["logits_bytes"] == 4 * LOGITS


def test_a_resumed_run_computes_the_heads_that_the_undisturbed_one_does(tmp_path: Path) -> None:
    """Of two tasks by turns, the first batch has the one and the first after the checkpoint the other."""

    class ByTurns(Net):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            h = self.hidden(batch["ids"])
            return flat(self, h @ self.embed.weight.T if batch_idx % 2 else self.out(h), batch["labels"])

    def run(resume: Path | None = None) -> tuple[dict[str, Tensor], str]:
        technique, net = FusedLinearCrossEntropy(), ByTurns(module, flat)
        saving = [] if resume else [ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")]
        t = trainer(technique, *saving, max_steps=3, enable_checkpointing=resume is None)
        t.fit(net, data(3), ckpt_path=resume)
        return final_state(net, t), technique.summary()

    whole, told = run()
    again, told_again = run(tmp_path / "step=1.ckpt")
    assert differences(whole, again) == []
    assert told == told_again and told.startswith("out: ")


# -- what cannot be


def test_a_checkpoint_that_names_a_head_with_a_forward_of_its_own_means_its_product() -> None:
    net = Net(HEADS["cap within a subclass"], flat)
    site = site_at(net, "capped", True, V, D)
    assert site.module is None and site.weight is net.capped.weight and site.name == "capped.weight"
    assert site_at(net, "out", True, V, D).module is net.out


def by_hand(net: Net, z: Tensor, y: Tensor) -> Tensor:
    return -z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).mean()


@pytest.mark.parametrize(
    ("head", "loss", "message"),
    [
        (module, by_hand, r"Found instead: the output of .* layer, out, is read by torch's 'gather' at .*test_fused"),
        (lambda net, h: net.out(h).clamp(-5, 5), flat, r"does not come from a linear layer.*read by torch's 'clamp'"),
        (module, lambda net, z, y: F.mse_loss(z.mean(-1), y.float()), "F.mse_loss"),
        (module, lambda net, z, y: F.cross_entropy(z.flatten(0, 1), torch.full((B * T, V), 1 / V)), "needs the logits"),
    ],
)  # fmt: skip
def test_a_module_without_such_a_loss_is_refused(head: Head, loss: Loss, message: str) -> None:
    net = Net(head, loss)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError,
        match=rf"FusedLinearCrossEntropy: found no cross-entropy .* in training_step.*{message}",
    ):
        trainer(FusedLinearCrossEntropy(), max_steps=1).fit(net, data())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_heads_below_min_classes_stay() -> None:
    technique = FusedLinearCrossEntropy(min_classes=301)
    with pytest.raises(
        ValueError, match=r"min_classes=301\): out has 300, and no other output layer.*Lower min_classes"
    ):
        trainer(technique, max_steps=1).fit(Net(module, flat), data())


@pytest.mark.filterwarnings("ignore")  # torch's compiler, about its own insides
def test_a_compiled_head_is_refused() -> None:
    class Compiled(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.graph(self.hidden(ids))  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    net = Compiled(module, flat)
    net.graph = torch.compile(nn.Sequential(net.out, nn.Identity()), backend="eager")
    with pytest.raises(ValueError, match=r"logits of graph\._orig_mod\.0|logits of out.*Compiled: graph"):
        trainer(FusedLinearCrossEntropy(), max_steps=1).fit(net, data())


@pytest.mark.parametrize(
    "arguments", [{"rows": 0}, {"rows": 2.5}, {"rows": True}, {"min_classes": 1}, {"min_classes": float("nan")}]
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"FusedLinearCrossEntropy\({next(iter(arguments))}=.*expected"):
        FusedLinearCrossEntropy(**arguments)


def test_a_head_that_fsdp2_puts_together_for_its_calls_alone_is_refused() -> None:
    from torch.distributed.fsdp import FSDPModule

    net: Any = models.module("tiny_gpt")
    net.head.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {"_apply": nn.Module._apply})
    with pytest.raises(ValueError, match=r"fully_shard was applied to head itself.*Leave it to the root's fully_shard"):
        trainer(FusedLinearCrossEntropy(rows=7), max_steps=1).fit(net, models.loader("tiny_gpt"))


class Waiting:
    """Stands for FSDP2's state of a module, which waits for the backward pass by a hook on what the module returns."""

    def __init__(self) -> None:
        self.calls = 0

    def before(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad


def test_fsdp2_hears_of_the_backward_pass_without_logits() -> None:
    waiting = Waiting()

    def loss(net: Net, z: Tensor, y: Tensor) -> Tensor:
        if z.requires_grad:
            z.register_hook(waiting.before)
        return flat(net, z, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waiting, "__module__", "torch.distributed.fsdp.state")
        net = Net(module, loss)
        technique = FusedLinearCrossEntropy()
        trainer(technique, max_steps=3).fit(net, data(3))
    assert technique.report()["reads"] == 0
    assert waiting.calls == 3
