"""Records one real execution of a module: the calls of leaves, the reads of weights, and all gradients."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_SEED = 20
DROPS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


class _NoDropout(TorchFunctionMode):
    """Disables dropout, since masks of split activations cannot equal those of whole ones."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def undisturbed(root: nn.Module) -> Iterator[None]:
    """Use a fixed seed and no dropout in this context, and restore generators, buffers and gradients afterwards."""
    owners = [(module._buffers, dict(module._buffers)) for module in root.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    grads = [(param, param.grad) for param in root.parameters()]
    state = random.getstate()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_NoDropout())
        stack.enter_context(own_arithmetic(root))
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        for param, _ in grads:
            param.grad = None
        try:
            yield
        finally:
            random.setstate(state)
            torch.clear_autocast_cache()  # the values of the cached weights change
            for param, grad in grads:
                param.grad = grad
            with torch.no_grad():
                for held, had in owners:
                    held.clear()
                    held.update(had)
                for buffer, value in buffers:
                    buffer.copy_(value)


class _NotRecomputed:
    """Replaces torch's reentrant checkpoint, whose forward pass leaves no graph."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run ``function`` without a checkpoint."""
        return function(*args)


@contextmanager
def without_reentrant() -> Iterator[None]:
    """Let reentrant checkpoints keep their activations in this context."""
    before = torch.utils.checkpoint.CheckpointFunction
    torch.utils.checkpoint.CheckpointFunction = _NotRecomputed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.utils.checkpoint.CheckpointFunction = before


@contextmanager
def own_arithmetic(root: nn.Module) -> Iterator[None]:
    """Disable this package's low precision in this context, since its scales depend on the split of weights."""
    swapped = [
        (module, forward)
        for module in root.modules()
        if (forward := module.__dict__.get("forward")) is not None
        and type(getattr(forward, "func", forward)).__module__.startswith("lightning_eff.precision.")
    ]
    for module, _ in swapped:
        del module.__dict__["forward"]
    try:
        yield
    finally:
        for module, forward in swapped:
            module.__dict__["forward"] = forward


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in nested tuples, lists and mappings, or None."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


@dataclass
class Call:
    """One call of a leaf: the autograd nodes of its input and output, and the output's root mean square."""

    path: str
    entered: Any
    left: Any
    rms: float


@dataclass(frozen=True)
class Print:
    """The fingerprint of an output for comparison with another run: shape, sum and root of the sum of squares."""

    path: str
    shape: tuple[int, ...]
    total: float
    norm: float


@dataclass
class Record:
    """The record of one execution.

    Attributes:
        loss: the loss, a number.
        grads: gradients by name; a shared parameter has its first name.
        calls: calls of leaves (modules without children) in order, if requested.
        buffers: values of changed buffers by name.
        prints: fingerprint of every module's output, in the order in which modules finished.
        outside: names of parameters that were read while their module was not running.
        end: the loss's autograd node, if calls are recorded.
        dtype: the lowest floating-point precision of a module's output.
        inside: the innermost running module when the execution failed.
    """

    loss: float = float("nan")
    grads: dict[str, Tensor] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    prints: list[Print] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)
    end: Any = None
    dtype: torch.dtype = torch.float64
    inside: str = ""


def _lower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


class _Watcher:
    """Hooks every module and every read of parameters during one execution."""

    def __init__(self, root: nn.Module, record: Record, keep_calls: bool) -> None:
        self.root, self.record, self.keep = root, record, keep_calls
        self.running: list[str] = []
        self.entered: list[Any] = []
        self.paths = {id(module): path for path, module in root.named_modules()}

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.running.append(self.paths[id(module)])
        if self.keep:
            first = first_tensor((args, kwargs))
            self.entered.append(None if first is None else first.grad_fn)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path = self.paths[id(module)]
        self.running.pop()
        entered = self.entered.pop() if self.keep else None
        left = first_tensor(output)
        if left is None or isinstance(left, DTensor):
            return
        self.record.dtype = _lower(self.record.dtype, left.dtype)
        plain = left.detach().double()  # as float64 numbers, so that nothing keeps activations alive
        self.record.prints.append(Print(path, tuple(left.shape), plain.sum().item(), plain.norm().item()))
        if self.keep and not module._modules:
            self.record.calls.append(Call(path, entered, left.grad_fn, float(plain.square().mean().sqrt())))

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = []
        for module in self.root.modules():
            handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self.leave, with_kwargs=True))
        get = nn.Module.__getattr__
        watcher = self

        def noted(module: nn.Module, name: str) -> Any:
            path = watcher.paths.get(id(module))
            if path is not None and name in module.__dict__.get("_parameters", ()) and path not in watcher.running:
                watcher.record.outside.add(f"{path}.{name}" if path else name)
            return get(module, name)

        if self.keep:
            nn.Module.__getattr__ = noted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            nn.Module.__getattr__ = get
            for handle in handles:
                handle.remove()


@contextmanager
def jittered(root: nn.Module, relative: float) -> Iterator[None]:
    """Add random errors of size ``relative``, like rounding, to the outputs of layers with parameters in this context."""
    generator = torch.Generator().manual_seed(_SEED)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        error = relative * torch.randn(output.shape, generator=generator)
        return output + (output.detach().float() * error.to(output.device)).to(output.dtype)

    layers = [module for module in root.modules() if not module._modules and any(True for _ in module.parameters())]
    handles = [module.register_forward_hook(hook) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def execute(root: nn.Module, run: Callable[[], Tensor], *, keep_calls: bool = False) -> Record:
    """Run forward and backward once, and return the record; ``root`` does not change.

    Args:
        root: the module.
        run: runs its training step on one batch, and returns the loss.
        keep_calls: record inputs and outputs of leaves, with their autograd graph.

    Raises:
        Exception: the error of the execution. Its ``inside`` attribute names the innermost running module.
    """
    record = Record()
    watcher = _Watcher(root, record, keep_calls)
    with undisturbed(root):
        before = {name: buffer.detach().clone() for name, buffer in root.named_buffers()}
        try:
            with watcher.watch(), without_reentrant() if keep_calls else nullcontext():
                loss = run()
            record.loss = float(loss.detach())
            record.end = loss.grad_fn if keep_calls else None
            if loss.requires_grad:
                loss.backward()  # frees activations; the nodes of the graph stay
        except Exception as error:
            error.__dict__["inside"] = watcher.running[-1] if watcher.running else ""
            raise
        for name, param in root.named_parameters():
            if param.grad is not None:
                record.grads[name] = param.grad
        for name, buffer in root.named_buffers():
            if name not in before or not _same(before[name], buffer):
                record.buffers[name] = buffer.detach().clone()
    if record.dtype is torch.float64 and not record.prints:
        record.dtype = torch.float32
    return record
