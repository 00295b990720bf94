"""Activations that wait in host memory: exact gradients, the bytes that move, what stays, and what is refused."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_eff.memory._compression.saved import is_weight_copy
from lightning_eff.memory._hosting.host import HostStore
from lightning_eff.memory.activation_offload import ActivationOffload, Offloading
from lightning_eff.model.growth.progressive_layer_dropping import ProgressiveLayerDropping
from lightning_eff.optim.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from tests.cases import Case, classifier
from tests.models import TinyClassifier, TinyGPT, flat, loader, module, on_gpu, trainer
from tests.runs import MODES, NUM_STEPS, checkpoints, differences, final_state, fit

CASES = {
    "ActivationOffload": Case(
        active=lambda: ActivationOffload(min_bytes=64),
        neutral=lambda: ActivationOffload(min_bytes=math.inf),
        exact=True,
        figure="bytes_to_host",
        lost=(classifier, "classifier", "is as large"),
        as_is=lambda: ActivationOffload(),
    )
}

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STACKS = {"tiny_gpt": "blocks", "gpt2": "model.transformer.h"}


def offload(**kwargs: Any) -> ActivationOffload:
    return ActivationOffload(**{"min_bytes": 256, **kwargs})


# -- the same training, bit for bit


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("prefetch", [0, 3])
def test_trains_as_plain(mode: str, prefetch: int) -> None:
    whole = final_state(*fit("tiny_gpt", list, **MODES[mode]))
    technique = offload(prefetch=prefetch)
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: [technique], **MODES[mode]))) == []
    assert technique._total["bytes_to_host"] > 1e5, "and something moved"


@pytest.mark.parametrize("model", ["gpt2", "llama", "bert", "vit", "classifier"])
def test_trains_unchanged_modules_as_plain(model: str) -> None:
    whole = final_state(*fit(model, list, max_steps=3))
    assert differences(whole, final_state(*fit(model, lambda: [offload(min_bytes=64)], max_steps=3))) == []


@pytest.mark.parametrize("model", sorted(STACKS))
def test_blocks_alone_train_as_plain(model: str) -> None:
    whole = final_state(*fit(model, list, max_steps=3))
    technique = offload(layers=STACKS[model])
    assert differences(whole, final_state(*fit(model, lambda: [technique], max_steps=3))) == []
    assert technique._total["bytes_to_host"] > 1e5


def test_resumes_with_and_without(tmp_path: Path) -> None:
    whole = final_state(*fit("tiny_gpt", lambda: [offload()], directory=tmp_path))
    path = checkpoints(tmp_path)[4]
    technique = offload()
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: [technique], resume=path))) == []
    assert technique._steps == NUM_STEPS
    state = torch.load(path, weights_only=True)
    assert state["callbacks"][technique.state_key]["total"]["bytes_to_host"] * NUM_STEPS == pytest.approx(
        5 * technique._total["bytes_to_host"]
    )
    net = module("tiny_gpt")
    net.load_state_dict(state["state_dict"], strict=True)


# -- how much moves


class _Ledger:
    """Every tensor that autograd saves in a plain pass, held here, so that addresses tell storages apart."""

    def __init__(self, staying: list[Tensor]) -> None:
        self.saved: list[Tensor] = []
        self._staying = {t.untyped_storage().data_ptr() for t in staying}

    def bytes_of_storages(self, min_bytes: int) -> int:
        sizes = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in self.saved
            if t.is_floating_point() and t.nbytes >= min_bytes and not self._is_staying(t)
        }
        return sum(sizes.values())

    def _is_staying(self, t: Tensor) -> bool:
        return t.untyped_storage().data_ptr() in self._staying

    def hooks(self) -> saved_tensors_hooks:
        def pack(t: Tensor) -> Tensor:
            self.saved.append(t.detach())
            return t.detach()

        return saved_tensors_hooks(pack, lambda t: t)


class _Pass(pl.Callback):
    """Runs the step once more, outside the trainer's eyes, on the first batch."""

    def __init__(self, run: Callable[[pl.LightningModule, Any], None]) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            state = torch.get_rng_state()
            self.run(pl_module, batch)
            torch.set_rng_state(state)


@pytest.mark.parametrize("model", ["tiny_gpt", "gpt2", "bert"])
@pytest.mark.parametrize("min_bytes", [1000, 20000])
def test_bytes_moved_are_those_of_the_large_saved_tensors(model: str, min_bytes: int) -> None:
    expected: list[int] = []

    def run(net: pl.LightningModule, batch: Any) -> None:
        ledger = _Ledger([*net.parameters(), *net.buffers(), *tree_leaves(dict(batch))])
        with ledger.hooks():
            loss = type(net).training_step(_Mute(net), batch, 0)
        expected.append(ledger.bytes_of_storages(min_bytes))
        del loss

    technique = offload(min_bytes=min_bytes)
    fit(model, lambda: [technique], callbacks=[_Pass(run)], max_steps=1)
    report = technique.report()
    assert report["bytes_to_host"] == report["bytes_held"] == expected[0] > 0
    assert report["bytes_to_device"] == expected[0], "each came back once"


class _Mute:
    """The module, without its log."""

    def __init__(self, net: pl.LightningModule) -> None:
        self._net = net

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if name == "log" else getattr(self._net, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._net(*args, **kwargs)


class _Live(TorchDispatchMode):
    """Weak references to all storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def live(self, apart: set[int]) -> int:
        held = {key: n for key, (ref, n) in self.storages.items() if not ref.expired() and key not in apart}
        return sum(held.values())


def test_what_is_live_between_forward_and_backward_falls() -> None:
    live: dict[str, int] = {}

    @contextmanager
    def watch(name: str, held: list[Tensor], store: HostStore | None) -> Iterator[None]:
        with _Live() as mode:
            yield
        # host buffers stand for another memory
        units = [] if store is None else [unit() for unit in store._units.values()]
        apart = [*held, *(unit._buffer for unit in units if unit is not None)]
        live[name] = mode.live({t.untyped_storage()._cdata for t in apart})

    class Net(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found = [c for c in self.trainer.callbacks if isinstance(c, ActivationOffload)]
            held = [*self.parameters(), *batch.values()]
            with watch("offload" if found else "plain", held, found[0]._offloading.store if found else None):
                return super().training_step(batch, batch_idx)

    for callbacks in ([], [offload(min_bytes=2000)]):
        pl.seed_everything(1, verbose=False)
        t = trainer(*callbacks, max_steps=1)
        t.fit(Net(), loader("tiny_gpt"))
    moved = callbacks[0].report()["bytes_to_host"]
    fallen = live["plain"] - live["offload"]
    assert fallen == moved or (on_gpu() and 0.8 * moved < fallen < moved), "on a GPU some are on their way yet"
    assert live["offload"] < 0.2 * live["plain"]


def test_nothing_waits_after_a_step() -> None:
    held: list[tuple[int, int, int]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            store = technique._offloading.store
            held.append((store.bytes_on_host, store.bytes_on_device, store._pool.num_bytes))

    technique = offload()
    fit("gpt2", lambda: [technique], callbacks=[Watch()], max_steps=4)
    assert len(held) == 4 and all(row[:2] == (0, 0) for row in held)
    assert len({row[2] for row in held}) == 1, "host memory is used again"


def test_blocks_alone_move_what_is_saved_in_them() -> None:
    class Net(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * torch.ones(4, 32, 61, device=ids.device).exp()

    moved: dict[str | None, float] = {}
    for layers in (None, "blocks"):
        technique = offload(layers=layers, min_bytes=20000)
        t = trainer(technique, max_steps=1)
        t.fit(Net(), loader("tiny_gpt"))
        moved[layers] = technique.report()["bytes_to_host"]
    # the logits' log-softmax, and the factor, of 4 x 32 x 61 floats; blocks save four times as wide activations
    assert moved[None] - moved["blocks"] == 2 * 4 * 32 * 61 * 4
    assert moved["blocks"] > 0


def test_blocks_that_run_outside_the_training_step_are_left_alone() -> None:
    moved: list[float] = []

    def run(net: pl.LightningModule, batch: Any) -> None:
        net(batch["input_ids"]).sum().backward()
        moved.append(technique._offloading.store.bytes_to_host)

    technique = offload(layers="blocks")
    fit("tiny_gpt", lambda: [technique], callbacks=[_Pass(run)], max_steps=1)
    assert moved == [0] and technique.report()["bytes_to_host"] > 0


# -- what stays


def _offloaded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    found: list[Tensor] = []
    put = HostStore.put

    def watched(self: HostStore, tensor: Tensor) -> Any:
        found.append(tensor.detach().clone())
        return put(self, tensor)

    monkeypatch.setattr(HostStore, "put", watched)
    return found


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_parameters_stay_in_any_precision(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _offloaded(monkeypatch)
    fit("tiny_gpt", lambda: [offload(min_bytes=1)], max_steps=1, precision=precision)
    assert len(found) > 50
    assert any(t.dtype is torch.bfloat16 for t in found) == (precision == "bf16-mixed")
    pl.seed_everything(1, verbose=False)
    for p in module("tiny_gpt").parameters():  # as they were in that step
        if p.std() > 0:  # not the norms' ones and zeros
            for values in (p, p.bfloat16()):
                assert not any(t.dtype == values.dtype and t.numel() == p.numel() and _same(t, values) for t in found)


def _same(a: Tensor, b: Tensor) -> bool:
    """The same numbers, in whatever order."""
    return torch.equal(a.cpu().flatten().sort()[0], b.detach().cpu().flatten().sort()[0])


def test_a_parameter_is_known_in_every_form() -> None:
    p = nn.Parameter(torch.randn(6, 6))
    x = p * 1
    for form in (p, p.t(), p[1:3], p.bfloat16(), p.bfloat16().t(), p.view(-1), p.expand(2, 6, 6), p.half()[0]):
        assert is_weight_copy(form)
    for other in (x, x.bfloat16(), x.t(), p + 1, torch.randn(6), torch.randn(6, requires_grad=True).bfloat16()):
        assert not is_weight_copy(other)


def test_buffers_and_the_batch_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.full((4, 8), 2.0))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.layer(batch[0])  # saves the batch
            return (hidden * self.scale).tanh().sum()  # saves the buffer and the result

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = _offloaded(monkeypatch)
    trainer(offload(min_bytes=1), max_steps=1).fit(Net(), loader("classifier"))
    assert len(found) == 1 and found[0].abs().max() <= 1.0, "the result of tanh alone"


# -- with other ways of training


class _Penalty(TinyClassifier):
    """A gradient penalty: a backward pass through a backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self(x), batch[1])
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + g.square().sum()


class _Twice(TinyClassifier):
    """Two backward passes through one graph, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 2)
        optimizer.step()


class _Checkpointed(TinyGPT):
    """Blocks that the user recomputes: their inner tensors are never seen."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks or ():
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("build", "data"), [(_Penalty, "classifier"), (_Twice, "classifier"), (_Checkpointed, "tiny_gpt")]
)
def test_other_backward_passes_are_exact(build: Callable[[], pl.LightningModule], data: str) -> None:
    found = []
    for callbacks in ([], [offload(min_bytes=64)]):
        pl.seed_everything(1, verbose=False)
        net = build()
        t = trainer(*callbacks, max_steps=4)
        t.fit(net, loader(data))
        found.append(final_state(net, t))
    assert differences(*found) == []


def test_dropped_blocks_save_nothing() -> None:
    def dropping() -> ProgressiveLayerDropping:
        return ProgressiveLayerDropping(theta_min=0.3, gamma=20.0)

    rows: list[tuple[int, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            rows.append((int(drop.report()["layers_dropped"]), technique.report()["bytes_to_host"]))

    whole = final_state(*fit("tiny_gpt", lambda: [dropping()]))
    drop, technique = dropping(), offload(layers="blocks")
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: [drop, technique], callbacks=[Watch()]))) == []
    full = max(moved for _, moved in rows)
    assert len({dropped for dropped, _ in rows}) > 2
    assert all(moved == full * (4 - dropped) / 4 for dropped, moved in rows)


def test_both_passes_of_a_two_pass_method() -> None:
    def sharp() -> SharpnessAwareMinimization:
        return SharpnessAwareMinimization(rho=0.1)

    whole = final_state(*fit("tiny_gpt", lambda: [sharp()], max_steps=4))
    technique = offload()
    assert differences(whole, final_state(*fit("tiny_gpt", lambda: [sharp(), technique], max_steps=4))) == []
    alone = offload()
    fit("tiny_gpt", lambda: [alone], max_steps=4)
    assert technique.report()["bytes_to_host"] == 2 * alone.report()["bytes_to_host"]
    assert technique.report()["bytes_held"] == alone.report()["bytes_held"]


@pytest.mark.filterwarnings("ignore")  # torch's compiler, about its own insides
@pytest.mark.parametrize("layers", [None, "blocks"])
def test_compiled_blocks(layers: str | None) -> None:
    class Net(TinyGPT):
        def configure_model(self) -> None:
            for block in self.blocks or ():
                block.compile(backend="aot_eager")

    found = []
    for callbacks in ([], [offload(layers=layers)]):
        torch._dynamo.reset()
        pl.seed_everything(1, verbose=False)
        net = Net(num_layers=2, dropout=0.0)
        t = trainer(*callbacks, max_steps=2)
        t.fit(net, loader("tiny_gpt"))
        found.append(final_state(net, t))
    assert differences(*found) == []
    assert callbacks[0]._total["bytes_to_host"] > 1e5


# -- errors


@pytest.mark.parametrize("min_bytes", [64, 10**6])
def test_a_change_in_place_raises_as_in_plain_training(min_bytes: int) -> None:
    class Net(TinyClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.blocks[0](batch[0]).tanh()
            loss = F.cross_entropy(self.head(hidden), batch[1])
            if batch_idx == 2:
                hidden.detach().mul_(2)
            # large enough to leave, so that with the larger min_bytes the changed one is among those that stay
            return loss + torch.ones(10**6, device=loss.device).mul(loss).exp().mean()

    for callbacks in ([], [offload(min_bytes=min_bytes)]):
        t = trainer(*callbacks, max_steps=5)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            t.fit(Net(), loader("classifier"))
        assert t.global_step == 2


@pytest.mark.parametrize("layers", [None, "blocks"])
def test_nothing_large_enough_is_an_error_before_weights_change(layers: str | None) -> None:
    net = module("tiny_gpt")
    before = flat(net)
    with pytest.raises(ValueError, match=r"none of the \d+ tensors .* is as large.* the largest that could leave has"):
        trainer(ActivationOffload(layers=layers), max_steps=3).fit(net, loader("tiny_gpt"))
    assert torch.equal(flat(net), before)


@pytest.mark.filterwarnings("ignore:.*returned .None")
def test_it_is_an_error_also_where_the_first_step_returns_none() -> None:
    net = module("tiny_gpt")
    step = net.training_step
    net.training_step = lambda batch, batch_idx: None if batch_idx == 0 else step(batch, batch_idx)
    with pytest.raises(ValueError, match=r"none of the \d+ tensors .* is as large"):
        trainer(ActivationOffload(), max_steps=3).fit(net, loader("tiny_gpt"))


def test_blocks_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"ActivationOffload\(layers='model.h'\).*Candidates: 'blocks' \(4 x Block\)"):
        trainer(offload(layers="model.h"), max_steps=3).fit(module("tiny_gpt"), loader("tiny_gpt"))


def test_blocks_within_a_compiled_module_are_an_error() -> None:
    net = module("gpt2")
    net.model = torch.compile(net.model, backend="eager")
    technique = offload(layers="model._orig_mod.transformer.h")
    with pytest.raises(ValueError, match="inside 'model', which is compiled as a whole"):
        trainer(technique, max_steps=3).fit(net, loader("gpt2"))


@pytest.mark.parametrize("kwargs", [{"min_bytes": 0}, {"min_bytes": math.nan}, {"prefetch": -1}, {"prefetch": True}])
def test_arguments_out_of_range(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"ActivationOffload\({next(iter(kwargs))}=.*expected"):
        ActivationOffload(**kwargs)


@pytest.mark.skipif(on_gpu(), reason="of a CPU")
def test_says_once_that_nothing_is_gained_on_a_cpu() -> None:
    with pytest.warns(PossibleUserWarning) as caught:
        fit("tiny_gpt", lambda: [offload()], max_steps=3)
    assert sum("nothing is gained on a CPU" in str(w.message) for w in caught) == 1


# -- no trace


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("layers", [None, "blocks"])
def test_leaves_no_trace(layers: str | None, fails: bool) -> None:
    class Net(TinyGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            output = super().training_step(batch, batch_idx)
            if fails and batch_idx == 2:
                raise KeyError("planted")
            return output

    net, technique = Net(), offload(layers=layers)
    stores: list[HostStore] = []

    class Watch(pl.Callback):
        def on_train_start(self, *args: Any) -> None:
            stores.append(technique._offloading.store)

    t = trainer(technique, Watch(), max_steps=4)
    if fails:
        with pytest.raises(KeyError, match="planted"):
            t.fit(net, loader("tiny_gpt"))
    else:
        t.fit(net, loader("tiny_gpt"))
    assert not any(name.endswith("_call_impl") for block in net.blocks for name in vars(block))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert (stores[0]._pool.num_bytes, stores[0].bytes_on_host) == (0, 0)
    assert technique._offloading is None


@cuda
def test_cuda_gradients_are_exact_and_memory_falls() -> None:
    peaks: dict[str, int] = {}
    found: list[list[Tensor]] = []
    for name in ("plain", "offload"):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(24))).cuda()
        x = torch.randn(16384, 512, device="cuda")
        held = torch.cuda.memory_allocated()
        offloading = Offloading(HostStore(), 2**20)
        offloading.begin(net, x)
        with offloading.hooks() if name == "offload" else torch.enable_grad():
            loss = net(x).square().mean()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.memory_allocated() - held
        loss.backward()
        found.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks["offload"] < 0.25 * peaks["plain"]
