"""The factors of a module's layers during a run: sums over a window, means over ranks and time, and inverses."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_eff.optim.preconditioning._kronecker_factors import Moments, inverses
from lightning_eff.optim.preconditioning._maps import Map


class Estimates:
    """Statistics of layers by name, and their inverses.

    Attributes:
        factors: running means of the moments, each with its number of steps.
        inverses: the last damped inverses of ``A`` and ``S``.
        scale: running mean of the loss in units of a mean of log-likelihoods.
        statistics: number of steps with statistics.
        window: sums over the micro-batches of the present step. :attr:`window_scale` is the sum of the scale.

    Args:
        decay: decay of the means over time.
        max_size: size of the largest full factor.
    """

    def __init__(self, *, decay: float, max_size: int) -> None:
        self.decay, self.max_size = decay, max_size
        self.factors: dict[str, tuple[Moments, int]] = {}
        self.inverses: dict[str, tuple[Tensor, Tensor]] = {}
        self.scale = 0.0
        self.statistics = 0
        self.window: dict[str, Moments] = {}
        self.window_scale = 0.0

    def drop_window(self) -> None:
        """Drop the sums of a step whose gradients were not used."""
        self.window, self.window_scale = {}, 0.0

    def add(self, name: str, found: Moments) -> None:
        """Add one call of a layer, or a part of one."""
        self.window[name] = self.window[name] + found if name in self.window else found

    def average(
        self, maps: Iterable[Map], micro_batches: int, world_size: int, total: Callable[[Tensor], Tensor]
    ) -> None:
        """Average the complete window over micro-batches, ranks and time.

        Layers without rows on any rank, or with sums that are not finite, keep their factors.

        Args:
            maps: all layers, in the same order on all ranks.
            micro_batches: divisor of each micro-batch's loss.
            world_size: number of ranks.
            total: returns the sum of a tensor over the ranks.
        """
        window = self.window
        share = 1.0 / (micro_batches * world_size)
        maps = list(maps)
        told = [float(m.name in window) for m in maps] + [self.window_scale * share]
        self.drop_window()
        if world_size > 1:
            told = total(torch.tensor(told, dtype=torch.float64, device=maps[0].weight.device)).tolist()
        self.statistics += 1
        self.scale += (told[-1] - self.scale) * self._weight(self.statistics)
        for m, seen in zip(maps, told[:-1], strict=True):
            if not seen:
                continue
            new = window[m.name] if m.name in window else no_rows(m, max_size=self.max_size)
            if world_size > 1:
                new = Moments(total(new.A), total(new.rows), total(new.S))
            new = Moments(new.A, new.rows, new.S * share)
            if new.finite and bool(new.rows.sum() > 0):
                old, number = self.factors.get(m.name, (new, 0))
                self.factors[m.name] = (old.moved_towards(new, self._weight(number + 1)), number + 1)

    def _weight(self, number: int) -> float:
        """Return the weight of the newest of ``number`` statistics in their mean: ``1 - min(1 - 1 / t, decay)``."""
        return 1.0 - min(1.0 - 1.0 / number, self.decay)

    def inverses_of(self, m: Map, damping: float, *, with_bias: bool) -> tuple[Tensor, Tensor]:
        """Return the inverses for a layer with factors, and compute them if there are none of this form.

        Args:
            m: the layer.
            damping: ``lambda``, in units of a mean loss's curvature.
            with_bias: whether its bias has a gradient.
        """
        factors, _ = self.factors[m.name]
        factors = factors.without_bias() if m.has_bias and not with_bias else factors
        found = self.inverses.get(m.name)
        if found is None or found[0].shape != factors.A.shape:
            found = self.inverses[m.name] = inverses(factors, damping * self.scale)
        return found

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the window, as plain containers, numbers and tensors."""
        return {
            "factors": {name: {**_saved(moments), "number": n} for name, (moments, n) in self.factors.items()},
            "inverses": {name: {"A": a.clone(), "S": s.clone()} for name, (a, s) in self.inverses.items()},
            "scale": self.scale,
            "statistics": self.statistics,
        }

    def window_state(self) -> tuple[dict[str, Any], float]:
        """Return this rank's window."""
        return {name: _saved(moments) for name, moments in self.window.items()}, self.window_scale

    def load(
        self, state: Mapping[str, Any], window: tuple[dict[str, Any], float] | None, maps: Mapping[str, Map]
    ) -> None:
        """Load the results of :meth:`state_dict` and :meth:`window_state`, on the devices of the layers.

        Raises:
            ValueError: if they belong to other layers.
        """
        unknown = [name for name in state["factors"] if name not in maps]
        if unknown:
            raise ValueError(
                f"KFAC: the checkpoint has factors of {', '.join(unknown[:4])}, which the optimizers do not step; expected some"
                f" of {', '.join(list(maps)[:4])}{', ...' if len(maps) > 4 else ''}. Resume with the module that the"
                " checkpoint was saved from, or load only its weights."
            )
        for name, saved in state["factors"].items():
            device = maps[name].weight.device
            self.factors[name] = (_loaded(saved, device), saved["number"])
            if name in state["inverses"]:
                inverse = state["inverses"][name]
                self.inverses[name] = (inverse["A"].to(device), inverse["S"].to(device))
        self.scale, self.statistics = state["scale"], state["statistics"]
        if window is not None:
            own, self.window_scale = window
            self.window = {name: _loaded(saved, maps[name].weight.device) for name, saved in own.items()}


def no_rows(m: Map, *, max_size: int) -> Moments:
    """Return the sums over no rows of a layer."""
    outputs = m.weight.shape[1] if m.transposed else m.weight.shape[0]
    inputs = m.weight.numel() // outputs + m.has_bias
    like = {"dtype": torch.promote_types(m.weight.dtype, torch.float32), "device": m.weight.device}

    def zeros(n: int) -> Tensor:
        return torch.zeros((m.groups, n) if n > max_size else (m.groups, n, n), **like)

    return Moments(zeros(inputs), torch.zeros(m.groups, **like), zeros(outputs // m.groups))


def _saved(moments: Moments) -> dict[str, Tensor]:
    return {"A": moments.A.clone(), "rows": moments.rows.clone(), "S": moments.S.clone()}


def _loaded(saved: Mapping[str, Any], device: torch.device) -> Moments:
    return Moments(saved["A"], saved["rows"], saved["S"]).to(device)
