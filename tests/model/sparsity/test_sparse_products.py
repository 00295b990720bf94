"""Sparse kernels multiply exactly the masked weights, and a run by them is that by dense products."""

import copy
import functools
import importlib.util
import logging
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_eff import BlockSparsity, SemiStructuredSparsity, SharpnessAwareMinimization
from lightning_eff.model.sparsity._kernels import blocks, products, two_of_four
from lightning_eff.model.sparsity._kernels.products import _Product
from lightning_eff.model.sparsity._masks.two_of_four import mask_of
from tests.kernels.conftest import interpret
from tests.model.sparsity.kernels import BlocksOnACPU, TwoOfFourOnACPU, packed_by_torch
from tests.models import TinyGPT, hugging_face, loader, make_batch
from tests.models import trainer as trainer_on
from tests.runs import SaveBatches, differences, final_state

trainer = functools.partial(trainer_on, accelerator="cpu")  # the stand-ins are for a CPU
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BLOCK = {"size": 16, "columns": 16, "sparsity": 0.5, "start": 0.3}
"""Settings of BlockSparsity that the kernels take."""


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- what is packed, and what is multiplied


def two_of_four_weight(rows: int, columns: int, *, tiles: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    w = numbers(rows, columns, dtype=dtype)
    return w * mask_of(w, (0, 1), tiles=tiles)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_packed_weight_is_exactly_the_masked_one(
    dtype: torch.dtype, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    TwoOfFourOnACPU(monkeypatch)
    w = two_of_four_weight(64, 96, tiles=tiles, dtype=dtype)
    packed = two_of_four.TwoOfFour(w, both=tiles)
    assert torch.equal(packed.times(torch.eye(96, dtype=dtype), None), w.t())
    back = packed.back(torch.eye(64, dtype=dtype))
    assert back is None if not tiles else back is not None and torch.equal(back, w)
    # what the stand-in unpacks are the elements that torch's own format has, found by hand too
    values, _ = packed_by_torch(w)
    kept = w.unflatten(-1, (-1, 4))
    assert torch.equal(values, kept[kept != 0].view(64, 48))


def random_blocks(
    seed: int = 0, *, rows: int = 64, columns: int = 96, wide: int = 16, device: Any = "cpu"
) -> tuple[Tensor, blocks.Places]:
    """A weight of blocks of 16 rows in some order, one row of blocks of which is empty."""
    g = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows // 16, columns // wide, generator=g) < 0.4
    kept[1] = False
    order = torch.randperm(rows, generator=g)
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    mask[order] = kept.repeat_interleave(16, 0).repeat_interleave(wide, 1)
    places = blocks.places_of(mask.to(device), order.to(device), (16, wide))
    return (numbers(rows, columns, seed=seed) * mask).to(device), places


@pytest.mark.parametrize("wide", [16, 32])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_are_exactly_the_masked_weight(transposed: bool, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    BlocksOnACPU(monkeypatch, exact=True)
    w, places = random_blocks(wide=wide)
    packed = blocks.Blocks(w, places, transposed=transposed)
    laid = w.t() if transposed else w  # (out, in)
    assert torch.equal(packed.times(torch.eye(laid.shape[1], dtype=w.dtype), None), laid.t())
    assert torch.equal(packed.back(torch.eye(laid.shape[0], dtype=w.dtype)), laid)
    bias = numbers(laid.shape[0], seed=3)
    x = numbers(2 * packed.multiple, laid.shape[1], seed=4)
    torch.testing.assert_close(packed.times(x, bias), F.linear(x, laid, bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wide", [16, 32])
@pytest.mark.parametrize("rows", [32, 96])
def test_torchs_kernel_computes_what_the_stand_in_does(wide: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which has no products in bfloat16, as this package calls it."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the device computes it below")
    interpret(monkeypatch)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    plain = torch.sparse.__path__[0] + "/_triton_ops.py"
    spec = importlib.util.spec_from_file_location("torch.sparse._triton_ops_interpreted", plain)
    assert spec is not None and spec.loader is not None
    ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)
    monkeypatch.setattr(ops, "_get_device_name", lambda: "a device")
    monkeypatch.setattr(blocks, "_triton_ops", lambda: ops)
    launched = ops._bsr_strided_addmm_kernel

    class Launching:
        def __getitem__(self, grid: list[int]) -> Any:  # the interpreter needs a tuple
            return launched[tuple(grid)]

    monkeypatch.setattr(ops, "_bsr_strided_addmm_kernel", Launching())
    w, places = random_blocks(wide=wide)
    w = w.half()
    for transposed in (False, True):
        laid = w.t() if transposed else w
        packed = blocks.Blocks(w, places, transposed=transposed)
        out, ins = laid.shape
        x, bias, g = (numbers(*s, seed=i, dtype=w.dtype) for i, s in enumerate(((rows, ins), (out,), (rows, out))))
        assert rows % packed.multiple == 0
        for added in (None, bias):
            found = packed.times(x, added)
            right = F.linear(x.double(), laid.double(), None if added is None else added.double())
            assert found.dtype == torch.float16 and found.is_contiguous()
            torch.testing.assert_close(found.double(), right, rtol=2.0**-10, atol=1e-5)
        torch.testing.assert_close(packed.back(g).double(), g.double() @ laid.double(), rtol=2.0**-10, atol=1e-5)


def packings(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Callable[[bool], products.Packed]]:
    """A masked weight of (64, 96), and what packs it for a layer whose weight is transposed or not."""
    if kind == "blocks":
        BlocksOnACPU(monkeypatch, exact=True)
        w, places = random_blocks()
        return w, lambda transposed: blocks.Blocks(w, places, transposed=transposed)
    TwoOfFourOnACPU(monkeypatch, exact=True)
    w = two_of_four_weight(64, 96, tiles=kind == "tiles")
    if kind == "rows":
        return w, lambda transposed: two_of_four.TwoOfFour(w, both=False)
    return w, lambda transposed: two_of_four.TwoOfFour(w.t() if transposed else w, both=True)


@pytest.mark.parametrize(
    ("kind", "transposed"), [("rows", False), ("tiles", False), ("tiles", True), ("blocks", False), ("blocks", True)]
)
@pytest.mark.parametrize("rows", [32, 96])
def test_gradients_are_those_of_a_dense_product(
    kind: str, transposed: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All elements of the weight have one, those that are zero too; and it can be differentiated again."""
    masked, pack = packings(kind, monkeypatch)
    packed = pack(transposed)
    out, ins = masked.shape[::-1] if transposed else masked.shape

    def run(sparse: bool) -> list[Tensor]:
        x, w, b = (t.clone().requires_grad_() for t in (numbers(rows, ins, seed=1), masked, numbers(out, seed=2)))
        y = _Product.apply(x, w, b, packed, transposed) if sparse else F.linear(x, w.t() if transposed else w, b)
        plain = torch.autograd.grad(y.sin().sum(), (x, w, b), retain_graph=True)  # pyright: ignore[reportAttributeAccessIssue]
        (gx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)  # pyright: ignore[reportAttributeAccessIssue]
        twice = torch.autograd.grad(gx.square().sum(), (x, w, b))
        return [y, *plain, *twice]  # pyright: ignore[reportReturnType]

    for found, right in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)


# -- runs


class Net(pl.LightningModule):
    """Two layers, one of them called twice and recomputed, and a head that shares a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(32, 64), nn.Linear(64, 64)
        self.head, self.tied = nn.Linear(64, 5, bias=False), nn.Linear(64, 64)
        self.tied.weight = self.twice.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = F.relu(self.first(x), inplace=True)
        h = self.twice(h) + checkpoint(self.twice, h.tanh(), use_reentrant=False)
        return F.cross_entropy(self.head(self.tied(h)).flatten(0, 1), y.flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def batches(count: int, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(3, 7, 32, generator=g).to(dtype), torch.randint(5, (3, 7), generator=g)) for _ in range(count)]
    return DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType]


def made(kind: str, backend: Any = "auto") -> Any:
    if kind == "blocks":
        return BlockSparsity(backend=backend, **BLOCK)  # pyright: ignore[reportArgumentType]
    return SemiStructuredSparsity(0.05, tiles=kind == "tiles", backend=backend)


def on_a_cpu(kind: str, monkeypatch: pytest.MonkeyPatch, *, exact: bool = False) -> BlocksOnACPU | TwoOfFourOnACPU:
    return (BlocksOnACPU if kind == "blocks" else TwoOfFourOnACPU)(monkeypatch, exact=exact)


def weights(net: pl.LightningModule, technique: Any) -> dict[str, Tensor]:
    """In the end, those that are trained too."""
    dense = (technique.state_dict().get("dense") or {}) if isinstance(technique, SemiStructuredSparsity) else {}
    return {**net.state_dict(), **{f"dense {name}": w for name, w in dense.items()}}


KINDS = ("rows", "tiles", "blocks")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}])
def test_a_run_by_kernels_is_that_by_dense_products(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, ends = on_a_cpu(kind, monkeypatch, exact=True), list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        net, technique, before = Net().double(), made(kind, backend), kernels.calls
        data = batches(6 * settings.get("accumulate_grad_batches", 1), torch.float64)
        t = trainer(technique, max_steps=6, limit_val_batches=2, num_sanity_val_steps=0, **settings)
        t.fit(net, data, data)
        ran = {"first.weight", "twice.weight"} if backend == "sparse" else set[str]()
        assert technique._products.ran == ran and technique.report()["kernels"] == len(ran)
        assert (kernels.calls > before) == bool(ran)
        assert ("this saved no time" in technique.summary()) == (not ran)
        assert type(net.first) is nn.Linear and "forward" not in vars(net.first) and not technique._products._packed
        ends.append({**weights(net, technique), "val_loss": t.callback_metrics["val_loss"]})
    assert ends[0].keys() == ends[1].keys()
    for name, end in ends[0].items():
        torch.testing.assert_close(end, ends[1][name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("kind", "forward", "back"), [("rows", 4, 0), ("tiles", 4, 4), ("blocks", 4, 4)])
def test_the_products_that_kernels_compute_in_a_step(
    kind: str, forward: int, back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The four layers' calls and one recomputed; backward, each but the first layer's, whose input needs no gradient."""
    kernels = on_a_cpu(kind, monkeypatch, exact=True)
    technique = made(kind)
    if kind == "blocks":
        technique.start = 0.0
    trainer(technique, max_steps=1).fit(Net().double(), batches(1, torch.float64))
    assert kernels.calls == forward + 1 + (back - 1 if back else 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(kind: str, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, sums over uses of a weight are in float32 here and in bfloat16 in dense products."""
    kernels, ends = on_a_cpu(kind, monkeypatch), list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        net, technique = Net(), made(kind, backend)
        data = batches(4, torch.bfloat16 if precision == "bf16-true" else torch.float32)
        trainer(technique, max_steps=4, precision=precision).fit(net, data)
        assert technique._products.ran == ({"first.weight", "twice.weight"} if backend == "sparse" else set())
        ends.append(weights(net, technique))
    assert kernels.calls
    start = Net().state_dict()
    for name, end in ends[0].items():
        assert end.dtype == ends[1][name].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
        moved = (ends[1][name].float() - start[name.removeprefix("dense ")]).norm()
        assert float((end.float() - ends[1][name].float()).norm() / moved) < 2.0**-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_exactly(kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(kind, monkeypatch)
    settings: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 3, "precision": "bf16-mixed"}

    def run(*callbacks: Any, **resume: Any) -> dict[str, Tensor]:
        net, technique = Net(), made(kind)
        t = trainer(technique, *callbacks, **settings)
        t.fit(net, batches(12), **resume)
        assert technique._products.ran
        return final_state(net, t)

    whole = run(SaveBatches(tmp_path, [5, 10]))
    for batch in (5, 10):
        again = run(ckpt_path=tmp_path / f"batch={batch}.ckpt", weights_only=True)
        assert differences(whole, again) == []


class Looking(pl.Callback):
    """Copies a layer and the technique within each step."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Tensor) -> None:
        self.copies.append(copy.deepcopy(pl_module.first))
        technique: Any = trainer.callbacks[0]  # pyright: ignore[reportAttributeAccessIssue]
        copied = copy.deepcopy(technique)._products
        assert copied.ran == technique._products.ran and not copied._layers


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_made_within_a_step_is_plain(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(kind, monkeypatch, exact=True)
    looking, technique = Looking(), made(kind)
    trainer(technique, looking, max_steps=4).fit(Net().double(), batches(4, torch.float64))
    assert pickle.loads(pickle.dumps(technique)).summary() == technique.summary()
    assert [type(copied) for copied in looking.copies] == [nn.Linear] * 4
    assert all(not {"forward", "__reduce_ex__", "_shown_by"} & vars(copied).keys() for copied in looking.copies)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_another_technique_moves_are_multiplied_densely(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, ends = on_a_cpu(kind, monkeypatch, exact=True), list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        net, technique = Net().double(), made(kind, backend)
        trainer(technique, SharpnessAwareMinimization(rho=0.5), max_steps=4).fit(net, batches(4, torch.float64))
        ends.append(weights(net, technique))
    assert kernels.calls
    for name, end in ends[0].items():
        torch.testing.assert_close(end, ends[1][name], rtol=1e-9, atol=1e-11)


class Calling(Net):
    """It calls a layer with another weight, within a transform of torch.func, and compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = [torch.compile(self.twice, backend="eager")]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        other = {"weight": 2.0 * self.first.weight.abs(), "bias": self.first.bias}
        h = torch.func.functional_call(self.first, other, (x,)).tanh() + torch.func.vmap(self.first)(x)
        return F.cross_entropy(self.head(self.compiled[0](h)).flatten(0, 1), y.flatten())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_no_kernel_computes_are_dense(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, ends = on_a_cpu(kind, monkeypatch, exact=True), list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        net, technique = Calling().double(), made(kind, backend)
        trainer(technique, max_steps=3).fit(net, batches(3, torch.float64))
        ends.append(weights(net, technique))
    assert kernels.calls == 0
    for name, end in ends[0].items():
        torch.testing.assert_close(end, ends[1][name], rtol=1e-9, atol=1e-11)


class Stepping(Net):
    """It steps two optimizers itself, one after the other, on losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        first = [*self.first.parameters()]
        others = [p for p in self.parameters() if all(p is not q for q in first)]
        return torch.optim.SGD(first, lr=0.3), torch.optim.SGD(others, lr=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_steps_its_optimizers_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(kind, monkeypatch, exact=True)
    ends = list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        net, technique = Stepping().double(), made(kind, backend)
        trainer(technique, max_steps=8).fit(net, batches(4, torch.float64))
        assert len(technique._products.ran) == (2 if backend == "sparse" else 0)
        ends.append(weights(net, technique))
    for name, end in ends[0].items():
        torch.testing.assert_close(end, ends[1][name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_faces_transposed_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(kind, monkeypatch, exact=True)
    ends = list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        torch.manual_seed(0)
        net: Any = hugging_face("gpt2", 2).double().eval()
        technique = made(kind, backend)
        data: DataLoader[Any] = DataLoader([make_batch("gpt2")] * 3, batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(technique, max_steps=3).fit(net, data)
        if backend == "sparse":
            assert technique._products.ran == {n for n in technique.masks if "attn" in n or "mlp" in n}
        ends.append(weights(net, technique))
    for name, end in ends[0].items():
        torch.testing.assert_close(end, ends[1][name], rtol=1e-8, atol=1e-10)


# -- which products run, and what is said of the others


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO)
    return lambda: "\n".join(r.getMessage() for r in caplog.records if "multipl" in r.getMessage())


@pytest.mark.parametrize(
    ("kind", "name"), [("rows", "torch's 2:4 kernels"), ("blocks", "torch's block-sparse kernels")]
)
def test_a_cpu_multiplies_densely_and_says_so_once(kind: str, name: str, told: Callable[[], str]) -> None:
    technique = made(kind)
    trainer(technique, max_steps=3).fit(Net(), batches(3))
    who = type(technique).__name__
    assert told() == f"{who}: masked weights are multiplied densely: {name} need a CUDA device, and this is a CPU."
    with pytest.raises(
        ValueError, match=rf"{who}\(backend='sparse'\): {name} multiply none of the [23] masked .* this is a CPU\. G"
    ):
        trainer(made(kind, "sparse"), max_steps=3).fit(Net(), batches(3))


def test_dense_says_nothing(told: Callable[[], str]) -> None:
    trainer(made("rows", "dense"), max_steps=1).fit(Net(), batches(1))
    assert told() == ""


class Mixed(Net):
    """A layer with a forward of its own, a convolution and an attention beside linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.attention = nn.Conv1d(32, 32, 1), nn.MultiheadAttention(32, 2, batch_first=True)
        self.narrow = nn.Linear(32, 24)
        self.own = nn.Linear(32, 32)
        plain = self.own.forward
        vars(self.own)["forward"] = lambda x: 2.0 * plain(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.attention(*[self.own(batch[0])] * 3)[0]
        x = self.convolution(x.mT).mT
        return super().training_step((x, batch[1]), batch_idx) + self.narrow(x).square().mean()


def test_the_message_says_which_weights_kernels_multiply_and_why_not_others(
    told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu("tiles", monkeypatch)
    trainer(made("tiles"), max_steps=1, precision="bf16-mixed").fit(Mixed(), batches(1))
    (text,) = [line for line in told().splitlines() if "kernels" in line]
    assert text.startswith(
        "SemiStructuredSparsity: torch's 2:4 kernels multiply 2 of 7 masked weights. The others are multiplied densely: "
    )
    for part in (
        "attention.out_proj.weight (its weight is used by nn.MultiheadAttention, which does not call it)",
        "own.weight (its layer computes in a way of its own)",
        "narrow.weight (its sides are not multiples of 16)",
        "convolution.weight, attention.in_proj_weight (no nn.Linear or Conv1D has it)",
    ):
        assert part in text, text


def test_float32_is_multiplied_densely(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = on_a_cpu("rows", monkeypatch)
    trainer(made("rows"), max_steps=1).fit(Net(), batches(1))
    assert kernels.calls == 0
    reason = "it is multiplied in float32, not in float16 or bfloat16"
    names = "first.weight, twice.weight, head.weight"
    assert told() == f"SemiStructuredSparsity: masked weights are multiplied densely: {names} ({reason})."


def test_blocks_of_other_sides_are_multiplied_densely(told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = on_a_cpu("blocks", monkeypatch)
    for size, columns in ((16, 1), (8, 16), (32, 24)):
        technique = BlockSparsity(0.5, size=size, columns=columns, start=0.0, dense=["first"] if columns == 24 else [])
        net = Net() if columns != 24 else TinyGPT(1, dim=96, dropout=0.0)
        data = batches(1) if columns != 24 else loader("tiny_gpt", 16)
        if columns == 24:
            technique.dense = []
        trainer(technique, max_steps=1, precision="bf16-mixed").fit(net, data)
        assert f"blocks have {size} x {columns} elements, and the kernels need powers of two from 16 on" in told()
    assert kernels.calls == 0


@pytest.mark.parametrize("module", [two_of_four, blocks])
def test_the_devices_that_have_the_kernels(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module.unavailable.__wrapped__
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(module, "failed_trial", lambda run: None)
    capability = [(7, 5)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    gpu = torch.device("cuda", 0)
    assert "need compute capability 8.0, and the device has 7.5" in plain(gpu)
    for capability[0] in ((8, 0), (8, 9), (9, 0), (10, 0)):
        assert plain(gpu) is None
    assert "this is a MPS" in plain(torch.device("mps"))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "this is a ROCm device" in plain(gpu)


def test_without_the_library_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    why = two_of_four.unavailable.__wrapped__(torch.device("cuda", 0))
    assert why == "torch's 2:4 kernels need cuSPARSELt, which this torch does not have"
    monkeypatch.setattr(blocks.importlib.util, "find_spec", lambda name: None)
    why = blocks.unavailable.__wrapped__(torch.device("cuda", 0))
    assert why == "torch's block-sparse kernels need triton, which is not installed"


@pytest.mark.parametrize(("module", "stand_in"), [(two_of_four, TwoOfFourOnACPU), (blocks, BlocksOnACPU)])
def test_a_trial_finds_kernels_that_fail_or_are_wrong(
    module: Any, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = module.unavailable.__wrapped__
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    monkeypatch.setattr(module, "below", lambda device, what: None)
    cpu = torch.device("cpu")
    kernels = stand_in(monkeypatch)
    assert plain(cpu) is None and kernels.calls == 1
    monkeypatch.setattr(module, "multiply", lambda *args: kernels.multiply(*args) + 1)
    assert plain(cpu) == "a trial product gave wrong numbers"

    def broken(*args: Any) -> Tensor:
        raise RuntimeError("CUDA error: architecture mismatch\nand more")

    monkeypatch.setattr(module, "multiply", broken)
    assert plain(cpu) == "a trial product failed: RuntimeError: CUDA error: architecture mismatch"


# -- on a GPU


@cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [256, 48])
def test_a_device_multiplies_as_dense_products(kind: str, dtype: torch.dtype, rows: int) -> None:
    module = blocks if kind == "blocks" else two_of_four
    device = torch.device("cuda", torch.cuda.current_device())
    if why := module.unavailable(device):
        pytest.skip(why)
    out, ins = 192, 320
    if kind == "blocks":
        w, places = random_blocks(rows=out, columns=ins, device=device)
        w = w.to(dtype)
        packed: products.Packed = blocks.Blocks(w, places, transposed=False)
    else:
        w = two_of_four_weight(out, ins, tiles=kind == "tiles", dtype=dtype).to(device)
        packed = two_of_four.TwoOfFour(w, both=kind == "tiles")
    x, bias, g = (
        numbers(*shape, seed=i).to(device, dtype) for i, shape in enumerate(((rows, ins), (out,), (rows, out)))
    )
    for added in (None, bias):
        right = F.linear(x.double(), w.double(), None if added is None else added.double())
        found = packed.times(x, added)
        assert found.dtype == dtype and found.shape == (rows, out)
        assert float((found.double() - right).norm() / right.norm()) < torch.finfo(dtype).eps
    back = packed.back(g)
    if kind == "rows":
        assert back is None
    else:
        assert back is not None and back.shape == (rows, ins)
        right = g.double() @ w.double()
        assert float((back.double() - right).norm() / right.norm()) < torch.finfo(dtype).eps


@cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_run_on_a_device_is_that_by_dense_products(kind: str, precision: Any) -> None:
    module = blocks if kind == "blocks" else two_of_four
    if why := module.unavailable(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(why)
    ends = list[dict[str, Tensor]]()
    for backend in ("sparse", "dense"):
        net, technique = Net(), made(kind, backend)
        data = batches(4, torch.bfloat16 if precision == "bf16-true" else torch.float32)
        trainer(technique, max_steps=4, precision=precision, accelerator="gpu").fit(net, data)
        assert technique._products.ran == ({"first.weight", "twice.weight"} if backend == "sparse" else set())
        ends.append({name: w.cpu() for name, w in weights(net, technique).items()})
    start = Net().state_dict()
    for name, end in ends[0].items():
        moved = (ends[1][name].float() - start[name.removeprefix("dense ")]).norm()
        assert float((end.float() - ends[1][name].float()).norm() / moved) < 2.0**-4, name
