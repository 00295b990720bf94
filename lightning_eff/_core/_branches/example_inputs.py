"""Generate inputs with which a module may be called, from its config, embeddings, convolutions and linear layers."""

import inspect
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LENGTH = 8  # of a generated sequence, unless the module requires another
SAMPLES = 2
_TARGETS = ("label", "labels", "target", "targets", "y")


class Call(NamedTuple):
    """The arguments of a call, by position and by name."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 -- a named tuple's default, never changed


def calls_of(part: nn.Module) -> Iterator[tuple[str, Call]]:
    """Yield calls that ``part.forward`` may accept, most likely first, each with a description."""
    names = required(part)
    if getattr(part, "config", None) is not None and hasattr(part, "main_input_name"):
        call = _transformers(part)
        if call is not None:
            yield "inputs of its config", call
        return
    if not names:
        return
    for what, made in inputs(part):
        yield what, Call(tuple(targets(made) if name in _TARGETS else made for name in names))
        if len(names) > 1:
            yield f"{what} and None", Call((made, *[None] * (len(names) - 1)))


def targets(x: Tensor) -> Tensor:
    """Return possible targets for an input: the ids themselves, or class 0 for each sample."""
    return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device) if x.is_floating_point() else x


def required(part: nn.Module) -> list[str]:
    """Return the arguments of ``forward`` without a default; the first argument if there are none."""
    found = inspect.signature(part.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in found if p.kind in positional and p.default is inspect.Parameter.empty]
    return names or [p.name for p in found if p.kind in (*positional, inspect.Parameter.VAR_POSITIONAL)][:1]


def inputs(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that ``part`` may accept: ids for embeddings, images for convolutions, otherwise features."""
    makers = {"ids": _ids, "images": _images, "waves": _waves, "features": _features}
    kinds: dict[str, None] = {}
    for m in part.modules():
        if isinstance(m, nn.Embedding | nn.EmbeddingBag):
            kinds["ids"] = None
        elif isinstance(m, nn.Conv2d):
            kinds["images"] = None
        elif isinstance(m, nn.Conv1d):
            kinds["waves"] = None
    images_first = "images" in kinds and "ids" in kinds and _first_is_conv(part)
    order = sorted(kinds, key=lambda kind: ("images", "waves", "ids").index(kind) if images_first else kind != "ids")
    for kind in (*order, "features"):
        yield from makers[kind](part)


def step_batches(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield batches that a ``training_step`` may accept: inputs only, with targets as a pair, and by common names."""
    for what, x in inputs(module):
        names = ("input_ids", "ids", "x") if not x.is_floating_point() else ("x", "pixel_values", "image", "images")
        yield f"{what} with targets", (x, targets(x))
        for name in names:
            for target in ("labels", "y", "label", "targets"):
                yield f"{what} with targets, by name", {name: x, target: targets(x)}
        yield what, x


def hidden_states(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs that a block of a stack may accept: (B, T, D), or (B, C, H, W)."""
    if len(required(block)) != 1:
        return
    yield from inputs(block)


def _first_is_conv(part: nn.Module) -> bool:
    leaves = (m for m in part.modules() if isinstance(m, nn.Embedding | nn.Conv2d | nn.Conv1d))
    return not isinstance(next(leaves, None), nn.Embedding)


def _like(part: nn.Module) -> Tensor:
    """Return the first floating-point parameter, whose device and dtype an input gets."""
    return next((p for p in part.parameters() if p.is_floating_point()), torch.empty(0))


def noise(part: nn.Module, *shape: int) -> Tensor:
    """Return fixed normal numbers that require gradients, because a branch may start at the module's input."""
    like = _like(part)
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return made.to(like.device, like.dtype).requires_grad_(True)


def ids(part: nn.Module, length: int, below: int) -> Tensor:
    """Return ids (B, T), as many different ones as possible."""
    made = torch.arange(SAMPLES * length, device="cpu") % max(below, 1)
    return made.view(SAMPLES, length).to(_like(part).device)


def _lengths(part: nn.Module) -> list[int]:
    """Return possible sequence lengths: a default, and those of the module's position tables."""
    places = [p.shape[1] for p in part.parameters() if p.ndim == 3 and p.shape[0] == 1 and p.shape[1] > 1]
    tables = [m.num_embeddings for m in part.modules() if isinstance(m, nn.Embedding)]
    places += [n for n in (min(tables, default=0),) if n > 1]
    return list(dict.fromkeys([min([LENGTH, *places]), *(n for n in places if n <= 4096), 1]))


def _ids(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tables = [m.num_embeddings for m in part.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    for length in _lengths(part):
        yield f"ids of shape ({SAMPLES}, {length})", ids(part, length, min(tables))


def _images(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    first = next(m for m in part.modules() if isinstance(m, nn.Conv2d))
    stride, channels = first.stride[0], first.in_channels
    sides: list[int] = []
    for p in part.parameters():
        if stride > 1 and p.ndim in (2, 3) and p.shape[-1] == first.out_channels:
            for extra in (0, 1, 2, 5):  # class tokens and registers
                side = math.isqrt(max(p.shape[-2] - extra, 0))
                if side > 1 and side * side == p.shape[-2] - extra:
                    sides.append(side * stride)
    for side in dict.fromkeys([*sides, 32, 28, 64, 16, 8, 224]):
        yield f"images of side {side}", noise(part, SAMPLES, channels, side, side)
    for m in part.modules():  # a linear layer after flattening fixes the side
        if isinstance(m, nn.Linear):
            for side in (48, 96, 128):
                yield f"images of side {side}", noise(part, SAMPLES, channels, side, side)
            return


def _waves(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    first = next(m for m in part.modules() if isinstance(m, nn.Conv1d))
    for length in (64, 1024):
        yield f"signals of length {length}", noise(part, SAMPLES, first.in_channels, length)


def _features(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    widths: dict[int, None] = {}
    for m in part.modules():
        if isinstance(m, nn.Linear):
            widths[m.in_features] = None
        elif isinstance(m, nn.MultiheadAttention):
            widths[m.embed_dim] = None
        elif isinstance(m, nn.LayerNorm | nn.RMSNorm):
            widths[m.normalized_shape[-1]] = None
    widths |= {p.shape[-1]: None for p in part.parameters() if p.ndim == 1}
    widths |= {size: None for p in part.parameters() if p.ndim == 2 for size in (p.shape[1], p.shape[0])}
    for width in list(widths)[:4]:
        for length in _lengths(part):
            yield f"features of shape ({SAMPLES}, {length}, {width})", noise(part, SAMPLES, length, width)
        yield f"features of shape ({SAMPLES}, {width})", noise(part, SAMPLES, width)


def _transformers(part: Any) -> Call | None:
    """Return arguments of a Hugging Face model, from its signature and its config."""
    config, names = part.config, inspect.signature(part.forward).parameters
    text = getattr(config, "get_text_config", lambda: config)()
    vision = getattr(config, "vision_config", config)
    found: dict[str, Any] = {}
    try:
        embeddings = part.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # the model has none
        embeddings = None
    vocabulary = getattr(embeddings, "num_embeddings", None) or getattr(text, "vocab_size", None)
    for name in ("input_ids", "decoder_input_ids"):
        if name in names and vocabulary:
            found[name] = ids(part, LENGTH, vocabulary)
    if "pixel_values" in names:
        size = getattr(vision, "image_size", None) or 224
        sides = (size, size) if isinstance(size, int) else tuple(size)
        frames = (vision.num_frames,) if hasattr(vision, "num_frames") else ()
        found["pixel_values"] = noise(part, SAMPLES, *frames, getattr(vision, "num_channels", 3), *sides[:2])
    if "input_values" in names:
        found["input_values"] = noise(part, SAMPLES, 1600)
    if "input_features" in names and hasattr(config, "num_mel_bins"):
        found["input_features"] = noise(
            part, SAMPLES, config.num_mel_bins, 2 * getattr(config, "max_source_positions", 50)
        )
    return Call(kwargs=found) if found else None
