"""Find the tokens of a stack that are image patches, and test whether the head works without some of them.

A token that does not depend on the image (a class token, registers) is the same for all images. A head on class tokens, or
on the mean of the patches, gives the same result for any order of patches, and if each patch comes twice. A head that
depends on their places or their number (dense prediction, flattened patches, sums) does not.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._tokens.checking import token_dim
from lightning_eff._core.batches import map_tensors, num_samples, tensors
from lightning_eff._core.blocks import BlockStack, hidden_of, split_output
from lightning_eff._core.losses import loss_of
from lightning_eff._core.patches import Patches
from lightning_eff._core.search_space import RunProfile, needs_blocks
from lightning_eff._core.steps import Step, in_evaluation
from lightning_eff._core.wrapping import unrounded
from lightning_eff.data.tokens._texts.batches import listed


def no_patches(profile: RunProfile) -> str | None:
    """Return why a technique that drops patches of images or frames is pointless for a run, or None."""
    if not profile.grids:
        return "samples are not images or frames"
    return needs_blocks(profile)


@dataclass(frozen=True)
class Layout:
    """The position of the patches among a sample's tokens.

    Attributes:
        before: the number of tokens in front of them that do not depend on the image, such as a class token and registers.
        after: the number of such tokens behind them.
    """

    before: int
    after: int


def keep(patches: Tensor, layout: Layout, tokens: int) -> Tensor:
    """Return the places of the kept tokens: the patches at ``patches``, (rows, k), in order, and all other tokens."""
    rows, before, after = len(patches), layout.before, layout.after
    ends = (torch.arange(before), torch.arange(tokens - after, tokens))
    return torch.cat([ends[0].expand(rows, -1), patches + before, ends[1].expand(rows, -1)], dim=1)


def find_layout(step: Step, batch: Any, stack: BlockStack, generator: Generator, *, who: str) -> Layout:
    """Find the patches among the tokens and test the head, by forward passes in evaluation mode that leave no trace.

    Args:
        step: the step of the batch.
        batch: the batch that the rest of the chain gets.
        stack: the stack whose first running block receives the patches.
        generator: the generator for random inputs.
        who: the technique's name, for messages.

    Raises:
        ValueError: if the batch holds no images, none of the tokens comes from them, other tokens are between them, or the
            head depends on the places or the number of the patches.
    """
    with trying(step, generator):
        layout, dim = _look_at_tokens(step, batch, stack, generator, who)
        _try_head(step, batch, stack, layout, dim, generator, who)
    return layout


def find_patches(step: Step, batch: Any, stack: BlockStack, generator: Generator, *, who: str) -> Layout:
    """Find the patches like :func:`find_layout`, without testing the head, which gets as many tokens as before."""
    with trying(step, generator):
        return _look_at_tokens(step, batch, stack, generator, who)[0]


def entered_tokens(step: Step, batch: Any, stack: BlockStack) -> Tensor:
    """Return the tokens (B, T, D) that a stack gets, within :func:`trying`."""
    size = num_samples(batch)
    hidden = _entered(step, batch, size, stack.running()[0])
    return hidden if token_dim(hidden, size) == 1 else hidden.transpose(0, 1)


@contextmanager
def trying(step: Step, generator: Generator) -> Iterator[None]:
    """Run test passes in evaluation mode and full precision."""
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
        raise ValueError(
            f"{who}: found no images in the batch, which holds {listed(batch)}. Return a floating-point or uint8 tensor"
            f" ({size}, ...) of three or more dimensions, or remove {who}."
        )
    found = [_entered(step, _noisy(batch, size, generator), size, stack.running()[0]) for _ in range(2)]
    dim = token_dim(found[0], size)
    first, second = (t if dim == 1 else t.transpose(0, 1) for t in found)
    same = ((first == second) & (first == first[:1])).all(dim=-1).all(dim=0)
    if bool(same.all()):
        shapes = ", ".join(f"{path or 'the batch'} {tuple(t.shape)}" for path, t in images)
        raise ValueError(
            f"{who}: none of the {len(same)} tokens that {stack} gets depends on the images ({shapes}). Name the stack that"
            f" gets their patches with layers=, or remove {who}."
        )
    places = (~same).nonzero().flatten()
    before, after = int(places[0]), len(same) - 1 - int(places[-1])
    if len(places) != len(same) - before - after:
        others = same.nonzero().flatten().tolist()
        raise ValueError(
            f"{who}: the tokens at {others} of the {len(same)} that {stack} gets do not depend on the image and are between"
            f" patches, but must be before or after all of them. Remove {who}."
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

    for arrange in (patches_twice, all_twice):  # a mean over all tokens counts class tokens too
        try:
            with handled(stack.running()[-1], turned(arrange)):
                loss = _loss(step, batch, size)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            reason = reason or f"training_step fails with other patches: {first_line(error, 160)}"
            continue
        if loss is not None and abs(loss - plain) <= tolerance * max(abs(plain), 1e-3):
            return
        reason = reason or f"the loss is {loss} instead of {plain} with each patch twice in random order"
    raise ValueError(
        f"{who}: the head behind {stack} depends on the places or the number of the patches ({reason}). Use a head on class"
        f" tokens or on the mean of the patches, or remove {who}: dense prediction and reconstruction need all patches."
    )


def _is_image(t: Tensor, size: int) -> bool:
    return t.ndim >= 3 and t.shape[0] == size and (t.is_floating_point() or t.dtype == torch.uint8)


def _noisy(batch: Any, size: int, generator: Generator) -> Any:
    """Replace the images of a batch by noise."""

    def noise(t: Tensor) -> Tensor:
        if not _is_image(t, size):
            return t
        if t.dtype == torch.uint8:
            return torch.randint(0, 256, t.shape, generator=generator, dtype=torch.uint8).to(t.device)
        return torch.randn(t.shape, generator=generator).to(t.device, t.dtype)

    return map_tensors(batch, noise)


def _entered(step: Step, batch: Any, size: int, block: nn.Module) -> Tensor:
    """Return the hidden state that a block gets."""
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
    """Split tokens (B, T, D) into those before the patches, the patches, and those behind them."""
    end = hidden.shape[1] - layout.after
    return hidden[:, : layout.before], hidden[:, layout.before : end], hidden[:, end:]


def _shuffled(patches: Tensor, generator: Generator) -> Tensor:
    return patches[:, torch.randperm(patches.shape[1], generator=generator).to(patches.device)]


@contextmanager
def handled(block: nn.Module, handle: Callable[..., Any]) -> Iterator[None]:
    """Send calls of the module to ``handle(run, args, kwargs)``."""
    name = "_call_impl" if block._compiled_call_impl is None else "_compiled_call_impl"
    run, patches = getattr(block, name), Patches()
    patches.set(block, name, lambda *args, **kwargs: handle(run, args, kwargs))
    try:
        yield
    finally:
        patches.restore()


@contextmanager
def _none_zero(module: nn.Module, generator: Generator) -> Iterator[None]:
    """Fill parameters that are all zero with noise, since a zero head would hide what it depends on."""
    held = [(p, p.detach().clone()) for p in module.parameters() if not bool(p.detach().any())]
    try:
        for p, _ in held:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
        yield
    finally:
        for p, value in held:
            p.data.copy_(value)
