"""Precision plugins are no callbacks, and so no cases of ``tests.cases``: what of the contract holds for them is tried here."""

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_eff
from lightning_eff._core.technique import Technique
from lightning_eff._core.wrapping import WrappingPrecision
from tests.conftest import Once
from tests.ddp import launch
from tests.models import flat, loader, module, trainer
from tests.plugins import PLUGINS
from tests.runs import MODES, NUM_STEPS, checkpoints, fit, plain, resume_from_every_step
from tests.selection import one_of, share_of

NAMES = sorted(PLUGINS)
every = pytest.mark.parametrize("name", NAMES)
AROUND = [(name, precision) for name in NAMES for precision in PLUGINS[name].precisions]


def of_mode(name: str, mode: str) -> dict[str, Any]:
    """A mode's settings with the plugin in place of a precision; in bf16 where the mode is, else the case's first."""
    settings = dict(MODES[mode])
    case = PLUGINS[name]
    precision = settings.pop("precision", case.precisions[0])
    if precision not in case.precisions:
        precision = case.precisions[0]
    return {**settings, "plugins": [case.build(precision)]}


def resuming() -> list[Technique]:
    """What makes a run resume its data and its random numbers exactly, and changes no weight."""
    return [lightning_eff.ExactResume()]


def test_every_exported_plugin_has_a_case() -> None:
    names = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    exported = {name for name, one in names.items() if isinstance(one, type) and issubclass(one, Precision)}
    assert exported == set(PLUGINS)
    for name in NAMES:
        plugin = PLUGINS[name].build(PLUGINS[name].precisions[0])
        assert type(plugin).__name__ == name and isinstance(plugin, WrappingPrecision)


@every
def test_runs_alike_under_pytorch_lightning(name: str) -> None:
    """With clipping, which Lightning's own plugins pass over in silence for modules of the other package."""
    from tests import runs
    from tests.pl import runs as other

    case, finals = PLUGINS[name], []
    for of, clip in ((runs, 1e-3), (other, 1e-3), (runs, None)):
        plugin = case.build(case.precisions[-1])
        net, t = of.fit("tiny_gpt", list, plugins=[plugin], gradient_clip_val=clip, max_steps=4)
        finals.append(of.final_state(net, t))
    clipped, under_the_other, unclipped = finals
    assert runs.differences(clipped, under_the_other) == []
    assert runs.differences(clipped, unclipped) != []


@every
def test_describes_itself(name: str) -> None:
    cls = getattr(lightning_eff, name)
    assert cls.saves and cls.paper and cls.kind == "precision"
    assert any(year in cls.paper for year in map(str, range(1990, 2030)))
    doc = cls.__doc__ or ""
    assert "Raises:" in doc and ("Args:" in doc or not inspect.signature(cls).parameters)


@pytest.mark.parametrize(
    ("name", "precision", "model"),
    [
        pytest.param(name, precision, model, marks=one_of(3, name, str(precision), model))
        for name, precision in AROUND
        for model in ("gpt2", "llama", "bert", "vit")
    ],
)
def test_trains_hugging_face_models(name: str, precision: Any, model: str) -> None:
    net, t = fit(model, list, plugins=[PLUGINS[name].build(precision)])
    without, _ = plain(model, precision)
    assert t.global_step == NUM_STEPS
    assert t.precision == precision
    assert flat(net).isfinite().all()
    assert not torch.equal(flat(net), flat(without)), "the plugin changed nothing"
    restored = PLUGINS[name].restores_dtypes
    assert [p.dtype for p in net.parameters()] == [torch.float32 if restored else p.dtype for p in without.parameters()]


class Perceptron(nn.Module):
    """A residual block on (B, T, 16), whose activations are written over the results of its linear maps, or not."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.up, self.down, self.plain = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16, bias=False)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.plain(x), self.down(self.act(self.up(x)))
        return x + (first.add_(second) if self.inplace else first + second)


class Perceptrons(pl.LightningModule):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Perceptron(inplace) for _ in range(2)))
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.blocks(x.to(self.head.weight.dtype)).mean(1)).float(), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(("name", "precision"), AROUND)
def test_results_of_linear_maps_may_be_changed_in_place(name: str, precision: Any) -> None:
    ends = []
    for inplace in (False, True):
        pl.seed_everything(1, verbose=False)
        net = Perceptrons(inplace)
        before = flat(net).clone()
        data = TensorDataset(torch.randn(16, 3, 16), torch.arange(16) % 4)
        trainer(plugins=[PLUGINS[name].build(precision)], max_epochs=1).fit(net, DataLoader(data, 4))
        assert not torch.equal(flat(net), before)
        ends.append(flat(net))
    assert torch.equal(*ends)


@every
@pytest.mark.parametrize("mode", sorted(MODES))
def test_resume_equals_uninterrupted(name: str, mode: str, tmp_path: Path) -> None:
    """From a third of the steps, another one in each mode; in one, from checkpoints that are written in the background."""
    some, late = share_of(3, name, mode), mode == "plain"
    assert resume_from_every_step("tiny_gpt", resuming, tmp_path, third=some, late=late, **of_mode(name, mode)) == {}


@pytest.mark.slow
@every
@pytest.mark.parametrize("mode", sorted(MODES))
def test_resume_equals_uninterrupted_from_every_step(name: str, mode: str, tmp_path: Path) -> None:
    assert resume_from_every_step("tiny_gpt", resuming, tmp_path, **of_mode(name, mode)) == {}


@every
def test_checkpoints_are_the_plain_modules(name: str, tmp_path: Path) -> None:
    fit("tiny_gpt", list, directory=tmp_path, **of_mode(name, "plain"))
    saved = checkpoints(tmp_path)
    assert len(saved) == NUM_STEPS
    for path in saved:
        module("tiny_gpt").load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    net, t = fit("tiny_gpt", list, resume=saved[4])  # a plain trainer goes on from it
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()


@pytest.fixture(scope="module")
def under_ddp(once: Once) -> dict[str, Any]:
    return once("plugins", lambda: launch("plugins", *NAMES))


@every
@pytest.mark.timeout(600)  # who is first waits for all of them
def test_under_ddp(name: str, under_ddp: dict[str, Any]) -> None:
    """Ranks end alike, and a resumed run ends as the undisturbed one."""
    assert under_ddp[name] == {"alike": True, "finite": True, "differences": [[], []], "acts": True}


@every
@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(name: str, fails: bool) -> None:
    precision = PLUGINS[name].precisions[0]
    net = module("tiny_gpt")
    trainer(max_steps=1, precision=precision).fit(net, loader("tiny_gpt"))  # Lightning leaves attributes of its own
    before = {path: sorted(m.__dict__) for path, m in net.named_modules()}
    step, calls = net.training_step, []

    def failing(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if fails and len(calls) > 2:
            raise RuntimeError("planted")
        return step(batch, batch_idx)

    net.training_step = failing
    plugin = PLUGINS[name].build(precision)
    t = trainer(max_steps=4, plugins=[plugin])
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            t.fit(net, loader("tiny_gpt"))
    else:
        t.fit(net, loader("tiny_gpt"))
    del net.training_step
    assert {path: sorted(m.__dict__) for path, m in net.named_modules()} == before
    assert plugin._module is None
    saved: list[torch.Tensor] = []
    weight = nn.Parameter(torch.ones(64, 64))
    y = torch.tanh(weight @ weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (y * y).sum().backward()
    assert saved and all(t.data_ptr() == y.data_ptr() for t in saved), "hooks or modes were left behind"


def test_every_method_of_a_plugin_is_handed_on() -> None:
    """What torch's and Lightning's versions add later shows here."""
    public = {n for n, f in inspect.getmembers(Precision, callable) if not n.startswith("_")}
    assert public - {n for n in vars(WrappingPrecision) if not n.startswith("_")} == set()
    calls: list[str] = []

    class Watched(Precision):
        def __getattribute__(self, name: str) -> Any:
            if name in public:
                calls.append(name)
            return super().__getattribute__(name)

    plugin = WrappingPrecision(Watched())
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    layer, optimizer = nn.Linear(2, 2), torch.optim.SGD([weight], 0.1)
    plugin.connect(layer, [], [])
    plugin.convert_module(layer)
    for name in sorted(public):
        if name.endswith("context"):
            with getattr(plugin, name)():
                pass
    plugin.convert_input(0)
    plugin.convert_output(0)
    plugin.unscale_gradients(optimizer)
    list(plugin.main_params(optimizer))
    plugin.clip_gradients(optimizer, 1.0)
    plugin.clip_grad_by_value(optimizer, 1.0)
    plugin.clip_grad_by_norm(optimizer, 1.0)
    plugin.load_state_dict(plugin.state_dict())
    plugin.on_save_checkpoint({})
    plugin.on_load_checkpoint({})
    plugin.teardown()
    assert set(calls) >= public - {"pre_backward", "backward", "post_backward", "optimizer_step"}


def test_two_plugins_are_refused_by_lightning() -> None:
    with pytest.raises(Exception, match="multiple values for Precision flags"):
        trainer(max_steps=1, plugins=[WrappingPrecision(), WrappingPrecision()])


@every
@pytest.mark.parametrize("of", ["lightning.pytorch", "pytorch_lightning"])
def test_a_plugin_among_the_callbacks_is_told_where_it_belongs(name: str, of: str) -> None:
    package = pytest.importorskip(of)
    plugin = PLUGINS[name].build(PLUGINS[name].precisions[0])
    with pytest.raises(
        TypeError, match=rf"^Trainer\(callbacks=\[{name}\(\.\.\.\)\]\): .* Use Trainer\(plugins=\[{name}\("
    ):
        package.Trainer(callbacks=[plugin], accelerator="cpu", logger=False, enable_checkpointing=False)
