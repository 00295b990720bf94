"""The stack of blocks that a pipeline cuts, and what is learnt of what its blocks take and return."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_eff._core.blocks import Candidate, hidden_of, split_output

Like = tuple[tuple[int, ...], torch.dtype]
Form = tuple[Like | None, ...] | None

ONE_OUTPUT = (
    "Let the block return the hidden state alone (in Hugging Face models: output_attentions=False,"
    " output_router_logits=False, use_cache=False), or use pipeline_parallel_size=1."
)


class Stack:
    """The blocks of a model, in whole, and what is known of their output.

    Attributes:
        blocks: the module's own blocks, in order.
        names: their dotted paths.
        slots: where each is registered: the module that holds it, and its name there.
        form: what a block returns beside the hidden state, in a tuple of one: None if it returns a tensor, else of each
            further item its shape and type, or None if it is no tensor; None until a block was seen to run.
        slot: the argument by which blocks take the hidden state, its position or its name, if a block was seen to take
            what the one before it returned; else it is the first floating-point tensor.
        origins: whence each block has its hidden state in a training step: from the block before it, or from an operation
            of the caller (see :mod:`.between`). A block of which that is not known has no entry.
    """

    def __init__(self, found: Candidate, *, who: str) -> None:
        self.path, self.who = found.path, who
        self.slots, self.names = found.slots, [*found.named_blocks]
        self.blocks = found.blocks
        self.form: tuple[Form] | None = None
        self.slot: int | str | None = None
        self.origins: dict[int, int] = {}
        self._returned: Tensor | None = None

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden state in a block's call."""
        if isinstance(self.slot, int) and self.slot < len(args) and isinstance(args[self.slot], Tensor):
            return args[self.slot]
        if isinstance(self.slot, str) and isinstance(kwargs.get(self.slot), Tensor):
            return kwargs[self.slot]
        return hidden_of(args, kwargs)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], new: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A block's call with ``new`` in the place of the hidden state."""
        old = self.hidden(args, kwargs)
        for i, value in enumerate(args):
            if value is old:
                return (*args[:i], new, *args[i + 1 :]), kwargs
        key = next(key for key in ("hidden_states", *kwargs) if kwargs.get(key) is old)
        return args, {**kwargs, key: new}

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Learn by which argument a block takes what the one before it returned."""
        if self._returned is None or self.slot is not None:
            return
        slots = [key for key, value in (*enumerate(args), *kwargs.items()) if value is self._returned]
        self.slot = slots[0] if slots else None

    def note(self, index: int, output: Any) -> None:
        """Learn the form of the blocks' output.

        Raises:
            ValueError: if a block returns what cannot be stood in for, or another form than the blocks before it.
        """
        try:
            self._returned, rest = split_output(output)
        except TypeError as error:
            raise ValueError(f"{self.who}: block {index} of {self.path!r}: {error}") from None
        held = [i + 1 for i, value in enumerate(rest or ()) if not _plain(value)]
        if held:
            raise ValueError(
                f"{self.who}: block {index} of {self.path!r} returned a tuple of {1 + len(rest or ())}, whose items {held}"
                " hold tensors of integers, or several; expected one tensor, the hidden state, because only that is sent"
                f" to the next pipeline stage. {ONE_OUTPUT}"
            )
        form = None if rest is None else tuple(_like(value) for value in rest)
        if self.form is not None and len(form or ()) != len(self.form[0] or ()):
            raise ValueError(
                f"{self.who}: block {index} of {self.path!r} returned {_named(form)}, those before it"
                f" {_named(self.form[0])}; expected blocks that all return the same form. Name another stack by layers=."
            )
        self.form = (form,)

    def rest(self) -> None:
        """Between passes nothing is held on to."""
        self._returned = None

    @property
    def extra(self) -> list[int]:
        """Which items beside the hidden state are tensors: they do not reach the next stage."""
        return [i + 1 for i, like in enumerate((self.form and self.form[0]) or ()) if like is not None]

    def formed(self, hidden: Tensor, *, taint: bool) -> Any:
        """``hidden`` as the blocks return it; what they return beside it is None, or NaN if that is to be seen."""
        if self.form is None or self.form[0] is None:
            return hidden
        rest = [
            torch.full(like[0], torch.nan, dtype=like[1], device=hidden.device) if taint and like is not None else None
            for like in self.form[0]
        ]
        return (hidden, *rest)

    def show(self, modules: list[nn.Module]) -> None:
        """Put ``modules`` in the blocks' places for good."""
        for (parent, key), module in zip(self.slots, modules, strict=True):
            parent._modules[key] = module

    def shown(self) -> list[nn.Module]:
        """What stands in the blocks' places."""
        return [cast("nn.Module", parent._modules[key]) for parent, key in self.slots]


def _plain(value: Any) -> bool:
    """Whether a block's further output is one floating-point tensor or holds none."""
    if isinstance(value, Tensor):
        return value.is_floating_point()
    if isinstance(value, tuple | list):
        return not any(isinstance(item, Tensor) or not _plain(item) for item in value)
    return not isinstance(value, dict) or _plain(tuple(value.values()))


def _like(value: Any) -> Like | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _named(form: Form) -> str:
    return "a tensor" if form is None else f"a tuple of {1 + len(form)}"
