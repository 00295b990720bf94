"""The check that an output layer's input at one position depends on no later token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core.patches import hook_behind


@contextmanager
def looked_up(root: nn.Module) -> Iterator[list[Tensor]]:
    """Record the outputs of all embeddings, with a graph also if they are frozen."""
    found: list[Tensor] = []

    def note(m: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            found.append(output if output.requires_grad else output.detach().requires_grad_().clone())
            return found[-1]
        return output

    handles = [hook_behind(m, note) for m in root.modules() if isinstance(m, nn.Embedding)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def sees_later(hidden: Tensor, outputs: Sequence[Tensor], labels: Tensor) -> str | None:
    """Return why the hidden states may depend on later tokens, or None if a gradient shows that they do not.

    Args:
        hidden: the output layer's input, (B, T, D) or (B T, D).
        outputs: the outputs of embeddings in the same pass.
        labels: (B, T'), with as many tokens or one more, of which the step takes a part; negative ones do not count.
    """
    samples, length = len(labels), hidden.shape[:-1].numel() // len(labels)
    outputs = [t for t in outputs if t.ndim == 3 and t.shape[:2] == (samples, length)]
    if hidden.shape[:-1].numel() != samples * length or not outputs or not hidden.requires_grad:
        return (
            f"gets {tuple(hidden.shape)}, and was not seen to get one hidden state for each looked-up token of the"
            f" {samples} texts with the labels {tuple(labels.shape)}"
        )
    counts = labels[:, :length] >= 0
    sample = int(counts.sum(1).argmax())
    places = counts[sample].nonzero().flatten().tolist() or [*range(length)]
    at = places[
        (len(places) - 1) // 2
    ]  # with tokens that count on both sides, because code may refuse a gradient at padding
    one = hidden.reshape(samples, length, -1)[sample, at]
    weights = torch.rand(one.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(one)
    for g in torch.autograd.grad((one * weights).sum(), outputs, allow_unused=True, retain_graph=True):
        if g is not None and bool((g[sample, : at + 1] != 0).any()) and not bool((g[sample, at + 1 :] != 0).any()):
            return None
    return "gets hidden states that depend on later tokens, which they would have to predict"
