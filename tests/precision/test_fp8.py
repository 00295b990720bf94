"""FP8Precision in a Trainer: what it trains, checkpoints, composes with, prints and refuses."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_eff import ACTPrecision
from lightning_eff.memory.rematerialization import Rematerialization
from lightning_eff.precision import fp8
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import emulated
from lightning_eff.precision.fp8 import FP8Precision, device_of, too_small
from tests.cases import CASES
from tests.models import TinyGPT, flat, hugging_face, loader, make_batch, module, trainer
from tests.plugins import PluginCase
from tests.runs import NUM_STEPS, checkpoints, differences, final_state, fit

PLUGINS = {
    "FP8Precision": PluginCase(
        build=lambda precision: FP8Precision("rowwise", base=precision, backend="emulated"),
        precisions=("32-true", "bf16-mixed", "bf16-true"),
    )
}

SETTINGS: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": {"scaling": "rowwise"},
    "blockwise": {"scaling": "blockwise"},
    "delayed": {"amax": "delayed", "history": 4},
}
every_setting = pytest.mark.parametrize("setting", SETTINGS)


def plugin(setting: str = "tensorwise", **kwargs: Any) -> FP8Precision:
    return FP8Precision(**{"backend": "emulated", **SETTINGS[setting], **kwargs})


@functools.cache
def in_bfloat16(model: str) -> tuple[Tensor, Tensor]:
    """The weights after training, and before it."""
    net, _ = fit(model, list, precision="bf16-mixed")
    pl.seed_everything(1, verbose=False)
    return flat(net), flat(module(model))


# -- training


@every_setting
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "vit"])
def test_trains_hugging_face_models_as_bfloat16_does(model: str, setting: str) -> None:
    net, t = fit(model, list, plugins=[plugin(setting)])
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()
    weights, start = in_bfloat16(model)
    apart = float((flat(net) - weights).norm() / (weights - start).norm())
    assert 0.01 < apart < 0.2, "of the way that bfloat16 went"
    assert [p.dtype for p in net.parameters()] == [torch.float32] * len(list(net.parameters()))


def gradient(net: pl.LightningModule, p: FP8Precision | None, batch: Any, autocast: bool = False) -> Tensor:
    net.zero_grad()
    if p is not None:
        p.convert_module(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = net.training_step(batch, 0)
    loss.backward()
    if p is not None:
        p.teardown()
    return torch.cat([q.grad.flatten() for q in net.parameters() if q.grad is not None])


def test_the_gradients_error_on_gpt2() -> None:
    """Relative to float32's, in the norm over all parameters."""
    torch.manual_seed(0)
    net, batch = hugging_face("gpt2"), make_batch("gpt2", 8, seed=100)
    exact = gradient(net, None, batch)

    def error(p: FP8Precision | None, **kwargs: Any) -> float:
        return float((gradient(net, p, batch, **kwargs) - exact).norm() / exact.norm())

    found = {setting: error(plugin(setting, base="32-true")) for setting in SETTINGS}
    assert found["delayed"] == found["tensorwise"], "there is no history yet"
    assert 0.03 < found["tensorwise"] < 0.05
    assert 0.03 < found["rowwise"] < found["tensorwise"]
    assert 0.03 < found["blockwise"] < found["tensorwise"]
    assert error(plugin(skip=(), base="32-true")) > 1.2 * found["tensorwise"], "the head adds most"
    assert error(None, autocast=True) < 0.006


@pytest.mark.parametrize("base", ["32-true", "64-true", "bf16-true"])
def test_other_bases(base: Any) -> None:
    net, _ = fit("tiny_gpt", list, plugins=[plugin("delayed", base=base)], max_steps=2)
    plain, _ = fit("tiny_gpt", list, precision=base, max_steps=2)
    assert flat(net).isfinite().all() and not torch.equal(flat(net), flat(plain))
    assert [p.dtype for p in net.parameters()] == [p.dtype for p in plain.parameters()]


def test_conv1d_is_exchanged_and_what_stays_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        fit("gpt2", list, plugins=[plugin(skip=("head", "model.transformer.h.0"))], max_steps=1)
    assert "12 linear layers run in FP8, tensorwise scaling, dynamic amax, emulated" in caplog.text
    assert "slower than bfloat16" in caplog.text
    assert "unchanged, part of the head, outside the blocks: model.lm_head (32 to 61)" in caplog.text
    assert "unchanged, skip names 'model.transformer.h.0': model.transformer.h.0.attn.c_attn (32 to 96)" in caplog.text


def test_from_a_configuration_file(tmp_path: Path) -> None:
    arguments = {"scaling": "rowwise", "backend": "emulated", "skip": ["head", "blocks.0"]}
    plugins = [{"class_path": "lightning_eff.precision.fp8.FP8Precision", "init_args": arguments}]
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"trainer": {"accelerator": "cpu", "logger": False, "plugins": plugins}}))
    cli = LightningCLI(TinyGPT, run=False, args=["--config", str(config)], save_config_callback=None)
    found = cli.trainer.precision_plugin
    assert isinstance(found, FP8Precision)
    assert (found.scaling, found.amax, found.skip) == ("rowwise", "dynamic", ("head", "blocks.0"))
    assert isinstance(found.inner, MixedPrecision)


class Subclass(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_a_forward_of_its_own_stays(caplog: pytest.LogCaptureFixture) -> None:
    net = TinyGPT()
    assert net.blocks is not None
    net.blocks[1].proj = Subclass(16, 16)
    with caplog.at_level(logging.INFO):
        plugin().convert_module(net)
    assert "a subclass of nn.Linear with its own forward: blocks.1.proj (16 to 16)" in caplog.text


# -- checkpoints


def test_checkpoints_are_the_plain_modules(tmp_path: Path) -> None:
    net, _ = fit("tiny_gpt", list, directory=tmp_path, plugins=[plugin("delayed")])
    saved = checkpoints(tmp_path)
    assert len(saved) == NUM_STEPS
    for path in saved:
        module("tiny_gpt").load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True)
    net, t = fit("tiny_gpt", list, resume=saved[4])  # a plain trainer goes on from it
    assert t.global_step == NUM_STEPS and flat(net).isfinite().all()


def test_goes_on_from_a_plain_checkpoint(tmp_path: Path) -> None:
    fit("tiny_gpt", list, directory=tmp_path, precision="bf16-mixed")
    for setting in ("tensorwise", "delayed"):
        net, t = fit("tiny_gpt", list, resume=checkpoints(tmp_path)[4], plugins=[plugin(setting)])
        assert t.global_step == NUM_STEPS and flat(net).isfinite().all()


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_no_trace(fails: bool) -> None:
    net = module("tiny_gpt")
    trainer(max_steps=1).fit(net, loader("tiny_gpt"))  # Lightning leaves attributes of its own
    before = {path: sorted(m.__dict__) for path, m in net.named_modules()}
    calls: list[int] = []

    class Failing(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            calls.append(1)
            if fails and len(calls) > 2:
                raise RuntimeError("planted")

    t = trainer(Failing(), max_steps=4, plugins=[plugin("delayed")])
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            t.fit(net, loader("tiny_gpt"))
    else:
        t.fit(net, loader("tiny_gpt"))
    assert {path: sorted(m.__dict__) for path, m in net.named_modules()} == before


# -- together


@every_setting
@pytest.mark.parametrize("policy", ["full", "optimal"])
def test_rematerialization_changes_nothing(policy: Any, setting: str) -> None:
    budget: dict[str, Any] = {"memory_budget": 0.7} if policy == "optimal" else {}
    technique = Rematerialization(policy=policy, **budget)
    without = plugin(setting)
    plain = final_state(*fit("tiny_gpt", list, plugins=[without], accumulate_grad_batches=2, max_steps=4))
    with_ = plugin(setting)
    found = fit("tiny_gpt", lambda: [technique], plugins=[with_], accumulate_grad_batches=2, max_steps=4)
    assert differences(plain, final_state(*found)) == []
    assert technique.report()["recomputed_calls"] > 0
    if setting == "delayed":
        assert torch.equal(with_.state_dict()["history"]["amax"], without.state_dict()["history"]["amax"])


class Linears(pl.LightningModule):
    """Linear maps, and beside them one activation to compress, on whose gradient nothing depends."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return F.mse_loss(batch + 0 * torch.tanh(batch), torch.ones_like(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("outside", [True, False])
def test_compressed_activations_leave_float8_as_it_is(outside: bool) -> None:
    """With the compression around FP8 or inside of it."""

    def run(precision: Any) -> Tensor:
        pl.seed_everything(0, verbose=False)
        net = Linears()
        trainer(max_steps=3, plugins=[precision]).fit(net, torch.randn(3, 16, 64))
        return flat(net)

    inner = plugin(base="32-true")
    both = ACTPrecision(bits=2, inner=inner) if outside else plugin(base=ACTPrecision(bits=2, inner="32-true"))
    assert torch.equal(run(both), run(plugin(base="32-true")))
    assert not torch.equal(run(ACTPrecision(bits=2, inner="32-true")), run(Precision()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch, of its tracing
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_compiles_into_one_graph(scaling: Any) -> None:
    torch.manual_seed(0)
    net, x = TinyGPT(num_layers=1, dropout=0.0), make_batch("tiny_gpt")["input_ids"]
    plugin(scaling, base="32-true").convert_module(net)
    found = []
    for f in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
        net.zero_grad()
        f(x).square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.compiler.reset()
    assert torch.equal(*found)


# those that repeat a step, run blocks again, choose samples or change the network; the others' pairs with the plugin stand in
# the stacks of tests/test_pairs.py, with another setting
EACH_TIME = {
    *("ImportanceSampling", "KFAC", "LoRA", "NgramEmbedding", "ProgressiveStacking", "RandomLTD", "Rematerialization"),
    *("SharpnessAwareMinimization", "StochasticDepth"),
}


@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.slow) for name in sorted(CASES)]
)
def test_with_each_technique(name: str, tmp_path: Path) -> None:
    def run(setting: str, **kwargs: Any) -> Any:
        return fit(CASES[name].model, lambda: [CASES[name].active()], plugins=[plugin(setting)], max_steps=6, **kwargs)

    setting = "delayed"
    if "FP8Precision" in CASES[name].active().conflicts:
        with pytest.raises(ValueError, match="FP8Precision cannot train together with it"):
            run(setting)
        return
    net, t = run(setting, directory=tmp_path)
    whole = final_state(net, t)
    assert t.global_step == 6 and flat(net).isfinite().all()
    path = checkpoints(tmp_path)[2]
    assert differences(whole, final_state(*run(setting, resume=path))) == []
    alone, _ = fit(CASES[name].model, lambda: [CASES[name].active()], max_steps=6)
    assert not torch.equal(flat(alone), flat(net)), "nothing ran in float8"


# -- backends and refusals


class Cuda:
    """What a Trainer's strategy on a GPU tells, before the module is moved there."""

    class strategy:
        root_device = torch.device("cuda", 0)


def on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> TinyGPT:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    net = TinyGPT(num_layers=2)
    net.__dict__["_trainer"] = Cuda()
    return net


def test_the_device_is_the_strategys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(on_cuda(monkeypatch)) == torch.device("cuda", 0)
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")


@pytest.mark.parametrize(
    ("accumulate", "expected", "words"),
    [
        ("fast", (True, False), "fast accumulation in the forward product"),
        ("exact", (False, False), "exact accumulation"),
        ("fastest", (True, True), "fast accumulation in all products"),
    ],
)
def test_which_products_accumulate_fast(
    monkeypatch: pytest.MonkeyPatch, accumulate: Any, expected: tuple[bool, bool], words: str
) -> None:
    calls: list[tuple[tuple[int, ...], bool]] = []

    def product(a: Any, b: Any, dtype: torch.dtype, fast: bool) -> Tensor:
        calls.append(((len(a.codes), len(b.codes)), fast))
        return emulated(a, b, dtype, fast)

    monkeypatch.setattr(fp8, "scaled_mm_for", lambda device: product)
    net = nn.Sequential(nn.Linear(32, 48, bias=False))
    p = plugin(backend="scaled_mm", accumulate=accumulate, skip=())
    p.convert_module(net)
    net(torch.randn(5, 32, requires_grad=True)).sum().backward()
    forward, backward = expected
    assert calls == [((5, 48), forward), ((5, 32), backward), ((48, 32), backward)]
    assert words in p.describe()


@pytest.mark.parametrize("keep_weight", [None, True, False])
def test_a_weight_is_kept_unless_the_strategy_frees_it(
    monkeypatch: pytest.MonkeyPatch, keep_weight: bool | None
) -> None:
    monkeypatch.setattr(fp8, "device_of", lambda module: torch.device("cpu"))
    for cls in (SingleDeviceStrategy, ModelParallelStrategy):

        class Holder:
            strategy = cls.__new__(cls)

        net = TinyGPT(num_layers=1)
        net.__dict__["_trainer"] = Holder()
        p = plugin(keep_weight=keep_weight)
        p.convert_module(net)
        linear = p.arithmetic(p._maps[0])
        assert isinstance(linear, Float8Linear)
        assert linear.keep_weight == (cls is SingleDeviceStrategy if keep_weight is None else keep_weight)
        p.teardown()


@pytest.mark.parametrize("amax", ["dynamic", "delayed"])
def test_auto_takes_torchao_where_it_fits(monkeypatch: pytest.MonkeyPatch, amax: Any) -> None:
    net = on_cuda(monkeypatch)
    monkeypatch.setattr("lightning_eff.precision._scaling.ao.installed", lambda: True)
    p = FP8Precision(amax=amax)
    assert p._choose(device_of(net)) == ("torchao" if amax == "dynamic" else "scaled_mm")
    monkeypatch.setattr("lightning_eff.precision._scaling.ao.installed", lambda: False)
    assert p._choose(device_of(net)) == "scaled_mm"


def test_odd_sizes_on_cuda_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    net = on_cuda(monkeypatch)
    assert net.blocks is not None
    net.blocks[0].proj = nn.Linear(16, 15)
    with caplog.at_level(logging.INFO):
        FP8Precision(backend="scaled_mm", skip=("head",)).convert_module(net)
    assert "with torch._scaled_mm, fast accumulation" in caplog.text
    assert "padded with zeros to multiples of 16: blocks.0.proj (16 to 15)" in caplog.text


def test_small_maps_stay_on_hardware_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    net = on_cuda(monkeypatch)
    assert net.blocks is not None
    net.blocks[1].proj = nn.Linear(16, 2048)
    with caplog.at_level(logging.INFO):
        p = FP8Precision(backend="scaled_mm")
        p.convert_module(net)
    assert [m.path for m in p._maps] == ["blocks.1.proj"]
    assert "small: FP8 would be slower, by torchao's thresholds: blocks.0.qkv (16 to 48)" in caplog.text
    p = plugin()
    p.convert_module(TinyGPT(num_layers=2))
    assert len(p._maps) == 8 and "skip's 'small' does not apply to emulation" in p.describe()


def test_torchaos_thresholds() -> None:
    """At the borders that torchao publishes."""
    assert too_small(4096, 1024, "tensorwise")
    assert not too_small(4097, 1024, "tensorwise") and not too_small(4096, 1025, "tensorwise")
    for k, n in ((4096, 2048), (1024, 8192), (2048, 4096)):
        assert too_small(k, n, "rowwise"), (k, n)
    for k, n in ((2049, 2049), (1025, 4097), (2049, 4096)):
        assert not too_small(k, n, "rowwise"), (k, n)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"scaling": "columnwise"}, r"scaling='columnwise'\): expected 'tensorwise', 'rowwise' or 'blockwise'"),
        ({"amax": "late"}, r"amax='late'\): expected 'dynamic' or 'delayed'"),
        ({"accumulate": "slow"}, r"accumulate='slow'\): expected 'fast', 'exact' or 'fastest'"),
        ({"backend": "cutlass"}, r"backend='cutlass'\): expected 'auto', 'torchao', 'scaled_mm' or 'emulated'"),
        ({"history": 0}, r"history=0\): expected an integer >= 1: the number of optimizer steps"),
        ({"history": 2.5}, r"history=2.5\): expected an integer >= 1"),
        ({"scaling": "rowwise", "amax": "delayed"}, r"a history has one amax per tensor. Set scaling='tensorwise'"),
        ({"backend": "torchao", "amax": "delayed"}, r"Set backend='scaled_mm' or 'emulated'"),
        ({"backend": "torchao", "scaling": "blockwise"}, r"Set backend='scaled_mm' or 'emulated'"),
        ({"base": "fp16"}, r"base='fp16'\): expected one of 32-true"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=rf"FP8Precision\(.*{expected}"):
        FP8Precision(**arguments)


def test_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"FP8Precision\(base of FP8Precision\)"):
        plugin(base=plugin())
    with pytest.raises(ValueError, match=r"FP8Precision\(skip='head'\): expected a list of keywords"):
        plugin(skip="head")


def fails(p: FP8Precision, **kwargs: Any) -> str:
    with pytest.raises((ValueError, ImportError)) as error:
        trainer(max_steps=1, plugins=[p], **kwargs).fit(module("tiny_gpt"), loader("tiny_gpt"))
    return str(error.value)


def test_errors_at_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the device is 'cpu', which has no float8 matrix units" in fails(FP8Precision())
    assert "set backend='emulated'" in fails(FP8Precision())
    assert "found no linear layer" in fails(plugin(skip=("head", "blocks")))
    assert "'block.0' names no module. Use 'head', 'small' or a dotted path" in fails(plugin(skip=("block.0",)))
    monkeypatch.setattr("lightning_eff.precision._scaling.ao.installed", lambda: False)
    assert "'.[torchao]'" in fails(FP8Precision(backend="torchao"))
    old = on_cuda(monkeypatch, (8, 0))
    for backend in ("auto", "scaled_mm"):
        with pytest.raises(ValueError, match=r"capability is 8\.0.*Use an NVIDIA GPU .* set backend='emulated'"):
            FP8Precision(backend=backend).convert_module(old)
    plugin().convert_module(old)


@pytest.mark.parametrize("backend", ["auto", "scaled_mm"])
def test_blockwise_scaling_needs_its_kernels_device(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    asked = rf"FP8Precision\(scaling='blockwise', backend='{backend}'\): "
    with pytest.raises(ValueError, match=asked + "the device is 'cpu'.*set backend='emulated'"):
        FP8Precision("blockwise", backend=backend).convert_module(TinyGPT())
    for capability in ((8, 0), (8, 9)):
        with pytest.raises(ValueError, match=asked + r".*capability 9\.0 or later, or of 8\.9 with scaling='rowwise'"):
            FP8Precision("blockwise", backend=backend).convert_module(on_cuda(monkeypatch, capability))
    found: list[tuple[int, ...]] = []

    def product(a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        found.append((*a.inverse.shape, *b.inverse.shape))
        return emulated(a, b, dtype, False)

    monkeypatch.setattr("lightning_eff.kernels.fp8_matmul.matmul", product)
    net, p = on_cuda(monkeypatch), FP8Precision("blockwise", backend=backend, base="32-true", skip=())
    net.head = nn.Linear(16, 200, bias=False)
    p.convert_module(net)
    assert "in the Triton kernel" in p.describe() and "_scaled_mm" not in p.describe()
    net.head(torch.randn(150, 16, requires_grad=True)).sum().backward()
    assert found == [(150, 1, 2, 1), (150, 2, 1, 2), (200, 2, 16, 2)], "y, dx and dW, with blocks of the weight"


def test_other_strategies_refuse_it() -> None:
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision` plugin, found .*FP8"):
        pl.Trainer(strategy=pl.strategies.FSDPStrategy(precision_plugin=plugin()), accelerator="cpu")
    with pytest.raises(Exception, match=r"(?i)multiple|more than"):
        trainer(plugins=[plugin(), MixedPrecision("bf16-mixed", "cpu")])
    net = TinyGPT()
    deepspeed = pl.strategies.DeepSpeedStrategy.__new__(pl.strategies.DeepSpeedStrategy)
    deepspeed.__dict__["_parallel_devices"] = None

    class Holder:
        strategy = deepspeed

    net.__dict__["_trainer"] = Holder()
    with pytest.raises(
        ValueError, match=r"FP8Precision: DeepSpeedStrategy casts .* Use a single device, strategy='ddp'"
    ):
        plugin()._check(net)
