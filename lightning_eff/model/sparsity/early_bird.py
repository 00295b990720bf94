"""Early-bird tickets: prune once the mask of the smallest units has settled, early in training (You et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._run.late import ActsLate, Length
from lightning_eff._core._stack.thawing import thawing
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.finding import Weight, largest, prunable
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, no_time, rivals
from lightning_eff.model.sparsity._masks.units import Units, channels, heads_and_neurons

WHO = "EarlyBird"
Of = Literal["channels", "heads"]


def has_emerged(masks: Sequence[Tensor], *, window: int, distance: float) -> bool:
    """Whether the newest of ``window`` masks differs from each of the others in less than ``distance`` of its numbers.

    Args:
        masks: of the last times, the newest last, each (n,), boolean.
        window: how many must be held.
        distance: of two masks, the share of numbers in which they differ (Hamming), in (0, 1].
    """
    if len(masks) < window:
        return False
    # max_i d(m_t, m_{t-i}) < ε
    return all(float((masks[-1] ^ other).float().mean()) < distance for other in masks[-window:-1])


def step_coefficients(c: Tensor, gradient: Tensor, *, rate: float, penalty: float) -> Tensor:
    """One proximal step on the loss and ``lambda ||c||_1``; a coefficient that has come to zero stays there.

    Args:
        c: coefficients, (count,).
        gradient: ``dL / dc``.
        rate: ``eta``.
        penalty: ``lambda``.
    """
    # c ← S_{ηλ}(c − η ∂L/∂c),  S_t(x) = sign(x) max(|x| − t, 0)
    moved = c - rate * gradient
    after = moved.sign() * (moved.abs() - rate * penalty).clamp(min=0.0)
    return torch.where((c == 0) | (after.abs() < 1e-6), 0.0, after)


def smallest(scores: Sequence[Tensor], units: Sequence[Units], sparsity: float) -> list[Tensor]:
    """Which units are kept: the largest channels of all, neurons of all, and heads of each layer, one at least."""
    kept: list[Tensor] = [torch.empty(0)] * len(units)
    groups = [[i for i, u in enumerate(units) if u.kind == kind] for kind in ("channel", "neuron")]
    for group in [*groups, *([i] for i, u in enumerate(units) if u.kind == "head")]:
        if not group:
            continue
        every = torch.cat([scores[i] for i in group])
        parts = largest(every, max(round((1.0 - sparsity) * every.numel()), 1)).split([units[i].number for i in group])
        for i, part in zip(group, parts, strict=True):
            kept[i] = part
    return kept


class EarlyBird(ActsLate, Masked):
    """Train the whole network until it is clear which of its units are the smallest, and from then on without these.

    At the end of each epoch a mask is drawn of the ``sparsity`` of the units that is smallest. Once the newest of ``window``
    masks differs from each of the others by less than ``distance``, units that it leaves out are set to zero and stay so: the
    ticket is drawn, and training goes on with the weights that it has.

    In networks with BatchNorm the units are its channels, by the magnitude of their scales over all layers, which
    ``penalty sign(gamma)`` in the gradient draws to zero meanwhile; a pruned channel has a scale and a shift of zero. In other
    networks they are attention's heads and hidden units of feed-forward networks, as in EarlyBERT (Chen et al. 2020): each has
    a coefficient, 1 at first, which moves along the loss's gradient and by an l1 penalty at ``rate``, in proximal steps of its
    own. As they move, coefficients are multiplied into the map that reads the units, so that the module computes with them
    and has no parameters more; at 0 a head or a hidden unit is removed. Heads are pruned by layers, hidden units over all
    layers. Coefficients do not move any more once the ticket is drawn. EarlyBERT has them beside the maps, and its optimizer
    steps both; here the optimizer steps the products.

    **It saves no time here**, as ``RigL``: what is zero is computed as before. The papers' savings are those of a smaller
    network that is built from the ticket, which this leaves to you; zeros in the checkpoint say which units it has.

    Logged: ``sparsity`` and ``kept`` (numbers; zero until the ticket is drawn), ``masks`` (drawn so far), ``distance`` (the
    largest of the newest mask; 1 until there are enough) and ``drawn`` (the optimizer step; 0 until then).

    Args:
        sparsity: the share of units that is pruned, in [0, 1). 0 is plain training.
        of: "channels", of BatchNorm; "heads", and hidden units; None for channels where there are some.
        window: how many masks must agree, >= 2. 5 is the paper's.
        distance: by what they may differ, in (0, 1]. 0.1 is the paper's.
        interval: optimizer steps between two masks, >= 1; None for an epoch, as in the paper.
        penalty: of the l1 norm of scales or coefficients, >= 0. 1e-4 is the papers'.
        rate: at which coefficients move, > 0.

    Raises:
        ValueError: for other values; at setup, where there is no BatchNorm with scales that train for "channels"; at the first
            batch, which leaves weights as they were, if no heads or hidden units are found.

    Sources:
        You et al. 2019, arXiv:1909.11957; Chen et al. 2020 (EarlyBERT), arXiv:2101.00063.
    """

    saves: ClassVar[str] = "no time here: it finds a smaller network early, which is then to be built"
    paper: ClassVar[str] = "You et al. 2019, arXiv:1909.11957"
    constraints: ClassVar[str] = "optimizers that keep moments weight by weight"
    survey: ClassVar[Survey | None] = Survey("Early-Bird tickets, EarlyBERT", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Choice((0.3, 0.5))}, no_time)
    control: ClassVar[Control] = Control("the baseline for as many seconds, and one built with fewer units throughout")
    conflicts: ClassVar[Mapping[str, str]] = {
        **rivals(WHO),
        **RIVALS_IN_STATE,
        **dict.fromkeys(
            ("LowRankLinear", "ButterflyLinear"), "its maps are factors, whose channels would be taken for hidden units"
        ),
        "Fixup": "its maps have scalars beside them, and are not seen to be feed-forward networks",
    }

    def __init__(
        self,
        sparsity: float = 0.5,
        *,
        of: Of | None = None,
        window: int = 5,
        distance: float = 0.1,
        interval: int | None = None,
        penalty: float = 1e-4,
        rate: float = 0.01,
    ) -> None:
        if of not in (None, "channels", "heads"):
            raise ValueError(f"{WHO}({of=}): expected 'channels', 'heads' or None.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 2:
            raise ValueError(
                f"{WHO}({window=}): expected how many masks must agree, an integer >= 2. 5 is the paper's."
            )
        if not 0.0 < distance <= 1.0:
            raise ValueError(f"{WHO}({distance=}): expected the share by which masks may differ, in (0, 1].")
        if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 1):
            raise ValueError(f"{WHO}({interval=}): expected a number of optimizer steps >= 1, or None for an epoch.")
        if not 0.0 <= penalty < float("inf") or not 0.0 < rate < float("inf"):
            raise ValueError(f"{WHO}({penalty=}, {rate=}): expected a penalty >= 0 and a rate > 0, both finite.")
        self.of: Of | None = of
        self.window, self.distance, self.interval = window, float(distance), interval
        self.penalty, self.rate = float(penalty), float(rate)
        self._take(sparsity=sparsity)

    @override
    def _reset(self) -> None:
        super()._reset()
        self.units: list[Units] = []
        self.coefficients: dict[str, Tensor] = {}  # of heads and neurons, by the map that reads them
        self._recent: list[Tensor] = []
        self._moving: dict[str, Tensor] = {}
        self._drawn = self._count = self._step = 0
        self._apart = 1.0

    @override
    def asked(self) -> dict[str, Any]:
        settings = ("sparsity", "of", "window", "distance", "interval", "penalty", "rate")
        return {name: getattr(self, name) for name in settings}

    # -- what is pruned

    @override
    def on_model(self, session: Session) -> None:
        if session.fitting:
            self.weights = thawing(lambda: self.find(session.module), session._stacks)()
            session.rest(self)
            session.working.append(self)

    @override
    def find(self, module: nn.Module) -> dict[str, Weight]:
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        known = [name for u in self.units for name in u.names]
        wrong = [name for name in known if name not in shapes]
        if wrong:
            raise ValueError(
                f"{WHO}: the checkpoint's units are those of parameters that {type(module).__name__} has not, such as"
                f" {wrong[0]!r}; expected a checkpoint of the same model. Resume with the model it was saved from."
            )
        if not self.units and self.of != "heads":
            self.units = channels(module)
            known = [name for u in self.units for name in u.names]
            if not known and self.of == "channels":
                raise ValueError(
                    f"{WHO}(of='channels'): {type(module).__name__} has no BatchNorm with scales that train; expected one or"
                    " more. Use of='heads', or take the technique out."
                )
        if known:
            return {name: Weight(name, shapes[name]) for name in known}
        maps = prunable(module)  # heads and neurons are found among these, on the first batch
        if not maps:
            self._refuse(module)
        return maps

    def _refuse(self, module: nn.Module) -> None:
        raise ValueError(
            f"{WHO}: found no BatchNorm that trains, no attention's heads and no feed-forward network x + W_2 f(W_1 x) in"
            f" {type(module).__name__}; expected some units that could be pruned. Take the technique out."
        )

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> None:
        if not self.units:
            found = heads_and_neurons(session, batch, batch_idx, self.weights, who=WHO)
            if found is None:
                return
            if not found:
                self._refuse(session.module)
            self.units = found
            self.weights = {name: self.weights[name] for u in found for name in u.names}
            kinds = ", ".join(f"{sum(u.number for u in found if u.kind == k)} {k}s" for k in ("head", "neuron"))
            rank_zero_info(f"{WHO}: {kinds} found, such as those that {found[0].names[0]} reads.")
        for u in self.units:
            if u.kind != "channel" and u.names[0] not in self.coefficients:
                self.coefficients[u.names[0]] = torch.ones(u.number)

    # -- the run

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._step = session.trainer.global_step
        super().on_batch_start(session, batch, batch_idx)

    @override
    def before_step(self, session: Session) -> None:
        self._moving = {}
        if self.masks:
            return
        for u in self.units:
            p = self.parameter(u.names[0])
            if p.grad is None:
                continue
            if u.kind == "channel":
                # g_γ ← g_γ + λ sign(γ)
                p.grad.add_(p.detach().sign(), alpha=self.penalty)
            else:
                # V = c W, so that ∂L/∂c = <∂L/∂V, W> = <∂L/∂V, V> / c
                c = self.coefficients[u.names[0]]
                inner = u.sums(p.grad.double() * p.detach().double()).cpu()
                gradient = torch.where(c == 0, 0.0, inner / c.double()).to(c.dtype)
                self._moving[u.names[0]] = step_coefficients(c, gradient, rate=self.rate, penalty=self.penalty)

    @override
    @torch.no_grad()
    def after_step(self, session: Session) -> None:
        moving, self._moving = self._moving, {}
        for u in self.units:
            if u.names[0] in moving:
                p, c, after = self.parameter(u.names[0]), self.coefficients[u.names[0]], moving[u.names[0]]
                factor = torch.where(c == 0, 0.0, after / c).to(p)
                p.mul_(u.spread(factor, p.shape))
                self.coefficients[u.names[0]] = after

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        step = session.trainer.global_step
        if self.masks or not self.units or step == self._step:
            return
        if session.epoch_complete() if self.interval is None else step % self.interval == 0:
            self._look_at_units(session, step)

    def _look_at_units(self, session: Session, step: int) -> None:
        scores = [
            self.parameter(u.names[0]).detach().abs().float().cpu()
            if u.kind == "channel"
            else self.coefficients[u.names[0]].abs()
            for u in self.units
        ]
        kept = smallest(scores, self.units, self.sparsity)
        self._recent = [*self._recent, torch.cat(kept)][-self.window :]
        self._count += 1
        if len(self._recent) == self.window:
            self._apart = max(float((self._recent[-1] ^ m).float().mean()) for m in self._recent[:-1])
        if has_emerged(self._recent, window=self.window, distance=self.distance):
            masks = {
                name: u.spread(k, self.parameter(name).shape)
                for u, k in zip(self.units, kept, strict=True)
                for name in u.names
            }
            self.put(masks)
            self.clear_state(session, {name: ~mask for name, mask in self.masks.items()})
            self._drawn, self._recent = step, []
            rank_zero_info(
                f"{WHO}: the ticket is drawn after {step:,} steps; {self.sparsity:.0%} of the units are zero."
            )
            self.tell_of_empty()

    # -- what it tells

    @property
    @override
    def acted(self) -> bool:
        return self._drawn > 0 or self._count >= self.window  # those that do not agree are told of by the report

    @override
    def will_act(self, length: Length) -> bool:
        return length.times(length.epoch if self.interval is None else self.interval) >= self.window

    @override
    def idle(self, length: Length) -> str:
        every = "epoch" if self.interval is None else f"{self.interval:,} steps"
        return (
            f"a mask is made after every {every}, of which window={self.window} must"
            " agree, so no ticket is drawn and nothing is pruned. Give a smaller interval= in optimizer steps."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "masks": self._count, "distance": self._apart, "drawn": self._drawn}

    @override
    def summary(self) -> str:
        if not self._drawn:
            return f"no ticket was drawn: {self._count} masks, of which the newest differs by {self._apart:.2f} at most"
        return f"{super().summary()}; the ticket was drawn after {self._drawn:,} steps"

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {"units": [list(u) for u in self.units], "coefficients": dict(self.coefficients)}
        told = [self._drawn, self._count, self._apart]
        return {**super().state_dict(), **state, "recent": list(self._recent), "told": told}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.units = [Units(*u) for u in state_dict["units"]]
        self.coefficients, self._recent = dict(state_dict["coefficients"]), list(state_dict["recent"])
        self._drawn, self._count, self._apart = state_dict["told"]
