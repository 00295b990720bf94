"""FP8 training: linear layers in E4M3 with gradients in E5M2 (Micikevicius et al. 2022, arXiv:2209.05433)."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._lightning.extras import install
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff.precision._linear.maps import LinearMap, Rule
from lightning_eff.precision._linear.plugin import LinearPrecision, Skip
from lightning_eff.precision._linear.products import Arithmetic
from lightning_eff.precision._scaling import ao, blocks
from lightning_eff.precision._scaling.casts import Scaling
from lightning_eff.precision._scaling.history import AmaxHistory
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import MULTIPLE, Product, emulated, refusal, scaled_mm_for

Amax = Literal["dynamic", "delayed"]
Accumulate = Literal["fast", "exact", "fastest"]
Backend = Literal["auto", "torchao", "scaled_mm", "emulated"]


def too_small(k: int, n: int, scaling: Scaling) -> bool:
    """Return whether an H100 runs a layer from K to N features slower in float8 than in bfloat16, casts included.

    The thresholds are those of torchao 0.18 (``_auto_filter_for_tensorwise`` and ``_auto_filter_for_rowwise`` in
    torchao/float8/float8_linear_utils.py), measured on H100s with compiled casts. Other devices may differ.
    """
    if scaling == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


class FP8Precision(LinearPrecision):
    """Run linear layers in FP8, in the forward and the backward pass.

    With x (M, K) and W (N, K), the products y = x W^T, dx = g W and dW = g^T x take x and W in E4M3 and the gradient g in
    E5M2. The ``base`` plugin computes everything else. Parameters, their names, the optimizer and checkpoints are those of
    the plain module. Hugging Face's ``Conv1D`` counts as a linear layer. The output has the dtype of x, and the weight's
    gradient that of the weight. A value that is not finite makes its products NaN. The plugin logs at setup which layers stay
    unchanged, and why.

    Use it for large linear layers on an H100, L40S, RTX 4090 or later, where float8 products run up to twice as fast as
    bfloat16. Between forward and backward, a layer stores x and W in float8 (one byte per element; see ``keep_weight``). It
    rounds activations and gradients to 8 bits, so check the loss against bfloat16.

    Each cast multiplies by ``448 / amax`` for E4M3 and ``57344 / amax`` for E5M2. The scaling decides the elements over which
    amax is taken:

    - "tensorwise": the whole operand. This is the fastest.
    - "rowwise": each row of a product's left operand and each column of its right one. x, W and g are cast twice, once per
      product (W in the forward pass, with ``keep_weight``). Rows or channels with large values no longer flush the others to
      zero.
    - "blockwise": each 1 x 128 block of x and g along the contraction, and each 128 x 128 block of W (DeepSeek-V3,
      section 3.3, where g is E4M3 too). Products run in cuBLASLt or in a Triton kernel, or are emulated.

    Args:
        scaling: the elements that share a scale, as above.
        amax: how amax is found. "dynamic" takes it from the operand that is cast. "delayed", for tensorwise scaling, takes
            the largest value of the last ``history`` optimizer steps, over micro-batches and ranks, for each layer's x, W and
            g. Larger values saturate. A tensor without a history uses its own amax. Only the Trainer's backward passes count,
            not evaluation or recomputed blocks. Checkpoints store the history. With manual optimization, each optimizer's
            step ends a step.
        history: the number of optimizer steps that delayed scaling remembers.
        base: the plugin for everything else. "32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", or a plugin.
        skip: the layers to leave unchanged. "head" is the layers outside the blocks, whose rounding error matters most.
            "small" is the layers that float8 makes slower, by torchao's thresholds; it applies on float8 hardware, not to
            emulation. Other entries are dotted paths of layers, or of modules above them.
        accumulate: how float8 hardware sums products. "fast" uses fewer bits than float32 for the forward product, as is
            common, and "exact" does not. "fastest" uses fewer bits for the backward products too. Hopper then keeps about 14
            bits of a sum, and the error grows with the length of the sum, which for W's gradient is the number of tokens. An
            emulation (benchmarks/fp8_accumulation.py) with sums of 16,384 gives errors of 0.3 % for operands of zero mean,
            whose casts are off by 4 to 6 %. If both operands have a mean of one standard deviation, it gives 14 %, and exact
            sums are off by 0.01 %. It has no effect with blockwise scaling, where the hardware sums blocks of 128 and float32
            sums the blocks.
        keep_weight: whether a layer keeps W in float8 for the backward pass, one byte per element, instead of casting W again.
            The numbers are the same. None keeps it, except under ``ModelParallelStrategy``, which frees W between forward and
            backward. torchao never keeps it.
        backend: the implementation of the products. "scaled_mm" is ``torch._scaled_mm``, for NVIDIA GPUs of compute
            capability 8.9 or later. It pads sizes to multiples of 16, and rowwise results may pass through bfloat16. It also
            runs on a CPU, without a speed-up. With blockwise scaling it is ``torch.nn.functional.scaled_mm`` where a trial at
            setup shows that it works (Hopper with CUDA 12.9), else :mod:`lightning_eff.kernels.fp8_matmul`, for compute
            capability 9.0 or later. The log says which. "torchao" is ``torchao.float8`` (dynamic amax, tensorwise or
            rowwise), with ``torch._scaled_mm`` for layers that torchao does not support. "emulated" runs anywhere, slower
            than bfloat16: casts are bit-identical to the hardware's, and products are computed in float32. "auto" is
            "torchao" where it is installed and supports the settings, else "scaled_mm", and never emulates. The device is
            that of the Trainer's strategy, or of the parameters outside a Trainer.

    Raises:
        ValueError: for a value out of range or an unsupported combination. At setup, if the device has no float8 hardware and
            ``backend`` needs it, or if no layer remains.
        TypeError: if ``base`` has the wrong type.
        ImportError: at setup, if ``backend="torchao"`` and it is not installed.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, plugins=[FP8Precision("rowwise")])

    References:
        Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433.
        DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv:2412.19437 (blockwise scaling).
    """

    saves: ClassVar[str] = "time: linear layers run in FP8"
    paper: ClassVar[str] = "Micikevicius et al. 2022, arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437"
    constraints: ClassVar[str] = (
        "needs an NVIDIA GPU of compute capability 8.9 or later, or backend='emulated', which is slow"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"scaling": Choice(("tensorwise", "rowwise", "blockwise"))},
        lambda profile: None if profile.float8 else "the device has no FP8 matrix units, and emulation saves no time",
    )
    words: ClassVar[tuple[str, ...]] = ("head", "small")

    @declared
    def __init__(
        self,
        scaling: Scaling = "tensorwise",
        amax: Amax = "dynamic",
        *,
        history: Annotated[int, Count()] = 16,
        base: str | Precision = "bf16-mixed",
        skip: Skip = ("head", "small"),
        accumulate: Accumulate = "fast",
        keep_weight: bool | None = None,
        backend: Backend = "auto",
    ) -> None:
        if amax == "delayed" and scaling != "tensorwise":
            raise ValueError(
                f"FP8Precision({scaling=}, {amax=}): a history has one amax per tensor. Set scaling='tensorwise' or"
                " amax='dynamic'."
            )
        if backend == "torchao" and (amax == "delayed" or scaling == "blockwise"):
            raise ValueError(
                f"FP8Precision({scaling=}, {amax=}, {backend=}): torchao supports only dynamic amax with tensorwise or"
                " rowwise scaling. Set backend='scaled_mm' or 'emulated'."
            )
        super().__init__(base, skip=skip)
        self.scaling: Scaling = scaling
        self.amax: Amax = amax
        self.history_steps = history
        self.accumulate: Accumulate = accumulate
        self.keep_weight = keep_weight
        self.backend: Backend = backend
        self._device = torch.device("cpu")
        self._sharded = False
        self._not_cublas: str | None = None
        self._runs = ""  # the chosen backend, once the device is known
        self._history: AmaxHistory | None = None
        self._loaded: dict[str, Any] | None = None
        self._in_backward = False

    # -- the layers

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._device = device_of(module)
        self._sharded = is_a(getattr(getattr(module, "_trainer", None), "strategy", None), ModelParallelStrategy)
        self._runs = self._choose(self._device)
        self._history = None
        return super().convert_module(module)

    def _choose(self, device: torch.device) -> str:
        """Return the backend for a device."""
        if self.backend == "torchao" and not ao.installed():
            raise ImportError(
                "FP8Precision(backend='torchao'): torchao is not installed. Set backend='scaled_mm', or run in a clone of"
                f" lightning_eff: {install('torchao')}"
            )
        blockwise = self.scaling == "blockwise"
        if self.backend == "emulated" or (device.type == "cpu" and self.backend != "auto" and not blockwise):
            return self.backend
        cuda = device.type == "cuda" and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(device) if cuda else None
        reason = refusal(device.type, capability, hip=torch.version.hip is not None, blocks=blockwise)
        if reason is not None:
            asked = f"scaling='blockwise', backend={self.backend!r}" if blockwise else f"backend={self.backend!r}"
            least = "9.0 or later, or of 8.9 with scaling='rowwise'" if blockwise else "8.9 or later"
            raise ValueError(
                f"FP8Precision({asked}): {reason}. Use an NVIDIA GPU of compute capability {least}, or"
                " set backend='emulated' to see the effect of FP8 without its speed."
            )
        if blockwise:
            self._not_cublas = blocks.cublas(device)
            return "cublas" if self._not_cublas is None else "triton"
        fits = self.amax == "dynamic" and ao.installed()
        return "torchao" if self.backend != "scaled_mm" and fits else "scaled_mm"

    @override
    def rules(self) -> Sequence[Rule]:
        return [self._small] if "small" in self.skip and self._on_hardware else []

    @property
    def _on_hardware(self) -> bool:
        return self._runs in ("torchao", "cublas", "triton") or (
            self._runs == "scaled_mm" and self._device.type == "cuda"
        )

    def _small(self, m: LinearMap) -> str | None:
        small = too_small(m.in_features, m.out_features, self.scaling)
        return "small: FP8 would be slower, by torchao's thresholds" if small else None

    @override
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        if self.amax == "delayed" and self._history is None:
            self._history = AmaxHistory([found.path for found in self._maps], self.history_steps, self._device)
            if self._loaded is not None:
                self._history.load_state_dict(self._loaded)
                self._loaded = None
        fast, fast_backward = self.accumulate != "exact", self.accumulate == "fastest"
        if self._runs == "torchao" and ao.takes(m):
            return ao.TorchAOLinear(m, self.scaling, fast=fast, fast_backward=fast_backward)
        linear = Float8Linear(
            m.path,
            self.scaling,
            self._product(),
            fast=fast,
            history=self._history,
            recording=self._recording,
            fast_backward=fast_backward,
            keep_weight=not self._sharded if self.keep_weight is None else self.keep_weight,
        )
        if self._history is None and self._runs not in ("cublas", "triton"):
            return linear
        # a compiled backward pass would keep the branch that was traced, without recording; and torch.compile would trace
        # into the launch of a kernel
        return torch.compiler.disable(linear.__call__)  # pyright: ignore[reportReturnType] -- of a function: a function

    def _product(self) -> Product:
        if self._runs in ("cublas", "triton"):
            return blocks.by_cublas if self._runs == "cublas" else blocks.by_triton
        return emulated if self._runs == "emulated" else scaled_mm_for(self._device)

    @override
    def describe(self) -> str:
        what = f"FP8, {self.scaling} scaling, {self.amax} amax"
        if self.amax == "delayed":
            what += f" over {self.history_steps} steps"
        if self._runs == "emulated":
            what += ", emulated (bit-identical casts, products in float32): slower than bfloat16"
            return f"{what}; skip's 'small' does not apply to emulation" if "small" in self.skip else what
        if self._runs == "triton":
            return f"{what}, in the Triton kernel kernels/fp8_matmul.py (not in cuBLASLt: {self._not_cublas})"
        if self._runs == "cublas":
            return f"{what}, with torch.nn.functional.scaled_mm"
        what += f", with {'torchao' if self._runs == 'torchao' else 'torch._scaled_mm'}"
        what += {
            "fast": ", fast accumulation in the forward product",
            "exact": ", exact accumulation",
            "fastest": ", fast accumulation in all products",
        }[self.accumulate]
        others = [m.path for m in self._maps if self._runs == "torchao" and not ao.takes(m)]
        if others:
            what += (
                f"; with torch._scaled_mm, since torchao needs an nn.Linear with multiples of 16: {', '.join(others)}"
            )
        odd = [str(m) for m in self._maps if m.in_features % MULTIPLE or m.out_features % MULTIPLE]
        if odd and self._on_hardware:
            what += f"; padded with zeros to multiples of {MULTIPLE}: {', '.join(odd)}"
        if self._device.type == "cpu":
            what += "; slower than bfloat16, because a CPU has no float8 units"
        return what

    # -- the history of amax

    def _recording(self) -> bool:
        return self._in_backward

    @override
    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        outside, self._in_backward = self._in_backward, True
        try:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        finally:
            self._in_backward = outside

    @override
    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        if self._history is not None:
            self._history.advance()
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        history = self._loaded if self._history is None else self._history.state_dict()
        return super().state_dict() | ({} if history is None else {"history": history})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        history = state_dict.get("history")
        if self.amax == "dynamic" or history is None:
            return
        if self._history is None:
            self._loaded = history
        else:
            self._history.load_state_dict(history)


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module will run; at setup a Trainer has not moved it there yet."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        return trainer.strategy.root_device
    return next((p.device for p in module.parameters()), torch.device("cpu"))
