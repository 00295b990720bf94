"""The stack of blocks of a pipeline, and the form of its blocks' inputs and outputs."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_eff._core.blocks import Candidate, hidden_of, split_output
from lightning_eff.strategies._side_outputs.places import SideOutputs

Like = tuple[tuple[int, ...], torch.dtype]
Form = tuple[Like | None, ...] | None

ONE_OUTPUT = (
    "Let the block return the hidden state, and beside it only tensors that are smaller (in Hugging Face models:"
    " output_attentions=False, use_cache=False), or use pipeline_parallel_size=1."
)


class Stack:
    """All blocks of a model, and the known form of their output.

    Args:
        found: the stack.
        module: the module that holds it; None looks for nothing that blocks leave next to their hidden state.
        who: name of the caller in messages.

    Attributes:
        blocks: the module's blocks in order.
        names: their dotted paths.
        slots: the module that registers each block, and its name there.
        form: None until a block runs, then a tuple of one. Its item is None if blocks return a tensor. Otherwise it has the
            shape and type of each item after the hidden state, or None for items that are not tensors.
        slot: position or name of the argument with the hidden state, if a block was seen to get the result of the one
            before. Otherwise it is the first floating-point tensor.
        beside: the tensors that blocks leave next to their hidden state, which are sent with it.
        origins: for each block whose hidden state's origin in a training step is known: the block before it, or an operation
            of the caller (see :mod:`.between_blocks`).
    """

    def __init__(self, found: Candidate, module: nn.Module | None = None, *, who: str) -> None:
        self.path, self.who = found.path, who
        self.slots, self.names = found.slots, [*found.named_blocks]
        self.blocks = found.blocks
        self.form: tuple[Form] | None = None
        self.slot: int | str | None = None
        self.origins: dict[int, int] = {}
        self.beside = SideOutputs(module or nn.Module(), who=who)
        self._returned: Tensor | None = None

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the hidden state in a block's call."""
        if isinstance(self.slot, int) and self.slot < len(args) and isinstance(args[self.slot], Tensor):
            return args[self.slot]
        if isinstance(self.slot, str) and isinstance(kwargs.get(self.slot), Tensor):
            return kwargs[self.slot]
        return hidden_of(args, kwargs)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a block's call with ``new`` as the hidden state."""
        old = self.hidden(args, kwargs)
        for i, value in enumerate(args):
            if value is old:
                return (*args[:i], new, *args[i + 1 :]), kwargs
        key = next(key for key in ("hidden_states", *kwargs) if kwargs.get(key) is old)
        return args, {**kwargs, key: new}

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the argument in which a block gets the result of the one before."""
        if self._returned is None or self.slot is not None:
            return
        slots = [key for key, value in (*enumerate(args), *kwargs.items()) if value is self._returned]
        self.slot = slots[0] if slots else None

    def note(self, index: int, output: Any) -> None:
        """Record the form of the blocks' output.

        Raises:
            ValueError: if a stage cannot imitate the output, or it has another form than that of the blocks before.
        """
        try:
            self._returned, rest = split_output(output)
        except TypeError as error:
            raise ValueError(f"{self.who}: block {index} of {self.path!r}: {error}") from None
        held = [i + 1 for i, value in enumerate(rest or ()) if not _plain(value)]
        if held:
            raise ValueError(
                f"{self.who}: block {index} of {self.path!r} returned a tuple of {1 + len(rest or ())}, whose items {held}"
                " hold tensors of integers, or several tensors, but only the hidden state is sent to the next pipeline stage."
                f" {ONE_OUTPUT}"
            )
        form = None if rest is None else tuple(_like(value) for value in rest)
        if self.form is not None and len(form or ()) != len(self.form[0] or ()):
            raise ValueError(
                f"{self.who}: block {index} of {self.path!r} returned {_named(form)}, but the blocks before it returned"
                f" {_named(self.form[0])}, and all blocks need the same form. Name another stack by layers=."
            )
        self.form = (form,)

    def rest(self) -> None:
        """Drop references to tensors between passes."""
        self._returned = None

    @property
    def extra(self) -> list[int]:
        """Return the indices of tensors after the hidden state, which do not reach the next stage."""
        sent = {place.name for places in self.beside.places.values() for place in places if place.kind == "output"}
        items = enumerate((self.form and self.form[0]) or (), 1)
        return [i for i, like in items if like is not None and i not in sent]

    def formed(self, hidden: Tensor, others: Mapping[int, Tensor], *, taint: bool) -> Any:
        """Return ``hidden`` in the form of the blocks' output.

        Args:
            hidden: the hidden state.
            others: further items that are known, by their index.
            taint: whether tensors among the items that are not known are NaN. Otherwise they are None.
        """
        if self.form is None or self.form[0] is None:
            return hidden
        unknown = [
            torch.full(like[0], torch.nan, dtype=like[1], device=hidden.device) if taint and like is not None else None
            for like in self.form[0]
        ]
        return (hidden, *(others.get(i, item) for i, item in enumerate(unknown, 1)))

    def show(self, modules: list[nn.Module]) -> None:
        """Register ``modules`` in the blocks' places."""
        for (parent, key), module in zip(self.slots, modules, strict=True):
            parent._modules[key] = module

    def shown(self) -> list[nn.Module]:
        """Return the modules registered in the blocks' places."""
        return [cast("nn.Module", parent._modules[key]) for parent, key in self.slots]


def _plain(value: Any) -> bool:
    """Whether an item of a block's output is one floating-point tensor or has no tensors."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if isinstance(value, tuple | list):
        return not any(isinstance(item, Tensor) or not _plain(item) for item in value)
    return not isinstance(value, dict) or _plain(tuple(value.values()))


def _like(value: Any) -> Like | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _named(form: Form) -> str:
    return "a tensor" if form is None else f"a tuple of {1 + len(form)}"
