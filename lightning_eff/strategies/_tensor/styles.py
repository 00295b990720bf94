"""Tensor-parallel styles by name, and the modules that each supports."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core._architecture.stand_ins import stands_in
from lightning_eff.strategies._tensor.access import own_class

PACKED = "packed_colwise"
WHOLE = (
    "colwise_replicated"  # all outputs on every rank, for its part of the next computation, such as a single key head
)
LINEAR_STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", PACKED, WHOLE)
EMBEDDING_STYLES = ("embedding_rowwise", "embedding_colwise")
ANY_STYLES = ("gather", "replicate", "replicated_with_grad_allreduce", "sequence_parallel")
SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
STYLES = (*LINEAR_STYLES, *EMBEDDING_STYLES, *ANY_STYLES)


@dataclass(frozen=True)
class Style:
    """A style's name and, for ``packed_colwise``, the rows of each section (empty means two equal ones)."""

    name: str
    sections: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}:{','.join(map(str, self.sections))}" if self.sections else self.name


def parse_style(text: str, *, where: str) -> Style:
    """Return the style of ``text``: one of ``STYLES``, or ``packed_colwise:64,32,32`` with the rows of each section.

    Raises:
        ValueError: if the name is unknown; ``where`` begins the message.
    """
    name, _, rest = str(text).partition(":")
    name = SYNONYMS.get(name, name)
    sizes = rest.split(",") if rest else []
    if name not in STYLES or (sizes and name != PACKED) or not all(size.strip().isdigit() for size in sizes):
        raise ValueError(
            f"{where}: got the style {text!r}; expected one of {', '.join(STYLES)}, or {PACKED}:<rows>,<rows>."
        )
    return Style(name, tuple(int(size) for size in sizes))


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer that can be split: ``nn.Linear``, a subclass, or ``Conv1D``; with a weight."""
    own = module._parameters.get("weight") is not None  # not computed from others, as by weight_norm
    return own and ((isinstance(module, nn.Linear) and not stands_in(module)) or is_conv1d(module))


def features(module: nn.Module) -> tuple[int, int]:
    """Return (in, out) features of a whole linear layer."""
    weight = module._parameters["weight"]
    assert weight is not None
    return (weight.shape[0], weight.shape[1]) if is_conv1d(module) else (weight.shape[1], weight.shape[0])


def even_dim(shape: torch.Size, size: int) -> int | None:
    """Return the first dimension that ``size`` divides, or None."""
    return next((dim for dim, n in enumerate(shape) if n >= size and n % size == 0), None)


def misfit(module: nn.Module, style: Style, size: int) -> str | None:
    """Return why ``style`` does not fit ``module`` over ``size`` ranks, or None."""
    kind = type(module).__name__
    if style.name in LINEAR_STYLES:
        if not is_linear(module) or any(name not in ("weight", "bias") for name in module._parameters):
            return f"it is a {kind}; {style} is for nn.Linear and Conv1D"
        width_in, width_out = features(module)
        if style.name.startswith("rowwise") and width_in % size:
            return f"its {width_in} input features do not divide by {size}"
        if not style.name.startswith("rowwise") and style.name != WHOLE and width_out % size:
            return f"its {width_out} output features do not divide by {size}"
        if style.name == PACKED:
            sections = sections_of(module, style)
            if sum(sections) != width_out or any(rows % size for rows in sections):
                return f"its sections {sections} do not add up to {width_out} or do not each divide by {size}"
    if style.name in EMBEDDING_STYLES:
        if own_class(module) is not nn.Embedding or not isinstance(module, nn.Embedding) or "forward" in vars(module):
            return f"it is a {kind}; {style} is for nn.Embedding"
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "it has max_norm, sparse or scale_grad_by_freq"
        rows, width = module.weight.shape
        if style.name == "embedding_rowwise" and rows % size:
            return f"its {rows} rows do not divide by {size}"
        if style.name == "embedding_rowwise" and module.padding_idx is not None:
            return "it has a padding_idx, which is an index of the whole weight and not of a rank's part"
        if style.name == "embedding_colwise" and width % size:
            return f"its width {width} does not divide by {size}"
    if style.name == "gather" and all(
        p is None or even_dim(p.shape, size) is None for p in module._parameters.values()
    ):
        return f"no dimension of its parameters divides by {size}"
    return None


def sections_of(module: nn.Module, style: Style) -> tuple[int, ...]:
    """Return the rows of each section, by default two equal ones."""
    width = features(module)[1]
    return style.sections or (width // 2, width - width // 2)


def owners(root: nn.Module) -> dict[int, list[tuple[str, nn.Module, str]]]:
    """Return (dotted name, owning module, name in it) for every owner of each parameter, by the parameter's id."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append((f"{path}.{name}" if path else name, module, name))
    return found


def names_of(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, without those that are None."""
    return [name for name, param in module._parameters.items() if param is not None]


def sharded_part(params: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return (elements on this rank, all elements) of ``params``, each counted once."""
    held = whole = 0
    for param in {id(p): p for p in params}.values():
        whole += param.numel()
        held += param.to_local().numel() if isinstance(param, DTensor) else param.numel()
    return held, whole
