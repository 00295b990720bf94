"""Which tokens of a stack are patches of images, and whether what comes after it does without some of them: by trial.

A token that no image reaches (a class token, registers) is the same whatever the images are. A head that goes by class
tokens, or by the mean of the patches, gives the same whichever way round patches come, and when each comes twice; one that
goes by their places or their number (dense prediction, flattened patches, sums) does not.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_eff._core._run.words import first_line
from lightning_eff._core._tokens.checking import token_dim
from lightning_eff._core.batches import map_tensors, num_samples, tensors
from lightning_eff._core.blocks import BlockStack, hidden_of, split_output
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import Patches
from lightning_eff._core.search_space import RunProfile, needs_blocks
from lightning_eff._core.steps import Step, in_evaluation
from lightning_eff._core.wrapping import unrounded


def no_patches(profile: RunProfile) -> str | None:
    """Why a technique that leaves out patches of images or frames would be tried in vain."""
    if not profile.grids:
        return "samples are no images or frames"
    return needs_blocks(profile)


@dataclass(frozen=True)
class Layout:
    """Where the patches stand among a sample's tokens.

    Attributes:
        before: tokens in front of them that no image reaches, such as a class token and registers.
        after: such tokens behind them.
    """

    before: int
    after: int


def keep(patches: Tensor, layout: Layout, tokens: int) -> Tensor:
    """The places of the tokens that are kept: the patches at ``patches``, (rows, k), ascending, and all that are none."""
    rows, before, after = len(patches), layout.before, layout.after
    ends = (torch.arange(before), torch.arange(tokens - after, tokens))
    return torch.cat([ends[0].expand(rows, -1), patches + before, ends[1].expand(rows, -1)], dim=1)


def find_layout(step: Step, batch: Any, stack: BlockStack, generator: Generator, *, who: str) -> Layout:
    """Try it with a batch, in evaluation mode, by some forward passes that leave no trace.

    Args:
        step: the step of the batch.
        batch: what the rest of the chain gets.
        stack: its first block that runs is handed the patches.
        generator: of what is drawn.
        who: the technique's name, for messages.

    Raises:
        ValueError: if the batch holds no images, none of the tokens comes of them, other tokens stand between them, or what
            comes after the stack goes by the patches' places or number.
    """
    with trying(step, generator):
        layout, dim = _look_at_tokens(step, batch, stack, generator, who)
        _try_head(step, batch, stack, layout, dim, generator, who)
    return layout


def find_patches(step: Step, batch: Any, stack: BlockStack, generator: Generator, *, who: str) -> Layout:
    """As :func:`find_layout`, whatever comes after the stack: it gets as many tokens as without."""
    with trying(step, generator):
        return _look_at_tokens(step, batch, stack, generator, who)[0]


def entered_tokens(step: Step, batch: Any, stack: BlockStack) -> Tensor:
    """The tokens (B, T, D) that a stack gets; within :func:`trying`."""
    size = num_samples(batch)
    hidden = _entered(step, batch, size, stack.running()[0])
    return hidden if token_dim(hidden, size) == 1 else hidden.transpose(0, 1)


@contextmanager
def trying(step: Step, generator: Generator) -> Iterator[None]:
    """Passes in evaluation mode and full precision, by which something is found out."""
    device = next(step.module.parameters()).device.type
    with (
        in_evaluation([*step.module.modules()]),
        unrounded(),
        torch.autocast(device, enabled=False),
        _none_zero(step.module, generator),
    ):
        yield


def _look_at_tokens(step: Step, batch: Any, stack: BlockStack, generator: Generator, who: str) -> tuple[Layout, int]:
    size = num_samples(batch)
    images = [(path, t) for path, t in tensors(batch) if _is_image(t, size)]
    if not images:
        held = ", ".join(f"{path or 'the batch'} {tuple(t.shape)} {str(t.dtype)[6:]}" for path, t in tensors(batch))
        raise ValueError(
            f"{who}: found no images in the batch: {held}; expected a tensor of ({size}, ...) with three dimensions or more,"
            " of floating point or uint8. Take the technique out."
        )
    found = [_entered(step, _noisy(batch, size, generator), size, stack.running()[0]) for _ in range(2)]
    dim = token_dim(found[0], size)
    first, second = (t if dim == 1 else t.transpose(0, 1) for t in found)
    same = ((first == second) & (first == first[:1])).all(dim=-1).all(dim=0)
    if bool(same.all()):
        listed = ", ".join(f"{path or 'the batch'} {tuple(t.shape)}" for path, t in images)
        raise ValueError(
            f"{who}: none of the {len(same)} tokens that {stack} gets comes of the images, {listed}. Name the stack that"
            " gets their patches by layers=, or take the technique out."
        )
    places = (~same).nonzero().flatten()
    before, after = int(places[0]), len(same) - 1 - int(places[-1])
    if len(places) != len(same) - before - after:
        others = same.nonzero().flatten().tolist()
        raise ValueError(
            f"{who}: of the {len(same)} tokens that {stack} gets, those at {others} come of no image, and stand between some"
            " that do; expected such tokens in front of all patches or behind them. Take the technique out."
        )
    return Layout(before, after), dim


def _try_head(
    step: Step,
    batch: Any,
    stack: BlockStack,
    layout: Layout,
    dim: int,
    generator: Generator,
    who: str,
) -> None:
    size, reason = num_samples(batch), ""
    plain = _loss(step, batch, size)
    if plain is None:  # the step skips this batch
        return
    tolerance = 1e-4 if all(p.dtype.itemsize >= 4 for p in step.module.parameters()) else 3e-2

    def turned(arrange: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def handle(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = run(*args, **kwargs)
            hidden, rest = split_output(output)
            out = arrange(hidden if dim == 1 else hidden.transpose(0, 1))
            out = out if dim == 1 else out.transpose(0, 1)
            return out if rest is None else (out, *rest)

        return handle

    def patches_twice(hidden: Tensor) -> Tensor:
        before, patches, after = _parts(hidden, layout)
        return torch.cat([before, _shuffled(patches, generator), _shuffled(patches, generator), after], dim=1)

    def all_twice(hidden: Tensor) -> Tensor:
        before, patches, after = _parts(hidden, layout)
        return torch.cat([before, _shuffled(patches, generator), after], dim=1).repeat_interleave(2, dim=1)

    for arrange in (patches_twice, all_twice):  # a mean over all tokens counts class tokens, too
        try:
            with handled(stack.running()[-1], turned(arrange)):
                loss = _loss(step, batch, size)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            reason = reason or f"with other patches training_step fails: {first_line(error, 160)}"
            continue
        if loss is not None and abs(loss - plain) <= tolerance * max(abs(plain), 1e-3):
            return
        reason = reason or f"the loss is {loss} instead of {plain} with each patch twice and in another order"
    raise ValueError(
        f"{who}: what comes after {stack} goes by the places of the patches, or by their number ({reason}); expected a head"
        " on class tokens or on the mean of the patches, which does without some of them. Dense prediction, reconstruction"
        " and flattened patches need them all: take the technique out."
    )


def _is_image(t: Tensor, size: int) -> bool:
    return t.ndim >= 3 and t.shape[0] == size and (t.is_floating_point() or t.dtype == torch.uint8)


def _noisy(batch: Any, size: int, generator: Generator) -> Any:
    """The batch with noise for images."""

    def noise(t: Tensor) -> Tensor:
        if not _is_image(t, size):
            return t
        if t.dtype == torch.uint8:
            return torch.randint(0, 256, t.shape, generator=generator, dtype=torch.uint8).to(t.device)
        return torch.randn(t.shape, generator=generator).to(t.device, t.dtype)

    return map_tensors(batch, noise)


def _entered(step: Step, batch: Any, size: int, block: nn.Module) -> Tensor:
    """The hidden state that a block gets."""
    found: list[Tensor] = []

    def handle(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(hidden_of(args, kwargs).detach().clone())
        return run(*args, **kwargs)

    with handled(block, handle):
        step.forward_only(batch, size, transform=False)
    return found[0]


def _loss(step: Step, batch: Any, size: int) -> float | None:
    loss = loss_of(step.forward_only(batch, size, transform=False))
    return None if loss is None or not math.isfinite(float(loss)) else float(loss)


def _parts(hidden: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens (B, T, D) before the patches, the patches, and those behind them."""
    end = hidden.shape[1] - layout.after
    return hidden[:, : layout.before], hidden[:, layout.before : end], hidden[:, end:]


def _shuffled(patches: Tensor, generator: Generator) -> Tensor:
    return patches[:, torch.randperm(patches.shape[1], generator=generator).to(patches.device)]


@contextmanager
def handled(block: nn.Module, handle: Callable[..., Any]) -> Iterator[None]:
    """Calls of the module go to ``handle(run, args, kwargs)``."""
    name = "_call_impl" if block._compiled_call_impl is None else "_compiled_call_impl"
    run, patches = getattr(block, name), Patches()
    patches.set(block, name, lambda *args, **kwargs: handle(run, args, kwargs))
    try:
        yield
    finally:
        patches.restore()


@contextmanager
def _none_zero(module: nn.Module, generator: Generator) -> Iterator[None]:
    """Parameters that are all zero hold some noise: a head that begins so would hide what it goes by."""
    held = [(p, p.detach().clone()) for p in module.parameters() if not bool(p.detach().any())]
    try:
        for p, _ in held:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
        yield
    finally:
        for p, value in held:
            p.data.copy_(value)
