"""FP8 training: linear maps in E4M3, their gradients in E5M2 (Micikevicius et al. 2022, arXiv:2209.05433)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff.precision._linear.maps import LinearMap, Rule
from lightning_eff.precision._linear.plugin import Arithmetic, LinearPrecision
from lightning_eff.precision._scaling import ao
from lightning_eff.precision._scaling.casts import Scaling
from lightning_eff.precision._scaling.history import AmaxHistory
from lightning_eff.precision._scaling.linear import Float8Linear
from lightning_eff.precision._scaling.products import MULTIPLE, Product, by_blocks, emulated, refusal, scaled_mm_for

Amax = Literal["dynamic", "delayed"]
Accumulate = Literal["fast", "exact"]
Backend = Literal["auto", "torchao", "scaled_mm", "emulated"]


def too_small(k: int, n: int, scaling: Scaling) -> bool:
    """Whether an H100 takes longer for a map from K to N features in float8 than in bfloat16, casts included.

    The thresholds are those of torchao 0.18 (``_auto_filter_for_tensorwise`` and ``_auto_filter_for_rowwise`` in
    torchao/float8/float8_linear_utils.py), found on H100s with compiled casts; other devices may differ.
    """
    if scaling == "tensorwise":
        return k <= 4096 and n <= 1024
    return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)


class FP8Precision(LinearPrecision):
    """Linear maps, forward and backward, on float8 operands: ``Trainer(plugins=[FP8Precision()])``.

    With x (M, K) and W (N, K), the three products y = x W^T, dx = g W and dW = g^T x take x and W in E4M3 and the
    gradient g in E5M2. What else the module does is the ``base`` plugin's; parameters, their names, optimizer and
    checkpoints are those of the plain module. Hugging Face's ``Conv1D`` is a linear map too. The output has the dtype of
    x, and the weight's gradient the weight's. A value that is not finite makes products with it NaN. Which maps stay as
    they are, and why, is printed at setup.

    Between forward and backward a map holds x in float8, one byte an element, and no copy of W.

    Three scalings: ``s = 448 / amax`` for E4M3 and ``57344 / amax`` for E5M2, with amax

    - "tensorwise": of the whole operand;
    - "rowwise": of each row of a product's left operand and each column of its right one, so x, W and g are cast twice,
      for each of their products. Rows or channels far larger than the others do not flush these to zero;
    - "blockwise": of each 1 x 128 along the contraction of x and g, and of each 128 x 128 of W (DeepSeek-V3,
      arXiv:2412.19437, sec. 3.3, which has g in E4M3 too). Products are taken by a Triton kernel, or emulated.

    Args:
        scaling: as above.
        amax: "dynamic", of the operand that is cast; "delayed", with tensorwise scaling: the largest one of the last
            ``history`` optimizer steps, over a step's micro-batches and all ranks, for each map's x, W and g; larger
            values saturate. Until a tensor has a history, its own amax serves. What the Trainer's backward passes go
            through counts: evaluation and blocks that run again leave no mark. It is saved in checkpoints. A manual
            optimization ends a step with each optimizer's.
        history: steps, >= 1.
        base: the plugin for everything else: "32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", or a plugin.
        skip: what stays as it is. "head": maps outside of the blocks, whose error counts most. "small": maps that
            float8 makes slower, by torchao's thresholds (:func:`too_small`); it applies where float8 hardware
            runs, not to emulation. Other words are dotted paths of maps, or of modules above them.
        accumulate: "fast" lets float8 hardware sum the forward product in fewer bits than float32's, as is common;
            "exact" does not. Backward products are always exact. With blockwise scaling neither changes anything: every
            product sums blocks of 128 as the hardware does by itself, and blocks in float32.
        backend: "scaled_mm" is ``torch._scaled_mm``: on NVIDIA devices of compute capability 8.9 and later, where sizes
            that are no multiples of 16 are padded with zeros, and results with rowwise scaling may pass through
            bfloat16; on a CPU without a gain. With blockwise scaling it is :mod:`lightning_eff.kernels.fp8_matmul` in its
            place, from compute capability 9.0 on, and never on a CPU. "torchao" is ``torchao.float8`` (dynamic amax,
            tensorwise or rowwise), and ``torch._scaled_mm`` for the maps that it does not take. "emulated" runs anywhere,
            slower than bfloat16: casts are bit for bit the hardware's, and products of the dequantised operands are taken
            in float32, whatever ``accumulate`` says. "auto" is "torchao" where it is installed and fits, else
            "scaled_mm"; it never emulates. The device is that of the Trainer's strategy, and outside a Trainer the
            parameters'.

    Raises:
        ValueError: if an argument is out of range or a combination is not offered; at setup, if the device has no float8
            hardware and ``backend`` asks for it, or no map is left.
        TypeError: if ``base`` or ``skip`` has the wrong type.
        ImportError: at setup, if ``backend="torchao"`` and it is not installed.
    """

    saves: ClassVar[str] = "time: linear maps in FP8"
    paper: ClassVar[str] = "Micikevicius et al. 2022, arXiv:2209.05433; DeepSeek-V3, arXiv:2412.19437"
    constraints: ClassVar[str] = (
        "an NVIDIA GPU of compute capability 8.9 or later, or backend='emulated', which is slow"
    )
    survey: ClassVar[Survey | None] = Survey("FP8 training", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"scaling": Choice(("tensorwise", "rowwise", "blockwise"))},
        lambda profile: (
            None if profile.float8 else "the device multiplies no FP8 matrices, and an emulation gains no time"
        ),
    )
    words: ClassVar[tuple[str, ...]] = ("head", "small")

    def __init__(
        self,
        scaling: Scaling = "tensorwise",
        amax: Amax = "dynamic",
        *,
        history: int = 16,
        base: str | Precision = "bf16-mixed",
        skip: Collection[str] = ("head", "small"),
        accumulate: Accumulate = "fast",
        backend: Backend = "auto",
    ) -> None:
        choices = {
            "scaling": (scaling, Scaling),
            "amax": (amax, Amax),
            "accumulate": (accumulate, Accumulate),
            "backend": (backend, Backend),
        }
        for name, (given, allowed) in choices.items():
            if given not in get_args(allowed):
                raise ValueError(f"FP8Precision({name}={given!r}): expected one of {', '.join(get_args(allowed))}.")
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ValueError(f"FP8Precision({history=}): expected a number of steps, an integer >= 1.")
        if amax == "delayed" and scaling != "tensorwise":
            raise ValueError(
                f"FP8Precision({scaling=}, {amax=}): expected scaling='tensorwise', since a history is one number for a"
                " tensor. Or take amax='dynamic'."
            )
        if backend == "torchao" and (amax == "delayed" or scaling == "blockwise"):
            raise ValueError(
                f"FP8Precision({scaling=}, {amax=}, {backend=}): torchao has dynamic amax, tensorwise or rowwise; expected"
                " backend='scaled_mm' or 'emulated' here."
            )
        super().__init__(base, skip=skip)
        self.scaling: Scaling = scaling
        self.amax: Amax = amax
        self.history_steps = history
        self.accumulate: Accumulate = accumulate
        self.backend: Backend = backend
        self._device = torch.device("cpu")
        self._runs = ""  # the backend, once it is known
        self._history: AmaxHistory | None = None
        self._loaded: dict[str, Any] | None = None
        self._in_backward = False

    # -- what is exchanged

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._device = device_of(module)
        self._runs = self._choose(self._device)
        self._history = None
        return super().convert_module(module)

    def _choose(self, device: torch.device) -> str:
        """The backend for a device."""
        if self.backend == "torchao" and not ao.installed():
            raise ImportError(
                "FP8Precision(backend='torchao'): torchao is not installed. Install it: pip install"
                ' "lightning-eff[torchao]". Or take backend="scaled_mm".'
            )
        blocks = self.scaling == "blockwise"
        if self.backend == "emulated" or (device.type == "cpu" and self.backend != "auto" and not blocks):
            return self.backend
        cuda = device.type == "cuda" and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(device) if cuda else None
        reason = refusal(device.type, capability, hip=torch.version.hip is not None, blocks=blocks)
        if reason is not None:
            asked = f"scaling='blockwise', backend={self.backend!r}" if blocks else f"backend={self.backend!r}"
            least = "9.0 or later, or of 8.9 with scaling='rowwise'" if blocks else "8.9 or later"
            raise ValueError(
                f"FP8Precision({asked}): {reason}; expected an NVIDIA GPU of compute capability {least}."
                " To try FP8's effect on a run without its speed, take backend='emulated'."
            )
        if blocks:
            return "triton"
        fits = self.amax == "dynamic" and ao.installed()
        return "torchao" if self.backend != "scaled_mm" and fits else "scaled_mm"

    @override
    def rules(self) -> Sequence[Rule]:
        return [self._small] if "small" in self.skip and self._on_hardware else []

    @property
    def _on_hardware(self) -> bool:
        return self._runs in ("torchao", "triton") or (self._runs == "scaled_mm" and self._device.type == "cuda")

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
        if self._runs == "torchao" and ao.takes(m):
            return ao.TorchAOLinear(m, self.scaling, fast=self.accumulate == "fast")
        linear = Float8Linear(
            m.path,
            self.scaling,
            self._product(),
            fast=self.accumulate == "fast",
            history=self._history,
            recording=self._recording,
        )
        if self._history is None and self._runs != "triton":
            return linear
        # a compiled backward pass would go on as it was traced, when nothing was to be recorded; and torch.compile would
        # trace into the launch of a kernel
        return torch.compiler.disable(linear.__call__)  # pyright: ignore[reportReturnType] -- of a function: a function

    def _product(self) -> Product:
        if self._runs == "triton":
            return by_blocks
        return emulated if self._runs == "emulated" else scaled_mm_for(self._device)

    @override
    def describe(self) -> str:
        what = f"FP8, {self.scaling} scaling, {self.amax} amax"
        if self.amax == "delayed":
            what += f" over {self.history_steps} steps"
        if self._runs == "emulated":
            what += (
                ", emulated: casts are bit for bit the hardware's, products exact in float32; slower than bfloat16, with"
                " nothing gained but the numbers"
            )
            return f"{what}; skip's 'small' does not apply to emulation" if "small" in self.skip else what
        if self._runs == "triton":
            return f"{what}, by the Triton kernel kernels/fp8_matmul.py, sums of 128 in the hardware's precision"
        what += f", by {'torchao' if self._runs == 'torchao' else 'torch._scaled_mm'}"
        what += f", {self.accumulate} accumulation in the forward product"
        others = [m.path for m in self._maps if self._runs == "torchao" and not ao.takes(m)]
        if others:
            what += (
                f"; by torch._scaled_mm, since torchao takes no Conv1D and only multiples of 16: {', '.join(others)}"
            )
        odd = [str(m) for m in self._maps if m.in_features % MULTIPLE or m.out_features % MULTIPLE]
        if odd and self._on_hardware:
            what += f"; padded with zeros to multiples of {MULTIPLE}: {', '.join(odd)}"
        if self._device.type == "cpu":
            what += "; on a CPU, which has no float8 units: slower than bfloat16"
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
    """Where a module will run: at setup a Trainer has not moved it there yet."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        return trainer.strategy.root_device
    return next((p.device for p in module.parameters()), torch.device("cpu"))
