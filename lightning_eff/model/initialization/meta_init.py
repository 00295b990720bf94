"""MetaInit: search for norms of weights at which curvature disturbs a step least (Dauphin & Schoenholz 2019)."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._needs.needs import Reasons
from lightning_eff._core._run.words import first_line
from lightning_eff._core.batches import map_tensors, num_samples
from lightning_eff._core.losses import loss_of
from lightning_eff._core.passes import training_batches
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import takes_index
from lightning_eff._core.technique import Control
from lightning_eff.model._derivatives.passes import differentiable, unshortened, watched
from lightning_eff.model.initialization._maps import listed
from lightning_eff.model.initialization._once import TOGETHER, Initialization, Turn

WHO = "MetaInit"
_OTHERS = ("OrthogonalInit", "LSUV", "TFixup", "ZerO", "ZeroProjections", "DataDrivenInit")


def gradient_quotient(loss: Tensor, parameters: Sequence[Tensor], *, eps: float) -> Tensor:
    """``GQ = 1/N sum |(g - H g) / (g + eps s(g)) - 1|``, with ``s(g) = 1`` where ``g >= 0``, else -1.

    ``g - H g`` is, to first order, the gradient after a step of rate 1: the quotient is 0 where such a step leaves the gradient
    as it is. Of ``(c/2) |w|^2`` it is c.

    Args:
        loss: a scalar with a graph that can be differentiated three times, once for the quotient's own gradient.
        parameters: of N numbers; those that the loss does not come of are left out.
        eps: keeps the quotient finite where a gradient is zero.

    Returns:
        A scalar with a graph.

    Raises:
        ValueError: if the loss comes of none of them.
    """
    found = torch.autograd.grad(loss, list(parameters), create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
    if not pairs:
        raise ValueError("the loss comes of no parameter")
    # H g is the gradient of |g|^2 / 2
    half = sum((g.square().sum() / 2 for _, g in pairs), loss.new_zeros(()))
    if half.requires_grad:
        products = torch.autograd.grad(half, [p for p, _ in pairs], create_graph=True, allow_unused=True)
    else:  # a loss that is linear in all of them
        products = (None,) * len(pairs)
    total = loss.new_zeros(())
    for (_, g), product in zip(pairs, products, strict=True):
        changed = g if product is None else g - product
        sign = torch.where(g >= 0, 1.0, -1.0).to(g).detach()
        total = total + (changed / (g + eps * sign) - 1.0).abs().sum()
    return total / sum(g.numel() for _, g in pairs)


def norm_slopes(quotient: Tensor, weights: Sequence[Tensor]) -> list[float]:
    """``dGQ / d|W| = <W, dGQ/dW> / |W|`` of each weight: what the quotient does as its norm alone moves."""
    if not quotient.requires_grad:
        return [0.0] * len(weights)
    found = torch.autograd.grad(quotient, list(weights), allow_unused=True)
    return [
        0.0 if g is None else float((w.detach().double() * g.double()).sum() / w.detach().double().norm())
        for w, g in zip(weights, found, strict=True)
    ]


class MetaInit(Initialization):
    """Search for the norms of weights at which a step changes the gradient least, before the first step is taken.

    At the first batch of a fresh fit, the gradient quotient is made small: the mean of ``|(g - Hg) / (g + eps) - 1|`` over all
    parameters' numbers, with the gradient g and the Hessian H of the module's own loss. Only norms move, of weights of two
    dimensions or more: directions stay as the module drew them, and so do biases and the weights of norms. Each step of the
    search moves each norm by the sign of its slope, with momentum:

        m <- momentum m - lr sign(dGQ/d|W|),   |W| <- |W| + m

    A norm that this would bring to zero or below stays, and loses its momentum; a weight of zeros has no direction and stays.
    Steps of a fixed size do not settle, so ``lr`` is to be small against the norms: the source's 0.1 is for maps of hundreds
    of features. Where the quotient did not fall, that is said.

    The source searches on random data, which needs no labels, and so does ``batches=0``: tensors of floating point become
    normal noise, and in others, as ids and labels, the samples of the first batch come in another order, each tensor by itself.
    Otherwise the first ``batches`` batches of the training loader are taken in turn; they are held in memory meanwhile.

    A step of the search differentiates three times, costs about ten training steps, and holds the graphs of all three. It is
    computed in evaluation mode, without dropout and with BatchNorm at its running statistics, as by the source; in float32,
    where weights are of fewer bits; and with attention, LSTMs and GRUs by operations that can be differentiated again. Under
    DDP all processes search together. How far it is is said ten times.

    It is for networks without norms: where norms follow upon maps, the maps' norms do little to what they put out.

    Logged: ``numbers``, how many were set; ``quotient_before`` and ``quotient``, the gradient quotient before and after, both
    on the search's first data.

    Args:
        steps: of the search, at least 1; 0 is plain training.
        lr: by how much a norm moves in a step, above 0.
        momentum: in [0, 1).
        eps: what is added to gradients, above 0.
        batches: how many of the training loader's are searched on, on each rank; 0 for random data.
        force: also set weights that were loaded or trained before.

    Raises:
        ValueError: for arguments outside of these ranges; at setup, for a pretrained module without ``force``; at the first
            batch, which leaves weights as they were, where there is no weight of two dimensions that is not zero, the loss
            cannot be differentiated three times, or the quotient is not finite.

    Source:
        Dauphin & Schoenholz 2019, "MetaInit: Initializing learning by learning to initialize", NeurIPS.
    """

    saves: ClassVar[str] = "steps: networks without norms begin where gradient steps can be trusted"
    paper: ClassVar[str] = "Dauphin & Schoenholz 2019, NeurIPS"
    constraints: ClassVar[str] = "losses that have third derivatives"
    survey: ClassVar[Survey | None] = Survey("initialisation: searched for by gradients (MetaInit)", shen="4.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"steps": Choice((100, 500)), "lr": Choice((0.1, 0.01))},
        pointless=lambda profile: None if profile.num_matrices else "there are no hidden maps",
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, the search included"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_OTHERS, "both say at which norms weights begin, and the later one would undo the other"),
        "CompoundGrowth": "it searches on all of the network, of which a part is trained first",
    }

    turn: ClassVar[Turn] = Turn.SEARCH
    needs_all: ClassVar[bool] = True
    refuses: ClassVar[Reasons] = TOGETHER

    def __init__(
        self,
        *,
        steps: int = 500,
        lr: float = 0.1,
        momentum: float = 0.9,
        eps: float = 1e-5,
        batches: int = 0,
        force: bool = False,
    ) -> None:
        for name, value, what in (
            ("steps", steps, "how many steps the search takes, at least 1. 500 is the source's; 0 is plain training"),
            ("batches", batches, "how many batches are searched on, at least 1, or 0 for random data"),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{WHO}({name}={value!r}): expected {what}.")
        if not 0.0 < lr < float("inf"):
            raise ValueError(
                f"{WHO}({lr=}): expected by how much a norm moves in a step, above 0. 0.1 is the source's."
            )
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"{WHO}({momentum=}): expected a number in [0, 1). 0.9 is the source's.")
        if not 0.0 < eps < float("inf"):
            raise ValueError(
                f"{WHO}({eps=}): expected a number above 0, since gradients may be 0. 1e-5 is the source's."
            )
        self.steps, self.lr, self.momentum, self.eps = steps, lr, momentum, eps
        self.batches, self.force = batches, force
        self._before = self._after = 0.0

    @property
    @override
    def neutral(self) -> bool:
        return self.steps == 0

    @override
    def attach(self, session: Session) -> None:
        self._before = self._after = 0.0
        super().attach(session)

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        if self.batches:
            with closing(training_batches(session, self.batches, epoch=0)) as every:
                data = list(every)
        else:
            data = [batch]
        with differentiable(session):
            search = _Search(session, data, made_up=not self.batches, batch_idx=batch_idx, eps=self.eps)
            if not search.usable():
                return None
            try:
                self._search(session, search)
            except BaseException:
                search.put_back()
                raise
        numbers = sum(w.numel() for w in search.weights.values())
        moved = [f"{name} x {search.norms[name] / search.began[name]:.3g}" for name in search.weights]
        rank_zero_info(
            f"{WHO}: the gradient quotient went from {self._before:.4g} to {self._after:.4g} in {self.steps} steps, by the"
            f" norms of {len(moved)} weights: {listed(moved)}"
        )
        if not self._after < self._before:
            rank_zero_info(
                f"{WHO}: the gradient quotient did not fall, so the network begins no better than without. Try a smaller lr"
                f" than {self.lr:g}, since norms began between {min(search.began.values()):.3g} and"
                f" {max(search.began.values()):.3g}, or take the technique out."
            )
        return numbers

    def _search(self, session: Session, search: "_Search") -> None:
        """Sign-SGD with momentum on the norms."""
        speed = dict.fromkeys(search.weights, 0.0)
        start, told = time.perf_counter(), max(self.steps // 10, 1)
        for step in range(self.steps):
            quotient, slopes = search.slopes(step)
            if step == 0:
                self._before = quotient
            for name, slope in slopes.items():
                # m <- momentum m - lr sign(dGQ/d|W|);  |W| <- |W| + m
                speed[name] = self.momentum * speed[name] - self.lr * ((slope > 0) - (slope < 0))
                if search.norms[name] + speed[name] <= 0.0:
                    speed[name] = 0.0
                search.norms[name] += speed[name]
            search.scale()
            if (step + 1) % told == 0:
                seconds = time.perf_counter() - start
                left = seconds / (step + 1) * (self.steps - step - 1)
                rank_zero_info(
                    f"{WHO}: step {step + 1} of {self.steps}, gradient quotient {quotient:.4g}, {left:.0f} s left"
                )
        self._after = search.quotient(0)
        session.chain.cost.seconds += time.perf_counter() - start

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "quotient_before": self._before, "quotient": self._after}

    @override
    def summary(self) -> str:
        return (
            f"{self._numbers} numbers began at norms that brought the gradient quotient from {self._before:.4g} to"
            f" {self._after:.4g}"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "quotients": [self._before, self._after]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._before, self._after = state_dict["quotients"]


class _Search:
    """The quotient of a module's loss, as the norms of its weights move.

    Attributes:
        weights: by name, those that move.
        began: the norm that each had.
        norms: the norm that each shall have.
    """

    def __init__(self, session: Session, data: Sequence[Any], *, made_up: bool, batch_idx: int, eps: float) -> None:
        self._session, self._made_up = session, made_up
        self._data = [map_tensors(one, unshortened) for one in data]
        self._batch_idx, self._eps = batch_idx, eps
        module = session.module
        self._all = [p for p in module.parameters() if p.is_floating_point()]
        norms = {
            name: p.detach().double().norm().item()
            for name, p in module.named_parameters()
            if p.ndim > 1 and p.is_floating_point()
        }
        self.began = {name: norm for name, norm in norms.items() if 0.0 < norm < float("inf")}
        self.weights = {name: p for name, p in module.named_parameters() if name in self.began}
        if not self.weights:
            raise ValueError(
                f"{WHO}: {type(module).__name__} has no weight of two dimensions or more that is not zero, of"
                f" {len(self._all)} parameters; expected one or more, whose norms it can move. Take the technique out."
            )
        self.norms = dict(self.began)
        self._first = {name: w.detach().clone() for name, w in self.weights.items()}

    def usable(self) -> bool:
        """Whether the step returns a loss for all of the data, on all ranks; some are passed over."""
        with torch.no_grad(), rng.fork():
            seen = [self._loss(batch) is not None for batch in self._data]
        return bool(seen) and all(all(one) for one in self._session.replicas.everyone(seen))

    def slopes(self, step: int) -> tuple[float, dict[str, float]]:
        """The quotient, and how it changes with each norm: the means over the ranks."""
        quotient, slopes = self._evaluate(step, with_slopes=True)
        return quotient, dict(zip(self.weights, slopes, strict=True))

    def quotient(self, step: int) -> float:
        """The quotient on the data of a step."""
        return self._evaluate(step, with_slopes=False)[0]

    def scale(self) -> None:
        """``W <- (|W| / |W_0|) W_0``."""
        for name, w in self.weights.items():
            w.data.copy_(self._first[name] * (self.norms[name] / self.began[name]))  # times 1 is bit for bit as it was

    def put_back(self) -> None:
        for name, w in self.weights.items():
            w.data.copy_(self._first[name])

    def _evaluate(self, step: int, *, with_slopes: bool) -> tuple[float, list[float]]:
        session = self._session
        with rng.keyed(session.seed, WHO, step, session.rank):
            batch = self._data[step % len(self._data)]
            batch = map_tensors(batch, _noise) if self._made_up else batch
            loss = self._loss(batch)
            assert loss is not None, "it was there before"
            reason = ""
            with watched(loss) as (whole, constant):
                try:
                    quotient = gradient_quotient(whole, self._all, eps=self._eps)
                    slopes = norm_slopes(quotient, [*self.weights.values()]) if with_slopes else []
                except (RuntimeError, ValueError) as e:
                    quotient, slopes, reason = loss, [], first_line(e)
            if constant:
                reason = f"the backward pass of {', '.join(constant)} has no derivative"
            if reason:
                raise ValueError(
                    f"{WHO}: the loss of {type(session.module).__name__} cannot be differentiated again ({reason}); expected"
                    " one of operations that can be three times over. Let the module use other operations at the start, or take"
                    " the technique out. Weights are as they were."
                )
        cost = session.chain.cost
        cost.forward_passes += 1
        cost.backward_passes += 3 if with_slopes else 2
        with suppress(ValueError):  # batches of no tensors have no samples to count
            cost.forward_samples += num_samples(batch)
        every = session.gather([float(quotient.detach()), *slopes])
        means = [sum(values) / len(values) for values in zip(*every, strict=True)]
        if not all(abs(value) < float("inf") for value in means):
            raise ValueError(
                f"{WHO}: the gradient quotient of {type(session.module).__name__}, or its slope, is not finite at step"
                f" {step} ({means[0]:.4g}); expected a loss whose derivatives are. Begin with smaller weights, give a smaller"
                " lr, or take the technique out. Weights are as they were."
            )
        return means[0], means[1:]

    def _loss(self, batch: Any) -> Tensor | None:
        step = self._session.own_step
        loss = loss_of(step(batch, *((self._batch_idx,) if takes_index(step) else ())))
        if isinstance(loss, Tensor) and torch.is_grad_enabled() and loss.grad_fn is None:
            raise ValueError(
                f"{WHO}: training_step returned a loss without a graph; expected one, which can be differentiated."
            )
        return loss


def _noise(tensor: Tensor) -> Tensor:
    """Normal numbers in the place of a tensor of floating point; the samples of another in another order."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device="cpu").to(tensor.device)
    return tensor[torch.randperm(len(tensor)).to(tensor.device)] if tensor.ndim else tensor
