"""What an FP8 linear layer launches: operations of torch that run kernels on a GPU, and Triton kernels."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_eff.kernels.fp8_cast import Peak, cast, reference_cast
from lightning_eff.precision._scaling.history import AmaxHistory
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import scaled_mm, scaled_mm_for

# Operations that only make tensors or views
FREE = {
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "view",
        "_unsafe_view",
        "as_strided",
        "t",
        "transpose",
        "slice",
        "select",
    ),
    *("unbind", "split", "detach", "alias", "expand", "unsqueeze", "squeeze", "permute"),
}
KERNELS = ("tile_kernel", "amax_kernel", "rows_kernel")


class _Launches(TorchDispatchMode):
    """Counts the operations that launch kernels, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class _Counted:
    """A Triton kernel whose launches are counted; the interpreter's own operations are not."""

    def __init__(self, kernel: Any, launches: _Launches) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches.found[self.kernel.__name__] += 1
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


@contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Generator[Counter[str], None, None]:
    from lightning_eff.kernels import _fp8_cast_triton

    with monkeypatch.context() as patches, _Launches() as counted:
        for name in KERNELS:
            patches.setattr(_fp8_cast_triton, name, _Counted(getattr(_fp8_cast_triton, name), counted))
        yield counted.found


def step(linear: Float8Linear, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    y = linear(x, w, None)
    return (y.detach(), *torch.autograd.grad(y, (x, w), g))


def operands(device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, w, g = (torch.randn(*shape, device=device) for shape in ((96, 64), (48, 64), (96, 48)))
    return x.requires_grad_(), w.requires_grad_(), g


def test_delayed_scaling_launches_no_small_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cast for each of x, W and g, and three products; before the history is known, a pass for the amax too."""
    history = AmaxHistory(["map"], 4, device)
    product = scaled_mm_for(device) if device.type == "cuda" else scaled_mm
    linear = Float8Linear("map", "tensorwise", product, fast=True, history=history, recording=lambda: True)
    x, w, g = operands(device)
    with launches(monkeypatch) as first:
        step(linear, x, w, g)
    assert first == {"tile_kernel": 3, "amax_kernel": 3, "zeros": 3, "_scaled_mm": 3}
    history.advance()
    if device.type == "cuda":
        torch.cuda.synchronize()  # the device has answered which peaks are known
    with launches(monkeypatch) as second:
        step(linear, x, w, g)
    assert second == {"tile_kernel": 3, "_scaled_mm": 3}
    assert history._records[0].tolist() == [float(t.detach().abs().max()) for t in (x, w, g)]
    assert not history._scratch.any()


def test_dynamic_scaling_launches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    product = scaled_mm_for(device) if device.type == "cuda" else scaled_mm
    linear = Float8Linear("map", "tensorwise", product, fast=True, history=None, recording=lambda: False)
    x, w, g = operands(device)
    with launches(monkeypatch) as found:
        step(linear, x, w, g)
    assert found == {"tile_kernel": 3, "amax_kernel": 3, "zeros": 3, "_scaled_mm": 3}


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")  # numpy's
def test_the_kernels_history_is_the_references(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with growing and shrinking numbers, an overflow in the gradient and in the input, and micro-batches."""
    from lightning_eff.kernels import _launch

    def run(triton: bool) -> tuple[list[Tensor], Tensor]:
        with monkeypatch.context() as patches:
            patches.setattr(_launch, "uses_triton", lambda x: triton)
            history = AmaxHistory(["map"], 3, device)
            product = scaled_mm_for(device) if device.type == "cuda" else scaled_mm
            recording = [True]
            linear = Float8Linear(
                "map", "tensorwise", product, fast=True, history=history, recording=lambda: recording[0]
            )
            x, w, g = operands(device)
            results: list[Tensor] = []
            for i, size in enumerate((1.0, 4.0, 0.5, torch.inf, 2.0, 3.0)):
                recording[0] = i != 2
                results += step(linear, (x * size).detach().requires_grad_(), w, g / size)
                results += step(linear, x, w, torch.where(g > 2, torch.inf, g) if i in (0, 4) else g)
                history.advance()
            return results, history.amax

    for a, b in zip(*(flat(*run(triton)) for triton in (True, False)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def flat(results: list[Tensor], amax: Tensor) -> list[Tensor]:
    return [*results, amax]


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")  # numpy's
@pytest.mark.parametrize("known", [True, False])
def test_a_cast_records_this_amax_and_others(known: bool, device: torch.device) -> None:
    x = torch.randn(150, 140, device=device)
    for bad in (False, True):
        x[140, 3] = torch.nan if bad else 0.0
        records, pairs = [], []
        for how in (cast, reference_cast):
            others = tuple(torch.tensor(v, device=device) for v in (2.0, torch.inf))
            record = torch.tensor([5.0, 1.0, -1.0], device=device)
            peak = Peak(torch.tensor(1.5, device=device), known, torch.zeros(2, dtype=torch.int32, device=device))
            for _ in range(2):  # the scratch is left as it was
                pairs.append(how(x, torch.float8_e4m3fn, "tensor", peak=peak._replace(record=record, others=others)))
            records.append(record.tolist())
            assert peak.scratch is not None and not peak.scratch.any()
        assert records[0] == records[1] == [5.0, 1.0, -1.0 if bad else float(x.abs().max())]
        assert all(pair.scale is not None and bool(pair.scale.isnan()) == bad for pair in pairs)


def test_what_a_peak_may_hold() -> None:
    x, one = torch.ones(3, 4), torch.ones(())
    for wrong in (
        Peak(one, record=torch.ones(2)),
        Peak(one, record=torch.ones(4), others=(one,) * 3),
        Peak(one, others=(one,) * 3),
    ):
        with pytest.raises(ValueError, match="expected at most two others, and one place more than others"):
            cast(x, torch.float8_e4m3fn, "tensor", peak=wrong)
