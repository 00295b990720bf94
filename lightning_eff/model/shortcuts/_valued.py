"""Modules whose attention gets other values, within their own forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff._core._architecture.surgeon import Surgeon
from lightning_eff._core._attention.calls import Call
from lightning_eff._core._attention.inside import Place, places
from lightning_eff._core._attention.mode import Replacing
from lightning_eff._core.blocks import Candidate


class ValueFeed(ABC):
    """One technique's part in a call of attention.

    Attributes:
        who: the technique's name.
    """

    who: str

    @abstractmethod
    def enter(self, module: nn.Module, value: Tensor) -> Tensor:
        """Return the values, (B, H, S, E), that attention gets in place of ``value``."""


class Valued(Derived):
    """A module that attends, with value feeds.

    Attributes:
        value_feeds: the feeds, in the order in which the techniques were applied.
        undecayed: the names of its parameters that have no weight decay.
    """

    value_feeds: tuple[ValueFeed, ...]
    undecayed: tuple[str, ...]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Replacing(self._with_values, self.value_feeds[-1].who):
            return super().forward(*args, **kwargs)

    def _with_values(self, call: Call) -> Tensor:
        value = call.value
        for feed in self.value_feeds:
            value = feed.enter(self, value)
        return replace(call, value=value).run()


def _anything(call: Call) -> str | None:
    """Every call can get other values."""
    return None


def attentions(surgeon: Surgeon, found: Candidate, *, who: str) -> dict[str, list[tuple[int, str, Place]]]:
    """Return the attentions in the blocks of a chain, by their path within a block: the block's index, the path, the call.

    Raises:
        ValueError: if none is found, or a module attends several times in a pass.
    """
    blocks = [*found.named_blocks]
    grouped: dict[str, list[tuple[int, str, Place]]] = {}
    for path, place in places(surgeon, who=who, unfit=_anything).items():
        for i, block in enumerate(blocks):
            if path == block or path.startswith(f"{block}."):
                grouped.setdefault(path[len(block) :], []).append((i, path, place))
    if not grouped:
        raise ValueError(
            f"{who}: found no attention in the blocks of {found}. Name another stack by layers=, or remove {who}."
        )
    return grouped


def attention_of_each(surgeon: Surgeon, found: Candidate, *, who: str) -> list[tuple[int, str, Place]]:
    """Return the only attention of each block that has one, in order: the block's index, the path, the call.

    Raises:
        ValueError: also if blocks attend at several places.
    """
    groups = attentions(surgeon, found, who=who)
    if len(groups) > 1:
        raise ValueError(
            f"{who}: blocks of {found} attend at several places ({', '.join(path.strip('.') for path in groups)}), so it is"
            f" unclear which is self-attention. Name another stack by layers=, or remove {who}."
        )
    return sorted(next(iter(groups.values())), key=lambda one: one[0])


def value_modules(surgeon: Surgeon, feeds: Mapping[str, tuple[ValueFeed, Mapping[str, nn.Parameter]]]) -> None:
    """Give modules that attend their feeds and new parameters, by path."""

    def build(plain: nn.Module) -> nn.Module:
        feed, parameters = by_id[id(plain)]
        made = derived(
            Valued,
            plain,
            value_feeds=(*getattr(plain, "value_feeds", ()), feed),
            undecayed=(*getattr(plain, "undecayed", ()), *parameters),
        )
        for name, p in parameters.items():
            made.register_parameter(name, p)
        return made

    by_id = {id(surgeon.root.get_submodule(path)): one for path, one in feeds.items()}
    surgeon.swap(lambda path, m: id(m) in by_id, build, what="a module that attends", numbers=True)
