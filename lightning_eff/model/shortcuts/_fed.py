"""Blocks whose input is joined with tensors from earlier in the same pass, and the check that blocks are a chain."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._branches.side_by_side import as_it_was, side_by_side
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._stack.chains import Feeding, watched
from lightning_eff._core.blocks import Candidate, Layers, find_stack, hidden_of, refuse_compiled_around, split_output


class Feed(ABC):
    """One technique's part in a block's call.

    Attributes:
        turn: the order among several techniques.
    """

    turn = 0

    @abstractmethod
    def enter(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return the hidden state that the block gets in place of ``hidden``."""

    def leave(self, hidden: Tensor) -> None:  # noqa: B027 -- most feeds do not look at it
        """Look at the hidden state that the block returns."""


class Fed(Derived):
    """A block with feeds, which act around all that its class does in a call, such as transformers' checkpointing.

    Attributes:
        feeds: the feeds, in their order.
        undecayed: the names of its parameters that have no weight decay.
    """

    feeds: tuple[Feed, ...]
    undecayed: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = given = hidden_of(args, kwargs)
        for feed in self.feeds:
            hidden = feed.enter(self, hidden)
        if hidden is not given:
            args, kwargs = _with_hidden(args, kwargs, given, hidden)
        output = super().__call__(*args, **kwargs)
        left = split_output(output)[0]
        for feed in self.feeds:
            feed.leave(left)
        return output


def _with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with ``new`` in the place of the hidden state."""
    for i, value in enumerate(args):
        if value is old:
            return (*args[:i], new, *args[i + 1 :]), kwargs
    name = "hidden_states" if kwargs.get("hidden_states") is old else next(n for n, v in kwargs.items() if v is old)
    return args, {**kwargs, name: new}


def fed(plain: nn.Module, feed: Feed, **parameters: nn.Parameter) -> Fed:
    """Return a block with ``plain``'s class, parameters and settings, a further feed, and further parameters."""
    feeds = sorted((*getattr(plain, "feeds", ()), feed), key=lambda one: one.turn)
    names = (*getattr(plain, "undecayed", ()), *parameters)
    made = derived(Fed, plain, feeds=tuple(feeds), undecayed=names)
    for name, p in parameters.items():
        made.register_parameter(name, p)
    return made


def chain(surgeon: Surgeon, layers: Layers, *, who: str, least: int = 2) -> Candidate:
    """Return the stack of blocks that ``layers`` names, or the longest, after a pass that shows that it is a chain.

    Args:
        surgeon: the technique's surgeon; the pass runs on its batch, or on made-up inputs.
        layers: the blocks; None finds them.
        who: the technique's name.
        least: the smallest number of blocks.

    Raises:
        ValueError: if no stack is found, it is compiled as a whole or too short, no pass runs, or a pass shows that its blocks
            do not run once each, in their order, on hidden states of one shape, each fed by the one before it.
    """
    root = surgeon.root
    found = find_stack(
        root, layers, who=who, in_runs=True, without=lambda: side_by_side(root, batch=surgeon.batch), named=True
    )
    refuse_compiled_around(root, found.path, who=who)
    if found.length < least:
        raise ValueError(
            f"{who}: the stack {found} has {found.length} blocks, and {who} needs {least} or more. Name another stack by"
            f" layers=, or remove {who}."
        )
    if any(p.is_meta for p in root.parameters()):
        raise ValueError(
            f"{who}: weights of {type(root).__name__} are on the meta device, so its blocks cannot run. Apply {who} before the"
            " module is moved there."
        )
    tried: list[str] = []
    for of, call in attempts(root, surgeon.batch, blocks=False):
        feeding, order, shapes = Feeding(), list[int](), list[Any]()

        def seen(index: int, args: Any, kwargs: Any, output: Any, to: Any = (feeding, order, shapes)) -> None:
            to[0].seen(index, args, kwargs, output)
            to[1].append(index)
            to[2].extend((hidden_of(args, kwargs).shape, split_output(output)[0].shape))

        with as_it_was(root), aside(root), ExitStack() as scope:
            scope.enter_context(watched(found.blocks, seen))
            try:
                call()
            except Exception as e:  # the module may not take these made-up inputs, but the next ones
                tried.append(f"{of} raised {type(e).__name__} ({first_line(e, 120)})")
                continue
        if not order:
            tried.append(f"{of} ran without the blocks")
            continue
        why = _no_chain(found.length, order, shapes, feeding.verdict)
        if why is None:
            return found
        raise ValueError(
            f"{who}: the blocks of {found} {why}, in {of}, and {who} needs blocks that each run once on the output of the one"
            f" before. Name another stack by layers=, or remove {who}."
        )
    raise ValueError(
        f"{who}: could not check that the blocks of {found} feed each other: {'; '.join(tried[:2]) or 'nothing could be run'}."
        f" Give a batch, lightning_eff.apply(module, {who}(...), batch=batch), or an example_input_array to the"
        " LightningModule."
    )


def _no_chain(length: int, order: Sequence[int], shapes: Sequence[Any], verdict: bool | None) -> str | None:
    if list(order) != list(range(length)):
        return f"ran in the order {list(order)[:16]}"
    if len(set(shapes)) > 1:
        return f"have hidden states of several shapes ({', '.join(sorted({str(tuple(s)) for s in shapes})[:4])})"
    return None if verdict else "were not seen to feed each other"


def feed_blocks(
    surgeon: Surgeon, found: Candidate, feeds: dict[int, tuple[Feed, dict[str, float | list[float]]]]
) -> None:
    """Give blocks of a chain their feeds and first values of new parameters, by the block's index."""
    by_id = {id(block): feeds[i] for i, block in enumerate(found.blocks) if i in feeds}

    def build(plain: nn.Module) -> nn.Module:
        feed, first = by_id[id(plain)]
        return fed(plain, feed, **{name: nn.Parameter(torch.tensor(value)) for name, value in first.items()})

    surgeon.swap(lambda path, m: id(m) in by_id, build, what="a block", numbers=True)


def weights(block: nn.Module, name: str) -> Tensor:
    """Return a block's parameter."""
    return cast(Tensor, block._parameters[name])
