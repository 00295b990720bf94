"""Checkpoints of several runs: read, compared and averaged (Wortsman et al. 2022)."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]


def read(path: str | Path) -> dict[str, Any]:
    """Read a Lightning checkpoint onto the CPU.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a sharded checkpoint, one with arbitrary Python objects, or a file without weights.
    """
    file = Path(path)
    if file.is_dir():
        raise ValueError(
            f"merge({str(path)!r}): this is a sharded checkpoint. Write it as one file first: python -m"
            f" lightning.pytorch.utilities.consolidate_checkpoint {path}"
        )
    if not file.is_file():
        raise FileNotFoundError(f"merge({str(path)!r}): there is no such file. Pass the path of a checkpoint.")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"merge({str(path)!r}): the checkpoint holds objects that torch does not load safely. Save the run with"
            " ModelCheckpoint(save_weights_only=True), or save {'state_dict': module.state_dict()}."
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("state_dict"), dict):
        raise ValueError(f"merge({str(path)!r}): the file has no 'state_dict'. Pass checkpoints that Lightning wrote.")
    return found


def check_alike(paths: Sequence[str], checkpoints: Sequence[Mapping[str, Any]]) -> None:
    """Check that all checkpoints are of one architecture.

    Raises:
        ValueError: if names, shapes or the techniques that changed the architecture differ.
    """
    first = checkpoints[0]["state_dict"]
    for path, checkpoint in zip(paths[1:], checkpoints[1:], strict=True):
        state = checkpoint["state_dict"]
        if other := sorted({*first} ^ {*state}):
            raise ValueError(
                f"merge: {paths[0]} and {path} have different weights ({', '.join(other[:5])}"
                f"{', ...' if len(other) > 5 else ''}). Merge runs of one architecture."
            )
        for name, value in state.items():
            if value.shape != first[name].shape:
                raise ValueError(
                    f"merge: {name} has shape {tuple(first[name].shape)} in {paths[0]} and {tuple(value.shape)} in {path}."
                    " Merge runs of one architecture."
                )
        if architecture(checkpoint) != architecture(checkpoints[0]):
            raise ValueError(
                f"merge: {paths[0]} and {path} were trained with other techniques that change the architecture. Merge runs"
                " with the same settings of these."
            )


def architecture(checkpoint: Mapping[str, Any]) -> Any:
    """Return the techniques that changed the architecture, with their settings."""
    return checkpoint.get("lightning_eff", {}).get("architecture", [])


def adapters(checkpoint: Mapping[str, Any]) -> bool:
    """Whether its weights have adapters whose effect is a product of two weights."""
    return any(name.rpartition(".")[2].startswith("lora_") or ".lora_" in name for name in checkpoint["state_dict"])


@torch.no_grad()
def mean(states: Sequence[State], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return ``w = Σ_i a_i w_i / Σ_i a_i`` by name, summed in float64. Integers and flags are the first state's.

    Args:
        states: ``w_i``, with the same names and shapes.
        weights: ``a_i``, >= 0, not all 0.
    """
    total = sum(weights)
    merged = {}
    for name, value in states[0].items():
        if value.is_floating_point() or value.is_complex():
            wide = torch.complex128 if value.is_complex() else torch.float64
            value = sum(
                (state[name].to(wide) * (a / total) for state, a in zip(states, weights, strict=True)),
                torch.zeros_like(value, dtype=wide),
            ).to(value.dtype)
        merged[name] = value.clone()
    return merged


def unequal(states: Sequence[State]) -> list[str]:
    """Return the names of integers and flags that differ between states, without BatchNorm's counts."""
    return [
        name
        for name, value in states[0].items()
        if not (value.is_floating_point() or value.is_complex() or name.endswith("num_batches_tracked"))
        and not all(torch.equal(value, state[name]) for state in states[1:])
    ]


def has_statistics(state: State) -> bool:
    """Whether it has the running statistics of a BatchNorm layer."""
    return any(name.rpartition(".")[2] == "running_mean" for name in state)


def unlike_statistics(states: Sequence[State]) -> list[str]:
    """Return the names of BatchNorm's running means whose layer has other statistics in one of the states."""
    return [
        name
        for name in states[0]
        if name.rpartition(".")[2] == "running_mean"
        and not all(
            torch.equal(states[0][one], state[one])
            for one in (name, name.removesuffix("mean") + "var")
            for state in states[1:]
        )
    ]


def greedy(
    scores: Sequence[float], score_of: Callable[[list[int]], float], *, better: Callable[[float, float], bool]
) -> tuple[list[int], float]:
    """Add states to the soup from the best one on, and keep each that does not make it worse (recipe 1 of the paper).

    Args:
        scores: the score of each state alone.
        score_of: returns the score of the mean of the states at some places.
        better: whether the first score is better than the second.

    Returns:
        The places of the soup's states, best first, and the score of their mean.
    """
    order: list[int] = []
    left = list(range(len(scores)))
    while left:  # sorted by `better`, because the mode decides
        best = left[0]
        for i in left[1:]:
            best = i if better(scores[i], scores[best]) else best
        order.append(best)
        left.remove(best)
    soup, score = order[:1], scores[order[0]]
    for i in order[1:]:
        found = score_of([*soup, i])
        if not better(score, found) and found == found:
            soup, score = [*soup, i], found
    return soup, score
