"""Modules whose own forward pass runs with gated attention."""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.derived import Derived, derived
from lightning_eff.model.initialization._gated.mixing import Grid, Mixing
from lightning_eff.model.initialization._gated.rule import local_weights

GATE, WEIGHTS = "locality_gate", "locality_weight"


class Gated(Derived):
    """Mixed into a module's class: gates between content and position in every attention call of its forward pass.

    Attributes:
        locality_gate: lambda, (H,).
        locality_weight: v, (H, 3).
        grid: the patches among the tokens.
        locality: alpha, from which v starts.
    """

    undecayed: ClassVar[list[str]] = [GATE]
    grid: tuple[int, int, int, int]
    locality: float

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        gate, weights = (cast(Tensor, self._parameters[name]) for name in (GATE, WEIGHTS))
        with Mixing(gate, weights, Grid(*self.grid)):
            return super().forward(*args, **kwargs)

    def reset_parameters(self) -> None:
        """Reset the class's own parameters, and gates and positions to their first values."""
        reset = getattr(super(), "reset_parameters", None)
        if reset is not None:
            reset()
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        gate, weights = (cast(Tensor, self._parameters[name]) for name in (GATE, WEIGHTS))
        gate.fill_(1.0)
        weights.copy_(local_weights(len(gate), self.locality))


def gated(plain: nn.Module, *, heads: int, grid: Grid, locality: float) -> Gated:
    """Return a module with ``plain``'s class, parameters and settings, whose attention is gated.

    Args:
        plain: the module whose forward pass attends.
        heads: the number of its heads.
        grid: the patches among its tokens.
        locality: alpha.
    """
    made = derived(Gated, plain, grid=tuple(grid), locality=locality)
    made.register_parameter(GATE, nn.Parameter(torch.empty(heads)))
    made.register_parameter(WEIGHTS, nn.Parameter(torch.empty(heads, 3)))
    made._begin()
    return made
