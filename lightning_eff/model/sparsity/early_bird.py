"""EarlyBird: prune once the mask of the smallest units has settled, early in training (You et al. 2019)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._run.delayed_start import ActsLate, Length
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.arguments import Sparsity
from lightning_eff.model.sparsity._masks.finding import Weight, largest, prunable
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, no_time, rivals
from lightning_eff.model.sparsity._masks.units import Units, channels, heads_and_neurons

WHO = "EarlyBird"
Of = Literal["channels", "heads"]


def has_emerged(masks: Sequence[Tensor], *, window: int, distance: float) -> bool:
    """Whether the newest of ``window`` masks differs from each of the others in less than ``distance`` of its elements.

    Args:
        masks: the last masks, the newest last, each (n,), boolean.
        window: the number of masks that are required.
        distance: the fraction of elements in which two masks may differ (Hamming distance), in (0, 1].
    """
    if len(masks) < window:
        return False
    # max_i d(m_t, m_{t-i}) < ε
    return all(float((masks[-1] ^ other).float().mean()) < distance for other in masks[-window:-1])


def step_coefficients(c: Tensor, gradient: Tensor, *, rate: float, penalty: float) -> Tensor:
    """Take one proximal step on the loss and ``lambda ||c||_1``; a coefficient that has reached zero stays there.

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


def smallest(
    scores: Sequence[Tensor], units: Sequence[Units], sparsity: float, networks: Sequence[int] | None = None
) -> list[Tensor]:
    """The units to keep: the largest channels or neurons of all layers, and the largest heads of each layer, at least one.

    Args:
        scores: by unit.
        units: the units of each layer.
        sparsity: the fraction of units to prune.
        networks: the number of the network of each layer, as of a GAN's two, which are pruned separately; None is one.
    """
    kept: list[Tensor] = [torch.empty(0)] * len(units)
    groups: dict[tuple[str, int], list[int]] = {}
    for i, u in enumerate(units):
        apart = i if u.kind == "head" else networks[i] if networks else 0
        groups.setdefault((u.kind, apart), []).append(i)
    for group in groups.values():
        every = torch.cat([scores[i] for i in group])
        parts = largest(every, max(round((1.0 - sparsity) * every.numel()), 1)).split([units[i].number for i in group])
        for i, part in zip(group, parts, strict=True):
            kept[i] = part
    return kept


class EarlyBird(ActsLate, Masked):
    """Train the whole network until it is clear which of its units are the smallest, then prune these and train on.

    At the end of each epoch, it draws a mask of the smallest units, a fraction ``sparsity`` of all. Once the newest of
    ``window`` masks differs from each of the others by less than ``distance``, the masked units are set to zero and stay
    zero. This is the ticket, and training continues with the present weights.

    In networks with BatchNorm, the units are its channels, compared by the magnitude of their scales over all layers. Until
    the ticket is drawn, ``penalty sign(gamma)`` in the gradient pulls scales to zero. A pruned channel has a scale and a
    shift of zero. In other networks, the units are attention heads and hidden units of feed-forward networks, as in EarlyBERT
    (Chen et al. 2020). Each has a coefficient that starts at 1 and follows the loss's gradient and an l1 penalty, in proximal
    steps with learning rate ``rate``. Coefficients are multiplied into the weight that reads the units, so the module
    computes with them and gets no additional parameters. Heads are pruned within each layer, hidden units over all layers.
    Coefficients stay once the ticket is drawn. In EarlyBERT, the optimizer updates weights and coefficients separately; here
    it updates their products.

    Use it to find a smaller network early, and then build that network: the zeros in the checkpoint show its units. **It
    saves no time here**, as ``RigL``, because zeros are computed like other numbers. The papers' savings are those of the
    smaller network. It logs ``sparsity`` and ``kept`` (elements; zero until the ticket is drawn), ``masks`` (drawn so far),
    ``distance`` (the largest of the newest mask; 1 until there are enough masks) and ``drawn`` (the optimizer step of the
    ticket; 0 until then).

    Args:
        sparsity: the fraction of units to prune. 0 is plain training.
        of: the units to prune. "channels" are BatchNorm's, "heads" are attention heads and hidden units. None takes channels
            if there are some.
        window: the number of masks that must agree. 5 is the paper's.
        distance: the fraction in which these masks may differ. 0.1 is the paper's.
        interval: the number of optimizer steps between two masks. None is an epoch, as in the paper.
        penalty: the weight of the l1 norm of scales or coefficients. 1e-4 is the papers'.
        rate: the learning rate of the coefficients.

    Raises:
        ValueError: for a value out of range. At setup, if ``of="channels"`` and there is no BatchNorm with trainable scales.
            On the first batch, before any weight has changed, if no heads or hidden units are found.

    Example:
        >>> trainer = L.Trainer(max_epochs=50, callbacks=[EarlyBird(0.3)])

    References:
        You et al. 2019, "Drawing Early-Bird Tickets: Towards More Efficient Training of Deep Networks", arXiv:1909.11957.
        Chen et al. 2020, "EarlyBERT: Efficient BERT Training via Early-bird Lottery Tickets", arXiv:2101.00063.
    """

    saves = "no time here: it finds a smaller network early, for you to build"
    paper = "You et al. 2019, arXiv:1909.11957"
    constraints = "optimizers with separate moments for each weight"
    search_space = SearchSpace({"sparsity": Choice((0.3, 0.5))}, no_time)
    control = Control("the baseline for the same time, and a network with fewer units from the start")
    conflicts: ClassVar[Mapping[str, str]] = {
        **rivals(WHO),
        **RIVALS_IN_STATE,
        **dict.fromkeys(("LowRankLinear", "ButterflyLinear"), "its factors' channels would be taken for hidden units"),
        "Fixup": "it adds scalars to linear layers, which hides feed-forward networks",
    }

    def __init__(
        self,
        sparsity: Sparsity = 0.5,
        *,
        of: Of | None = None,
        window: Annotated[int, Count(at_least=2)] = 5,
        distance: Annotated[float, Fraction(above=0)] = 0.1,
        interval: Annotated[int | None, Count()] = None,
        penalty: Annotated[float, Number(at_least=0)] = 1e-4,
        rate: Annotated[float, Number(above=0)] = 0.01,
    ) -> None:
        self.of: Of | None = of
        self.window, self.distance, self.interval = window, float(distance), interval
        self.penalty, self.rate = float(penalty), float(rate)
        self._take(sparsity=sparsity)

    @override
    def _reset(self) -> None:
        super()._reset()
        self.units: list[Units] = []
        self.coefficients: dict[str, Tensor] = {}  # of heads and neurons, by the weight that reads them
        self._recent: list[Tensor] = []
        self._moving: dict[str, Tensor] = {}
        self._drawn = self._count = self._step = 0
        self._apart = 1.0

    @override
    def asked(self) -> dict[str, Any]:
        settings = ("sparsity", "of", "window", "distance", "interval", "penalty", "rate")
        return {name: getattr(self, name) for name in settings}

    # -- units

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
                f"{WHO}: the checkpoint has units of parameters that {type(module).__name__} lacks, such as {wrong[0]!r}."
                " Resume with the checkpoint's model."
            )
        if not self.units and self.of != "heads":
            self.units = channels(module)
            known = [name for u in self.units for name in u.names]
            if not known and self.of == "channels":
                raise ValueError(
                    f"{WHO}(of='channels'): {type(module).__name__} has no BatchNorm with trainable scales. Use of='heads', or"
                    " remove the callback."
                )
        if known:
            return {name: Weight(name, shapes[name]) for name in known}
        maps = prunable(module)  # heads and neurons are found among these, on the first batch
        if not maps:
            self._refuse(module)
        return maps

    def _refuse(self, module: nn.Module) -> None:
        raise ValueError(
            f"{WHO}: found no units to prune in {type(module).__name__}: no BatchNorm with trainable scales, no attention heads"
            " and no feed-forward network x + W_2 f(W_1 x). Remove the callback."
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
            rank_zero_info(f"{WHO}: found {kinds}, such as those that {found[0].names[0]} reads.")
        for u in self.units:
            if u.kind != "channel" and u.names[0] not in self.coefficients:
                self.coefficients[u.names[0]] = torch.ones(u.number)

    # -- the run

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._step = session.trainer.global_step
        super().on_batch_start(session, batch, batch_idx)

    @override
    def before_step(self, session: Session, optimizer: Optimizer) -> None:
        self._moving = {}
        if self.masks:
            return
        own = set(self.names_of(optimizer))
        for u in self.units:
            p = self.parameter(u.names[0])
            if p.grad is None or u.names[0] not in own:
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
    def after_step(self, session: Session, optimizer: Optimizer) -> None:
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
        if session.epoch_complete() if self.interval is None else step // self.interval > self._step // self.interval:
            self._look_at_units(session, step)

    def _look_at_units(self, session: Session, step: int) -> None:
        scores = [
            self.parameter(u.names[0]).detach().abs().float().cpu()
            if u.kind == "channel"
            else self.coefficients[u.names[0]].abs()
            for u in self.units
        ]
        network = {name: i for i, names in enumerate(self.together()) for name in names}
        kept = smallest(scores, self.units, self.sparsity, [network[u.names[0]] for u in self.units])
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
            rank_zero_info(f"{WHO}: drew the ticket after {step:,} steps; {self.sparsity:.0%} of the units are zero.")
            self.tell_of_empty()

    # -- reports and state

    @property
    @override
    def acted(self) -> bool:
        return self._drawn > 0 or self._count >= self.window  # the report shows masks that do not agree

    @override
    def will_act(self, length: Length) -> bool:
        return length.times(length.epoch if self.interval is None else self.interval) >= self.window

    @override
    def idle(self, length: Length) -> str:
        every = "epoch" if self.interval is None else f"{self.interval:,} steps"
        return (
            f"it draws a mask every {every}, of which window={self.window} must agree, so it draws no ticket and prunes"
            " nothing. Give a smaller `interval`, in optimizer steps."
        )

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "masks": self._count, "distance": self._apart, "drawn": self._drawn}

    @override
    def summary(self) -> str:
        if not self._drawn:
            return (
                f"drew no ticket: the newest of {self._count} masks differs from the others by up to {self._apart:.2f}"
            )
        return f"{super().summary()}; drew the ticket after {self._drawn:,} steps"

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
