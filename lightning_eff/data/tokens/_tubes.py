"""Tubes of videos and patches of images that a convolution embeds, matched with tokens by trial.

A tube is the input of one place of the embedding: ``kernel`` pixels of every channel. If stride and kernel are equal, tubes
do not overlap, and each pixel is in one of them.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_eff._core.batches import num_samples
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.steps import Step
from lightning_eff.data.tokens._patches import Layout, entered_tokens, handled, trying

Embedding = nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Tubes:
    """The tubes that a stack's tokens embed.

    Attributes:
        embedding: the convolution that embeds the tubes.
        axes: the order of its grid's dimensions in which the tubes became tokens. The last one runs fastest.
        dim: the width of a token.
    """

    embedding: Embedding
    axes: tuple[int, ...]
    dim: int

    @property
    def pixels(self) -> int:
        """The pixels of a tube, over all channels."""
        return self.embedding.in_channels * math.prod(self.embedding.kernel_size)

    def numbers(self, x: Tensor) -> Tensor:
        """Return for each token the number of its tube among :func:`tubes` of ``x``, (N,)."""
        return tube_numbers(grid_of(x, self.embedding.kernel_size), self.axes)


def embeddings_of(module: nn.Module) -> dict[str, Embedding]:
    """Return the convolutions of ``module`` that embed tubes without overlap, by path: kernel and stride are equal, above 1."""
    return {
        path: m
        for path, m in module.named_modules()
        if isinstance(m, nn.Conv2d | nn.Conv3d)
        and m.kernel_size == m.stride
        and math.prod(m.kernel_size) > 1
        and m.groups == 1
        and not any(m.padding if isinstance(m.padding, tuple) else [m.padding != "valid"])
        and set(m.dilation) == {1}
    }


def grid_of(x: Tensor, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of tubes along each dimension of ``x``, (B, C, ...)."""
    return tuple(n // k for n, k in zip(x.shape[2:], kernel, strict=True))


def tubes(x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Return the pixels of each tube of ``x``, (B, C, T, H, W) or (B, C, H, W), as (B, N, C * prod(kernel)).

    Tubes are in the order of the convolution's flattened output. Remainders at the end of a dimension are in no tube.
    """
    grid, dims = grid_of(x, kernel), len(kernel)
    for dim, (n, k) in enumerate(zip(grid, kernel, strict=True)):
        x = x.narrow(dim + 2, 0, n * k)
    cut = x.reshape(*x.shape[:2], *itertools.chain.from_iterable(zip(grid, kernel, strict=True)))
    places, pixels = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    return cut.permute(0, *places, 1, *pixels).flatten(1, dims).flatten(2)


def find_tubes(
    step: Step, batch: Any, stack: BlockStack, layout: Layout, embedding: Embedding, generator: Generator
) -> Tubes | str:
    """Return the tubes of ``embedding`` that the stack's tokens embed, or the reason why there are none.

    It runs passes that change some tubes in each sample: for each bit, those whose number has it, and those without it. A token
    that embeds one tube changes with one of the two.
    """
    size, given = num_samples(batch), list[Tensor]()
    with trying(step, generator):

        def note(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given.append((*args, *kwargs.values())[0])
            return run(*args, **kwargs)

        with handled(embedding, note):
            tokens = entered_tokens(step, batch, stack)
        if len(given) != 1 or given[0].shape[0] != size:
            shapes = ", ".join(str(tuple(x.shape)) for x in given) or "nothing"
            return f"it was called with {shapes} for {size} samples instead of once with a row for each"
        grid = grid_of(given[0], embedding.kernel_size)
        number, count = math.prod(grid), tokens.shape[1] - layout.before - layout.after
        if number != count:
            return f"it makes {number} tubes per sample, but {count} of the tokens come from the input"
        bits = max(1, (number - 1).bit_length())
        has = (torch.arange(number)[:, None] >> torch.arange(bits)) & 1
        chosen = (
            torch.cat([has, 1 - has], dim=1).bool().T.reshape(2 * bits, *grid)
        )  # the tubes that change in each trial
        shape = given[0].shape[1:]
        noise = torch.randn(2, *shape, generator=generator).to(given[0].device, given[0].dtype)

        def run_on(which: Tensor) -> Tensor:
            for dim, k in enumerate(embedding.kernel_size, 1):
                which = which.repeat_interleave(k, dim=dim)
            padded = torch.zeros(size, *shape[1:], dtype=torch.bool)
            padded[(slice(len(which)), *(slice(n) for n in which.shape[1:]))] = which
            x = torch.where(padded.unsqueeze(1).to(noise.device), noise[1], noise[0])
            with handled(embedding, lambda run, args, kwargs: run(x)):
                return entered_tokens(step, batch, stack)[:, layout.before : layout.before + count]

        plain = run_on(torch.zeros(1, *grid, dtype=torch.bool))
        scale = plain.abs().amax()
        changed = torch.cat(
            [
                ((run_on(part) - plain).abs().amax(dim=-1) > 1e-4 * scale)[: len(part)].cpu()
                for part in chosen.split(size)
            ]
        )
    with_bit, without = changed[:bits], changed[bits:]
    if not bool((with_bit ^ without).all()):
        return "a token comes from several of its tubes, or from none"
    tube = (with_bit.long() << torch.arange(bits)[:, None]).sum(dim=0)
    for axes in itertools.permutations(range(len(grid))):
        if torch.equal(tube, tube_numbers(grid, axes)):
            return Tubes(embedding, axes, tokens.shape[-1])
    return "the order of tokens does not follow the dimensions of its tubes"


def tube_numbers(grid: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    """Return for each token the number of its tube in the convolution's flattened output, (N,)."""
    return torch.arange(math.prod(grid)).reshape(grid).permute(axes).flatten()
