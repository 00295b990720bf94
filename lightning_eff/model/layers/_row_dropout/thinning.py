"""Feed-forward networks that compute with some of their hidden units for a step, and keep all parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import forward_with
from lightning_eff._core._branches.ffns import FFN, Part
from lightning_eff._core._stack.partial_views import Worn, worn, worn_by
from lightning_eff._core.passes import restoring
from lightning_eff._core.patches import hook_behind
from lightning_eff.model.layers._row_dropout.patterns import Pattern, kept

WHOLE = Pattern(1, 0)


class Thin(Worn):
    """A module that computes with the part of its parameters that belongs to the kept hidden units."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward`` on a part of its parameters."""
        assert isinstance(self, nn.Module)
        thinned: Thinned = worn_by(cast(Any, self))
        return thinned.run(self, self._plain, args, kwargs)


class Thinned:
    """The patterns that feed-forward networks compute with.

    Attributes:
        ffns: the networks.
        patterns: the pattern of each.

    Args:
        root: the module.
        ffns: its feed-forward networks.
    """

    def __init__(self, root: nn.Module, ffns: Sequence[FFN]) -> None:
        self.ffns = list(ffns)
        self.patterns = [WHOLE] * len(self.ffns)
        parameters = dict(root.named_parameters())
        self._parts: dict[int, tuple[Part, int]] = {
            id(parameters[part.name]): (part, i) for i, ffn in enumerate(ffns) for part in ffn.parts
        }
        self._owners: dict[int, tuple[nn.Module, list[str]]] = {}
        for m in root.modules():
            names = [name for name, p in m._parameters.items() if id(p) in self._parts]
            if names:
                self._owners[id(m)] = m, names
        self._last = [
            (parameters[ffn.parts[-1].name], ffn.parts[-1], root.get_submodule(ffn.parts[-1].name.rpartition(".")[0]))
            for ffn in ffns
        ]

    @contextmanager
    def view(self, training: bool) -> Iterator[None]:
        """Let modules compute with the kept units in training, until the context ends."""
        some = training and any(pattern.period > 1 for pattern in self.patterns)
        modules = [m for m, _ in self._owners.values()] if some else []
        with worn(Thin, modules, [self] * len(modules)):
            yield

    def run(self, m: nn.Module, plain: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run ``plain.forward`` of ``m`` with the kept part in place of its parameters."""
        narrow = {name: self._taken(m._parameters[name]) for name in self._owners[id(m)][1]}
        return forward_with(m, plain, narrow, args, kwargs)

    def _taken(self, p: Any) -> Tensor:
        part, i = self._parts[id(p)]
        pattern = self.patterns[i]
        if pattern.period == 1:
            return p
        taken = kept(p, part.dim, part.groups, pattern)
        return taken * pattern.period if part.last else taken

    # -- verification

    @contextmanager
    def masked(self) -> Iterator[None]:
        """Set the output weights of dropped units to zero, and scale those of kept units by ``period``."""
        with restoring(p for p, _, _ in self._last):
            with torch.no_grad():
                for (p, part, _), pattern in zip(self._last, self.patterns, strict=True):
                    whole = p.detach().clone()
                    p.zero_()
                    kept(p, part.dim, 1, pattern).copy_(kept(whole, part.dim, 1, pattern) * pattern.period)
            yield

    @contextmanager
    def watched(self) -> Iterator[dict[str, list[Tensor]]]:
        """Collect the outputs of the last layers, by the names of their weights."""
        seen: dict[str, list[Tensor]] = {}
        with ExitStack() as scope:
            for _, part, m in self._last:

                def hook(_: nn.Module, args: Any, output: Any, name: str = part.name) -> None:
                    if isinstance(output, Tensor):
                        seen.setdefault(name, []).append(output.detach())

                scope.callback(hook_behind(m, hook).remove)
            yield seen
