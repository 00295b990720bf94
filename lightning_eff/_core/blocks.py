"""The stack of repeated blocks in any module: found, run in part, frozen and thawed.

Blocks are never added or removed: parameters are allocated in full and named as in the plain module. While a step runs,
the container (``nn.ModuleList`` or ``nn.Sequential``) shows the module's own code a prefix of its blocks, or a
pass-through in place of some of them; outside a step it is as it was.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Candidate:
    """A container whose children are all of one class."""

    path: str
    container: nn.Module
    block: str
    length: int
    composite: bool

    def __str__(self) -> str:
        return f"{self.path!r} ({self.length} x {self.block})"


def signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a block's parameters and buffers: two blocks with the same can be copied onto one another."""
    return [(name, tuple(tensor.shape)) for name, tensor in _named_tensors(block)]


def _named_tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)]


def _of_one_width(blocks: list[nn.Module]) -> bool:
    """Whether tensors of the same name have the same shape in all blocks: stages of several widths are no stack."""
    shapes: dict[str, tuple[int, ...]] = {}
    return all(shapes.setdefault(name, shape) == shape for block in blocks for name, shape in signature(block))


@torch.no_grad()
def copy_block(source: nn.Module, target: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Copy all parameters and buffers of ``source`` onto those of ``target``, in place; both have the same signature.

    Returns:
        The pairs of parameters that were copied; one that both blocks share is left out.
    """
    for (_, old), (_, new) in zip(source.named_buffers(), target.named_buffers(), strict=True):
        if old is not new:
            new.copy_(old)
    pairs = [
        (old, new)
        for (_, old), (_, new) in zip(source.named_parameters(), target.named_parameters(), strict=True)
        if old is not new
    ]
    for old, new in pairs:
        new.copy_(old)
    return pairs


def candidates(module: nn.Module) -> list[Candidate]:
    """Every stack of blocks in ``module``, outermost only; those of composite blocks first, then the longest."""
    found: list[Candidate] = []
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not path:
            continue
        if any(path.startswith(f"{outer.path}.") for outer in found if outer.composite):
            continue
        blocks = [child for child in container._modules.values() if child is not None]
        classes = {type(getattr(block, "_orig_mod", block)) for block in blocks}
        if len(blocks) < 2 or len(classes) > 1 or not any(True for _ in blocks[0].parameters()):
            continue
        (cls,) = classes
        if not _of_one_width(blocks) or (
            issubclass(cls, nn.Sequential | nn.ModuleList)
            and any(signature(block) != signature(blocks[0]) for block in blocks)
        ):
            continue  # stages of different make, not repeated blocks
        composite = any(True for _ in blocks[0].children())
        found.append(Candidate(path, container, cls.__name__, len(blocks), composite))
    return sorted(found, key=lambda c: (not c.composite, -c.length))


def find_stack(module: nn.Module, layers: str | None, *, who: str) -> Candidate:
    """The stack at the dotted path ``layers``, or the longest one in ``module``.

    Args:
        module: the LightningModule, or any module.
        layers: dotted path of an ``nn.ModuleList`` or ``nn.Sequential``; None looks for the longest.
        who: the technique's name, for the message.

    Raises:
        ValueError: if there is none, if the longest is not the only one of its length, or if the path names none; the
            message lists the candidates.
    """
    found = candidates(module)
    listed = ", ".join(str(c) for c in found) or "none"
    if layers is not None:
        named = dict(module.named_modules())
        container = named.get(layers)
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not layers:
            what = "names no submodule" if container is None else f"is a {type(container).__name__}"
            raise ValueError(
                f"{who}(layers={layers!r}): that path {what} of {type(module).__name__}; expected the dotted path of an"
                f" nn.ModuleList or nn.Sequential of blocks. Candidates: {listed}."
            )
        blocks = [child for child in container._modules.values() if child is not None]
        classes = sorted({type(getattr(block, "_orig_mod", block)).__name__ for block in blocks})
        if len(classes) != 1:
            raise ValueError(
                f"{who}(layers={layers!r}): that container holds {classes or 'nothing'}; expected blocks of one class."
                f" Candidates: {listed}."
            )
        return Candidate(layers, container, classes[0], len(blocks), any(True for _ in blocks[0].children()))
    if not found:
        raise ValueError(
            f"{who}: found no stack of repeated blocks in {type(module).__name__}; expected an nn.ModuleList or"
            " nn.Sequential of at least two blocks of one class. Give its dotted path as layers=, or take the technique"
            " out."
        )
    best = [c for c in found if (c.composite, c.length) == (found[0].composite, found[0].length)]
    if len(best) > 1:
        equal = ", ".join(map(str, best))
        raise ValueError(
            f"{who}: {len(best)} stacks of blocks in {type(module).__name__} are equally long: {equal}. Say which one by"
            f" layers=, e.g. layers={best[0].path!r}. All candidates: {listed}."
        )
    return found[0]


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden state in a block's call: its first tensor argument."""
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise TypeError(
        f"A block was called with {[type(a).__name__ for a in args]} and {sorted(kwargs)}; expected a floating-point"
        " tensor, the hidden state, among them. Name another stack by layers=."
    )


def split_output(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """A block's output as (hidden state, the rest of the tuple or None)."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0], tuple(output[1:])
    raise TypeError(
        f"A block returned {type(output).__name__}; expected a tensor, or a tuple that begins with one. Name another"
        " stack by layers=."
    )


class InPlaceOf(nn.Module):
    """Stands in a container for a block: owns no parameters, and attributes that it has not are the block's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["_block"] = block  # not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)


class PassThrough(InPlaceOf):
    """In the place of a block that a step drops: hands the hidden state on and does no work."""

    def __init__(self, stack: "BlockStack", block: nn.Module) -> None:
        super().__init__(block)
        self.__dict__["_stack"] = stack

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's hidden state, in the form in which blocks of this stack return theirs."""
        return self.__dict__["_stack"].pass_on(hidden_of(args, kwargs))


class _Prefix:
    """Mixed into a container's class while it shows a prefix: code that counts to the full depth gets pass-throughs."""

    def __getitem__(self, index: Any) -> Any:
        stack: BlockStack | None = self.__dict__.get("_prefix_of")
        if stack is not None and isinstance(index, int) and stack.active <= index < len(stack):
            return PassThrough(stack, stack.blocks[index])
        return super().__getitem__(index)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _prefix_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (_Prefix, cls), {})


class BlockStack:
    """A found stack, and which part of it the next step runs.

    Attributes:
        active: the blocks at the front that run; the others are as if they were not there.
        keep: the probability with which each active block was kept, if blocks may be dropped; a kept block's residual
            branch is scaled by its inverse.
        dropped: indices of the blocks that the next training step passes over.
        carries: the blocks return tensors beside the hidden state, which later blocks may need (T5's position bias);
            None until a block has been seen to run. The first block of such a stack cannot be dropped.
    """

    def __init__(self, found: Candidate) -> None:
        self.path = found.path
        self.container = found.container
        self._modules = {k: m for k, m in found.container._modules.items() if m is not None}
        self.blocks: list[nn.Module] = list(self._modules.values())
        self.active = len(self.blocks)
        self.keep: list[float] = []
        self.dropped: frozenset[int] = frozenset()
        self.carries: bool | None = None
        self._arity: int | None = None
        self._opaque: TypeError | None = None
        self._carried: tuple[Any, ...] | None = None
        self._training = False
        self._shown = False
        self._scales = False
        self._handles: list[RemovableHandle] = []
        self._frozen: list[tuple[nn.Parameter, bool]] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def __str__(self) -> str:
        return f"{self.path!r} ({len(self.blocks)} x {type(self.blocks[0]).__name__})"

    # -- what a step sees

    @contextmanager
    def view(self, *, training: bool) -> Iterator[None]:
        """Show the active blocks, in training without the dropped ones, until the context ends."""
        if self._shown or (self.active == len(self.blocks) and not (training and (self.dropped or self.keep))):
            yield
            return
        namespace, cls = self.container.__dict__, type(self.container)
        original = namespace["_modules"]
        shown = dict(list(self._modules.items())[: self.active])
        if training:
            keys = list(shown)
            for index in self.dropped:
                shown[keys[index]] = PassThrough(self, self.blocks[index])
        namespace["_modules"] = shown
        if self.active < len(self.blocks):
            namespace["_prefix_of"] = self
            object.__setattr__(self.container, "__class__", _prefix_class(cls))
        self._shown, self._training = True, training
        try:
            yield
        finally:
            namespace["_modules"] = original
            if namespace.pop("_prefix_of", None) is not None:
                object.__setattr__(self.container, "__class__", cls)
            self._shown = self._training = False
            self._carried = None

    def pass_on(self, hidden: Tensor) -> Any:
        """What a block that is passed over returns: ``hidden``, and the rest as the last block that ran returned it."""
        if self._opaque is not None:
            raise self._opaque
        if self._arity is None:
            return hidden
        return (hidden, *(self._carried if self._carried is not None else (None,) * (self._arity - 1)))

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt of the blocks' output; how many are active is for the technique that says so to save."""
        return {"length": len(self.blocks), "carries": self.carries, "arity": self._arity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.carries, self._arity = state["carries"], state["arity"]

    def watch(self, *, scales: bool) -> None:
        """Learn what form the blocks' output has, until :meth:`release`.

        Args:
            scales: kept branches are scaled by 1/p, so an output that cannot be scaled is an error.
        """
        self._scales |= scales
        if not self._handles:
            for index, block in enumerate(self.blocks):
                self._handles.append(block.register_forward_hook(self._hook(index), with_kwargs=True))

    def _hook(self, index: int) -> Any:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            try:
                hidden, rest = split_output(output)
            except TypeError as error:
                if self._scales:
                    raise
                self._opaque = error
                return None
            if self._arity is None and rest is not None:
                self._arity = 1 + len(rest)
            if self.carries is None:
                self.carries = rest is not None and any(isinstance(value, Tensor) for value in rest)
            if self._shown:
                self._carried = rest
            return self._scaled(index, hidden_of(args, kwargs), hidden, rest) if self._scales else None

        return hook

    def _scaled(self, index: int, entered: Tensor, hidden: Tensor, rest: tuple[Any, ...] | None) -> Any:
        if entered.shape != hidden.shape:
            raise ValueError(
                f"Block {index} of {self.path!r} took a hidden state of shape {tuple(entered.shape)} and returned"
                f" {tuple(hidden.shape)}; expected the same shape, since a block that changes it cannot be passed"
                " over. Name another stack by layers=."
            )
        p = self.keep[index] if self._training and index < len(self.keep) else 1.0
        if p == 1.0:
            return None
        dtype = torch.promote_types(entered.dtype, hidden.dtype)
        # h + (block(h) - h) / p
        hidden = torch.lerp(entered.to(dtype), hidden.to(dtype), 1.0 / p)
        return hidden if rest is None else (hidden, *rest)

    # -- inactive blocks

    def freeze_inactive(self) -> None:
        """Take the parameters that only inactive blocks use out of training; what the user froze stays so."""
        self.thaw()
        used = {id(p) for block in self.blocks[: self.active] for p in block.parameters()}
        for block in self.blocks[self.active :]:
            for p in block.parameters():
                if id(p) not in used:
                    used.add(id(p))
                    self._frozen.append((p, p.requires_grad))
                    p.requires_grad_(False)
                    p.grad = None

    def thaw(self) -> None:
        """Give frozen parameters back their own ``requires_grad``."""
        while self._frozen:
            p, flag = self._frozen.pop()
            p.requires_grad_(flag)

    def release(self) -> None:
        """Leave no trace on the module."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.thaw()
        self.keep, self.dropped, self._scales = [], frozenset(), False


def refuse_compiled_around(module: nn.Module, path: str, *, who: str, way_out: str) -> None:
    """Raise ``ValueError`` if the stack at ``path`` lies within a compiled module: its blocks' own calls are not seen.

    Args:
        module: the root.
        path: dotted, of the stack in it.
        who: the technique that must see them, for the message.
        way_out: what to do instead, for the message.
    """
    parts = path.split(".")
    for depth in range(len(parts)):
        outer = ".".join(parts[:depth])
        found = module.get_submodule(outer)
        if "_orig_mod" in found._modules or found._compiled_call_impl is not None:
            raise ValueError(
                f"{who}: the blocks at {path!r} lie within {outer or 'the LightningModule'!r}, which is compiled as a whole;"
                f" expected blocks that are called one by one. {way_out}"
            )
