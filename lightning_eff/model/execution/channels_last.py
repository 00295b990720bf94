"""Channels-last memory format: the channels of a pixel are adjacent, in images and in convolution weights (PyTorch 2020)."""

import copy
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Kind
from lightning_eff._core._needs.needs import Part, Reasons
from lightning_eff._core.batches import map_tensors
from lightning_eff._core.search_space import SearchSpace, needs_images
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.execution._plain_order import FORMATS, PlainOrder

_KINDS = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}


def strides_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor (N, C, ..., W) whose elements are stored in the order N, ..., W, C.

    stride_C = 1, stride_W = C, stride_H = C W, ..., stride_N = C W H ...
    """
    strides, step = [0] * len(shape), 1
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def plain_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose elements are stored in the order of its dimensions."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def channels_last(tensor: Tensor) -> Tensor:
    """Return a tensor (N, C, H, W) or (N, C, D, H, W) with channels last in memory; others unchanged.

    This also sets the strides for one channel or one pixel, where both orders are equal, because kernels read the
    intended order from them.
    """
    memory_format = FORMATS.get(tensor.ndim)
    if memory_format is None:
        return tensor
    return tensor.contiguous(memory_format=memory_format).as_strided(tensor.shape, strides_last(tensor.shape))


def laid(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the same values at these strides, which must be those of a dense tensor."""
    if tensor.stride() == tuple(strides):
        return tensor
    made = torch.empty_strided(tensor.shape, tuple(strides), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def in_plain_order(value: Any) -> Any:
    """Return a checkpoint's content with every tensor of four or five dimensions in plain order, without in-place changes."""
    if isinstance(value, Tensor):
        return laid(value, plain_strides(value.shape)) if value.ndim in FORMATS else value
    if isinstance(value, dict):
        made = copy.copy(value)  # keeps the class, such as a state_dict with its metadata
        made.update({key: in_plain_order(item) for key, item in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(in_plain_order(item) for item in value)
    return value


def convolutions(module: nn.Module, dims: Sequence[int]) -> dict[str, nn.Module]:
    """Return the convolutions over these numbers of dimensions, transposed ones included, by path."""
    kinds = tuple(kind for d in dims for kind in _KINDS[d])
    return {path: m for path, m in module.named_modules() if isinstance(m, kinds)}


def weights_of(found: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    """Return their weights, including those from which a parametrization computes one, each once."""
    weights: dict[int, nn.Parameter] = {}
    for m in found.values():
        ndim = next(d for d, kinds in _KINDS.items() if isinstance(m, kinds)) + 2
        weights |= {id(p): p for p in m.parameters() if p.ndim == ndim and type(p.data) is Tensor}
    return [*weights.values()]


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _strides(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the strides of those tensors of a parameter's state that a checkpoint stores at other strides."""
    found = {key: x for key, x in state.items() if type(x) is Tensor and x.ndim in FORMATS}
    return {key: [*x.stride()] for key, x in found.items() if x.stride() != plain_strides(x.shape)}


def _lay_beside(optimizers: Sequence[Optimizer], weights: Sequence[tuple[nn.Parameter, tuple[int, ...]]]) -> None:
    """Store gradients, and optimizer states of a weight's shape, at these strides."""
    for w, strides in weights:
        if w.grad is not None:
            w.grad = laid(w.grad, strides)
        for state in (optimizer.state[w] for optimizer in optimizers if w in optimizer.state):
            for key, value in state.items():
                if type(value) is Tensor and value.shape == w.shape:
                    state[key] = laid(value, strides)


@dataclass(frozen=True, repr=False)
class Dimensions(Kind):
    """Numbers of dimensions that convolutions can have, each once; kept as a tuple."""

    hint = "[] is plain training."

    @property
    @override
    def expected(self) -> str:
        return "a list of 2 (images), 3 (volumes and videos) or both"

    @override
    def __call__(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError
        dims = tuple(known for d in value for known in _KINDS if d == known)
        if not len(value) == len(dims) == len(set(dims)):
            raise ValueError
        return dims


class ChannelsLast(Technique):
    """Store images and convolution weights in channels-last order, the format that fast convolution kernels read.

    Shapes and values stay the same; only the order in memory changes, so that the channels of a pixel are adjacent.
    Convolution weights are converted once, and images as each batch arrives. Activations and gradients between them
    follow automatically. Results equal plain training up to float32 rounding, because kernels add in another order.
    Dropout draws the same elements.

    The module need not be changed. Where it flattens images by ``view``, which fails on another memory order, it gets a
    copy, as ``flatten`` would give it. Random numbers for each element of an image are drawn in plain order. Both cost
    a copy; ``copies`` counts them.

    The gain depends on the device's kernels, so measure it (``benchmarks/layout_time.py``). For GPUs with tensor cores
    in half precision, PyTorch reports 8 to 35 % on V100 and 22 % for a ResNet-50, and Composer reports about 30 %;
    neither was measured here. On one CPU thread in float32, a step of a ResNet took 0.80 of the plain time. A step of
    transformers' ConvNeXt, whose norms permute, took 0.95 (0.91 to 1.12). Under bf16-mixed there, the figures were 0.94
    and 1.27, which is a loss. A ViT, which has one convolution, gains next to nothing.

    Checkpoints store all tensors in plain order, optimizer states included, so they load with and without this
    callback. When the run ends, weights, gradients and optimizer states get their previous order back.

    Logged: ``convolutions``, the number of converted weights; ``images``, the converted tensors of the last batch;
    ``copies``, the copies of the last step.

    Args:
        dims: the dimensions of the convolutions to convert: 2 for images, 3 for volumes and videos.

    Raises:
        ValueError: for a value of the wrong kind. At setup, if the module has no such convolution, or for an optimizer
            of bitsandbytes, whose scales belong to blocks of memory. In a step, if the module writes in place into
            flattened images and reads the originals again, or flattens by ``view`` or draws per element within
            ``torch.utils.checkpoint``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, precision="bf16-mixed", callbacks=[ChannelsLast()])

    References:
        PyTorch 2020, "Channels Last Memory Format in PyTorch" (tutorial); MosaicML 2022, Composer's method card.
    """

    saves = "time of convolutions whose kernels read channels last"
    paper = "PyTorch 2020, Channels Last Memory Format in PyTorch"
    constraints = "modules with nn.Conv2d, nn.Conv3d or their transposed versions; no 8-bit optimizer"
    refuses: ClassVar[Reasons] = dict.fromkeys((Part.SHARD, Part.TENSOR, Part.PIPELINE), "")
    search_space = SearchSpace({}, needs_images)
    control = Control("the baseline for as many seconds, since results are equal up to rounding")
    conflicts: ClassVar[Mapping[str, str]] = {
        "EightBitOptimizer": "its scales belong to blocks of adjacent elements, and a checkpoint has other blocks"
    }
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, dims: Annotated[Sequence[int], Dimensions()] = (2, 3)) -> None:
        self.dims = tuple(dims)

    def _reset(self) -> None:
        self._before: list[tuple[nn.Parameter, tuple[int, ...]]] = []  # weights, and their previous strides
        self._channels: dict[int, set[int]] = {}  # by number of dimensions, the channels that convolutions read
        self._count = 0
        self._strides: list[list[dict[str, list[int]]]] | None = None  # of a checkpoint's states, by :meth:`state_dict`
        self._settled = False  # whether gradients and optimizer states of a checkpoint have the order of the weights
        self._images = 0
        self._copies = 0

    @property
    @override
    def neutral(self) -> bool:
        return not self.dims

    @override
    def attach(self, session: Session) -> None:
        module, strategy = session.module, session.trainer.strategy
        for name in ("training_step", "validation_step"):
            session.patches.set(module, name, self._step(getattr(module, name)))
        session.chain.original = module.training_step  # which extra passes of other techniques also run
        states = strategy.lightning_module_state_dict
        session.patches.set(strategy, "lightning_module_state_dict", lambda: in_plain_order(states()))

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        module = session.module
        found = convolutions(module, self.dims)
        if not found:
            held = Counter(type(m).__name__ for m in module.modules() if [*m.parameters(recurse=False)])
            kinds = ", ".join(f"{count} {kind}" for kind, count in held.most_common(6)) or "nothing"
            named = " or ".join(f"nn.Conv{d}d" for d in sorted(self.dims))
            raise ValueError(
                f"ChannelsLast(dims={list(self.dims)}): {type(module).__name__} has no {named}, also not transposed (its"
                f" parameters are in {kinds}). Remove ChannelsLast."
            )
        for m in found.values():
            ndim = next(d for d, kinds in _KINDS.items() if isinstance(m, kinds)) + 2
            self._channels.setdefault(ndim, set()).add(int(m.in_channels))  # pyright: ignore[reportArgumentType]
        for w in weights_of(found):
            self._before.append((w, w.stride()))
            w.data = channels_last(w.data)
        self._count = len(self._before)
        rank_zero_info(f"ChannelsLast: stored the weights of {self._count} convolutions channels-last.")

    @override
    def on_optimizers(self, session: Session) -> None:
        ours = {id(w) for w, _ in self._before}
        for optimizer in session.optimizers:
            steps = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
            if steps and type(optimizer).__module__.startswith("bitsandbytes"):
                raise ValueError(
                    f"ChannelsLast: the optimizer {type(optimizer).__name__} of bitsandbytes cannot update convolution weights"
                    f" here: {self.conflicts['EightBitOptimizer']}. Use an optimizer of torch.optim, or remove ChannelsLast."
                )

    # -- a step

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if not self._before or not args:
                return original(*args, **kwargs)
            self._images = 0
            with PlainOrder(type(self).__name__) as order:
                output = original(map_tensors(args[0], self._lay), *args[1:], **kwargs)
            self._copies = order.copies
            return output

        step.__wrapped__ = inspect.unwrap(original)  # pyright: ignore[reportAttributeAccessIssue]
        return step

    def _lay(self, tensor: Tensor) -> Tensor:
        """Convert a tensor of a batch if a convolution could read it, by its dimensions and channels."""
        shown = tensor.is_floating_point() or tensor.dtype == torch.uint8
        if not shown or tensor.ndim not in FORMATS or tensor.shape[1] not in self._channels.get(tensor.ndim, ()):
            return tensor
        self._images += 1
        return channels_last(tensor)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._settled:
            return
        self._settled = True  # tensors from a checkpoint are in plain order
        weights = [(w, w.stride()) for w, _ in self._before]
        _lay_beside(session.optimizers if self._strides is None else [], weights)
        for optimizer, of_parameters in zip(session.optimizers, self._strides or [], strict=False):
            for p, own in zip(_stepped(optimizer), of_parameters, strict=False):
                state = optimizer.state[p] if own else {}
                state.update({key: laid(state[key], strides) for key, strides in own.items() if key in state})

    # -- checkpoints and the end of the run

    @override
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint.update(in_plain_order(checkpoint))

    @override
    def detach(self, session: Session) -> None:
        for w, strides in self._before:
            w.data = laid(w.data, strides)
        _lay_beside(session.optimizers, self._before)
        self._before = []

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return, for each optimizer and each parameter it updates, the strides of states that are not in plain order."""
        optimizers = [] if self._session is None else self._session.optimizers
        return {"strides": [[_strides(o.state.get(p, {})) for p in _stepped(o)] for o in optimizers]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._strides = state_dict["strides"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"convolutions": self._count, "images": self._images, "copies": self._copies}

    @override
    def summary(self) -> str:
        return f"stored the weights of {self._count} convolutions channels-last"
