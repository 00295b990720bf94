"""Every operation of a training step, as torch dispatches it, for synchronisations, work done twice and the source of NaN.

The mode only looks. It is left while autograd's engine runs, where torch takes other ways under a mode.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, _tensor_str, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_eff._core.patches import Patches
from lightning_eff.advice._looking.frames import CHECKING, Place, chain, parting, place, running
from lightning_eff.advice._looking.seen import NODES, Seen, Twice

_aten = torch.ops.aten
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
#: What writes infinity on purpose, such as an attention mask.
_FILLS = (
    "masked_fill",
    "full",
    "fill",
    "where",
    "scalar_tensor",
    "zeros",
    "ones",
    "copy",
    "_to_copy",
    "lift_fresh",
    "clone",
)
#: Libraries that look at values only to check their arguments.
CHECKS = (f"torchmetrics{CHECKING}", f"torch.distributions{CHECKING}", "torch.distributions")
#: Operations with running statistics at places 3 and 4, which they only write where they train.
_NORMS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
)
_UNSET = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like", "empty_permuted")


@dataclass
class _Known:
    """A storage, as far as it is known.

    Attributes:
        ref: keeps its address from being used again, and not its memory.
        value: a number that two storages share only if they hold the same values.
        drawn: the same, if every draw of random numbers gave the same ones.
        device: it would be on the accelerator, if there were one.
        graph: an operation with a gradient made it.
        generation: of :attr:`value` and :attr:`drawn`.
    """

    ref: StorageWeakRef
    value: int
    drawn: int
    device: bool = False
    graph: bool = False
    generation: int = 0


@functools.cache
def _schema(func: OpOverload) -> tuple[tuple[int | str, ...], bool]:
    """The arguments that an operation writes, and whether it draws random numbers."""
    arguments = func._schema.arguments
    written = tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    return written, torch.Tag.nondeterministic_seeded in func.tags


def _draws(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: attention does so only with dropout."""
    if not _schema(func)[1]:
        return False
    for i, a in enumerate(func._schema.arguments):
        if a.name == "dropout_p":
            return bool(kwargs.get(a.name, args[i] if i < len(args) else a.default_value))
    return True


def _read(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that decide the results: a BatchNorm that trains does not read its running statistics."""
    name = func.overloadpacket.__name__
    if name not in _NORMS or len(args) < 6 or not (name == "_batch_norm_with_update" or args[5]):
        return args
    return (*args[:3], *args[5:])


def each_tensor(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, those in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from each_tensor(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Operations(TorchDispatchMode):
    """Looks at the operations of training steps.

    Args:
        names: of the module's modules, by their ids.
        own: installed packages whose code counts as the user's.
        on_cpu: the run has no accelerator, so the tensors that one would hold are followed through the step.
    """

    supports_higher_order_operators = True

    def __init__(self, names: dict[int, str], own: frozenset[str], *, on_cpu: bool) -> None:
        super().__init__()
        self._names, self._own, self._on_cpu = names, own, on_cpu
        self._known: dict[int, _Known] = {}
        self._host: dict[int, Tensor] = {}
        self._count = 0
        self._generation = 0
        self._heavy: dict[Any, tuple[bool, tuple[Place, ...], float]] = {}
        self.seen, self._waits_alone = Seen(), False
        self.on_backward: Callable[[], None] = lambda: None

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True

    # -- a step

    @contextmanager
    def step(self, on_device: Iterable[Tensor], within: Seen | None = None) -> Iterator[Seen]:
        """Look at one step.

        Args:
            on_device: the tensors that an accelerator would hold: parameters, buffers and the batch.
            within: add the places that wait, and nothing else, to what was seen of the step so far; None begins a new one.
        """
        self.seen, self._waits_alone = Seen() if within is None else within, within is not None
        self.forget()
        self._known.clear()
        for tensor in on_device:
            if type(tensor) in _PLAIN and (known := self._of(tensor)) is not None:
                known.device = True
        patches = Patches()
        name = "_engine_run_backward"
        patches.set(torch.autograd, name, self._without(getattr(torch.autograd, name)))
        try:
            with self._methods(), self:
                yield self.seen
        finally:
            patches.restore()
            self._known.clear()
            self._host.clear()

    def forget(self) -> None:
        """Take no two values for the same any more: their graph is gone, or what holds them was written unseen."""
        self._generation += 1
        self._heavy.clear()

    def _without(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        """Autograd's engine, run outside of this mode."""

        def run(*args: Any, **kwargs: Any) -> Any:
            on_top = _get_current_dispatch_mode() is self
            if on_top:
                self.__exit__(None, None, None)
            try:
                return engine(*args, **kwargs)
            finally:
                if on_top:
                    self.__enter__()
                self.forget()
                self.on_backward()

        return run

    @contextmanager
    def _methods(self) -> Iterator[None]:
        """Notice the methods of tensors that wait for an accelerator, and dispatch nothing on a CPU."""
        before = {name: vars(Tensor).get(name) for name in ("cpu", "to", "numpy", "tolist")}
        printing = _tensor_str._str

        def noticed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                moves = name == "cpu" or (name == "to" and "cpu" in (*args[:1], kwargs.get("device")))
                if (
                    (moves or name in ("numpy", "tolist"))
                    and not kwargs.get("non_blocking")
                    and self._waits_for(tensor)
                ):
                    self.seen.wait(place(self._own), name)
                    if moves and tensor.device.type == "cpu":
                        self._host[id(tensor)] = tensor
                return method(tensor, *args, **kwargs)

            return call

        def text(tensor: Tensor, *args: Any, **kwargs: Any) -> str:
            if self._waits_for(tensor):
                self.seen.wait(place(self._own), "print")
            return printing(tensor, *args, **kwargs)

        patches = Patches()
        patches.set(_tensor_str, "_str", text)
        for name in before:
            setattr(Tensor, name, noticed(name, getattr(Tensor, name)))
        try:
            yield
        finally:
            patches.restore()
            for name, own in before.items():
                if own is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, own)

    # -- values

    def _fresh(self) -> int:
        self._count += 1
        return self._count

    def _of(self, tensor: Tensor) -> _Known | None:
        """The record of a tensor's storage; None if the tensor has no plain storage."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            number = self._fresh()
            known = self._known[storage._cdata] = _Known(
                StorageWeakRef(storage), number, number, generation=self._generation
            )
        elif known.generation != self._generation:
            known.value = known.drawn = self._fresh()
            known.generation = self._generation
        return known

    def _waits_for(self, tensor: Tensor) -> bool:
        """Whether reading a tensor's values waits for an accelerator, here or where the run has one."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return tensor.device.type not in ("cpu", "meta")
        if tensor.device.type != "cpu" or not self._on_cpu:
            return tensor.device.type not in ("cpu", "meta")
        known = self._known.get(_address(tensor))
        return known is not None and known.device and id(tensor) not in self._host

    def _key(self, value: Any, grad: bool) -> tuple[Any, Any]:
        """Two keys for an argument's values: exact, and as if all random draws were alike."""
        if isinstance(value, Tensor):
            known = self._of(value)
            if known is None:
                number = self._fresh()
                return number, number
            view = (
                value.storage_offset(),
                tuple(value.shape),
                value.stride(),
                value.dtype,
                grad and known.graph and not value.requires_grad,  # detached: its gradient goes elsewhere
            )
            return (known.value, view), (known.drawn, view)
        if isinstance(value, list | tuple):
            keys = [self._key(item, grad) for item in value]
            return tuple(one for one, _ in keys), tuple(other for _, other in keys)
        try:
            hash(value)
        except (TypeError, RuntimeError):  # objects of C++, such as process groups
            return id(value), id(value)
        return (type(value), value), (type(value), value)

    # -- operations

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        inputs = list(each_tensor((*args, *kwargs.values())))
        if func is _aten._local_scalar_dense.default:
            if self._waits_for(inputs[0]):
                self.seen.wait(place(self._own), "item")
            return func(*args, **kwargs)
        if func is _aten._to_copy.default and self._leaves(inputs[0], kwargs):
            self.seen.wait(place(self._own), "copy")
        if torch.Tag.dynamic_output_shape in func.tags and any(map(self._waits_for, inputs)):
            where = place(self._own)
            if where is not None and where.through in CHECKS:  # a user who selects values by a mask needs them
                self.seen.wait(where, "size")
        grad = torch.is_grad_enabled()
        keys = self._key(_read(func, args), grad), self._key(tuple(sorted(kwargs.items())), grad)
        output = func(*args, **kwargs)
        self._look(func, args, kwargs, inputs, output, keys)
        return output

    @staticmethod
    def _leaves(tensor: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether a copy goes from an accelerator to the host, which waits for it."""
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        return to_host and tensor.device.type not in ("cpu", "meta") and not kwargs.get("non_blocking")

    def _look(self, func: OpOverload, args: Any, kwargs: Any, inputs: list[Tensor], output: Any, keys: Any) -> None:
        (positional, drawn), (named, named_drawn) = keys
        written, _ = _schema(func)
        random = _draws(func, args, kwargs)
        with_graph = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        known = [k for t in inputs if (k := self._of(t)) is not None]
        before = {_address(t) for t in inputs if type(t) in _PLAIN and t.layout is torch.strided}
        device = any(k.device and id(t) not in self._host for t in inputs if (k := self._of(t)) is not None)
        self.seen.used |= before
        if func is _aten.embedding.default:
            self.seen.looked_up |= {_address(args[1])} if type(args[1]) in _PLAIN else set()
        value = self._fresh() if random else hash((func, positional, named))
        same = hash((func, drawn, named_drawn))
        for at in written:
            target = kwargs.get(at) if isinstance(at, str) else (args[at] if at < len(args) else None)
            for tensor in each_tensor((target,)):
                if (k := self._of(tensor)) is not None:
                    k.value, k.drawn = hash((value, at, k.value)), hash((same, at, k.drawn))
                    k.device |= device
                    k.graph |= with_graph
        for i, tensor in enumerate(each_tensor((output,))):
            device = device and not (
                i == 1 and func is _aten._pack_padded_sequence.default
            )  # batch sizes stay on the host
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                continue
            if _address(tensor) in before:
                if inputs and all(id(t) in self._host for t in inputs):
                    self._host[id(tensor)] = tensor
                continue
            k = self._of(tensor)
            if k is not None:
                k.value, k.drawn, k.device = hash((value, i)), hash((same, i)), device
                k.graph = with_graph and tensor.is_floating_point() and func.overloadpacket.__name__ not in _UNSET
        if not known or self._waits_alone:
            return
        self._cost(func, args, kwargs, output, (func, positional, named), (func, drawn, named_drawn), with_graph)
        self._finite(func, inputs, output)

    def _cost(
        self, func: OpOverload, args: Any, kwargs: Any, output: Any, exact: Any, drawn: Any, with_graph: bool
    ) -> None:
        flops = flop_registry.get(func.overloadpacket)
        if flops is None:
            return
        cost = float(flops(*args, **kwargs, out_val=output)) * (3 if with_graph else 1)
        self.seen.cost += cost
        self.seen.nodes += with_graph and func.overloadpacket.__name__ in NODES
        first = self._heavy.get(("values", hash(exact)))
        if first is None:
            # the same but for dropout: a second pass without a gradient could have been spared, one with it is a choice
            first = self._heavy.get(("drawn", hash(drawn)))
        where = chain(self._own)
        if first is not None:
            one = Twice(*parting(first[1], where), running(self._names), min(cost, first[2]))
            choice = first[0] == with_graph and ("values", hash(exact)) not in self._heavy
            if not choice:
                self.seen.twice.append(one)
                return
            if with_graph:
                self.seen.again.append(one)
        self._heavy[("values", hash(exact))] = self._heavy[("drawn", hash(drawn))] = (with_graph, where, cost)

    def _finite(self, func: OpOverload, inputs: list[Tensor], output: Any) -> None:
        name = func.overloadpacket.__name__
        if name in _UNSET or (self.seen.nan is not None and self.seen.infinite is not None):
            return
        for tensor in each_tensor((output,)):
            if type(tensor) not in _PLAIN or not tensor.is_floating_point() or tensor.device.type == "meta":
                continue
            flat = tensor.detach()
            if bool(flat.isfinite().all()):
                continue
            others = [t.detach() for t in inputs if type(t) in _PLAIN and t.is_floating_point() and t is not tensor]
            if self.seen.nan is None and bool(flat.isnan().any()) and not any(bool(t.isnan().any()) for t in others):
                self.seen.nan = (place(self._own), name)
            inf = self.seen.infinite is None and name.rstrip("_") not in _FILLS and bool(flat.isinf().any())
            if inf and all(bool(t.isfinite().all()) for t in others):
                self.seen.infinite = (place(self._own), name)
