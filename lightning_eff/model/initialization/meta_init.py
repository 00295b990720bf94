"""MetaInit: search for norms of weights at which curvature disturbs gradient steps least (Dauphin & Schoenholz 2019)."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._needs.needs import Reasons
from lightning_eff._core.batches import map_tensors
from lightning_eff._core.losses import loss_of
from lightning_eff._core.passes import training_batches
from lightning_eff._core.search_space import Choice, SearchSpace, needs_matrices
from lightning_eff._core.session import Session
from lightning_eff._core.steps import takes_index
from lightning_eff._core.technique import Control
from lightning_eff.model._derivatives.passes import differentiable, unshortened, watched
from lightning_eff.model.initialization._maps import listed
from lightning_eff.model.initialization._once import TOGETHER, Initialization, Turn

WHO = "MetaInit"
_OTHERS = ("OrthogonalInit", "LSUV", "TFixup", "ZerO", "ZeroProjections", "DataDrivenInit")


def gradient_quotient(loss: Tensor, parameters: Sequence[Tensor], *, eps: float) -> Tensor:
    """Return ``GQ = 1/N sum |(g - H g) / (g + eps s(g)) - 1|``, with ``s(g) = 1`` where ``g >= 0``, else -1.

    To first order, ``g - H g`` is the gradient after a step with learning rate 1. The quotient is 0 if such a step does
    not change the gradient. For ``(c/2) |w|^2`` it is c.

    Args:
        loss: a scalar with a graph that can be differentiated three times, once for the quotient's own gradient.
        parameters: the parameters, with N numbers in all; those that the loss does not depend on are left out.
        eps: keeps the quotient finite where a gradient is zero.

    Returns:
        A scalar with a graph.

    Raises:
        ValueError: if the loss depends on none of them.
    """
    found = torch.autograd.grad(loss, list(parameters), create_graph=True, allow_unused=True)
    pairs = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
    if not pairs:
        raise ValueError("the loss depends on no parameter")
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
    """Return ``dGQ / d|W| = <W, dGQ/dW> / |W|`` for each weight: the change of the quotient with its norm."""
    if not quotient.requires_grad:
        return [0.0] * len(weights)
    found = torch.autograd.grad(quotient, list(weights), allow_unused=True)
    return [
        0.0 if g is None else float((w.detach().double() * g.double()).sum() / w.detach().double().norm())
        for w, g in zip(weights, found, strict=True)
    ]


class MetaInit(Initialization):
    """Search for norms of the weights at which a gradient step changes the gradient least, before training starts.

    At the first batch of a fresh fit, the search minimizes the gradient quotient: the mean of
    ``|(g - Hg) / (g + eps) - 1|`` over all parameters, with the gradient g and the Hessian H of the module's own loss.
    Only the norms of weights with two or more dimensions change. Their directions stay as the module drew them, and
    biases and the weights of norms stay unchanged. Each step moves each norm by the sign of its slope, with momentum:

        m <- momentum m - lr sign(dGQ/d|W|),   |W| <- |W| + m

    A norm that would become zero or negative stays, and loses its momentum. A weight of zeros stays. Steps of a fixed
    size do not converge, so ``lr`` must be small compared with the norms; the paper's 0.1 is for layers with hundreds
    of features. A log line says if the quotient did not fall.

    Use it for networks without normalization layers. Behind a norm, the size of a weight hardly matters. A step of the
    search differentiates three times, costs about ten training steps, and keeps the graphs of all three passes in
    memory. Its progress is logged ten times.

    The paper searches on random data, which needs no labels, and so does ``batches=0``: floating-point tensors become
    normal noise, and other tensors, such as ids and labels, get the samples of the first batch in random order.
    Otherwise the search takes the first ``batches`` batches of the training loader in turn, and keeps them in memory.

    The search runs in evaluation mode, without dropout and with BatchNorm's running statistics, as in the paper. It
    uses float32 for weights of fewer bits, and versions of attention, LSTM and GRU that can be differentiated again.
    Under DDP all processes search together.

    Logged: ``numbers``, how many numbers were set; ``quotient_before`` and ``quotient``, the gradient quotient before
    and after, both on the search's first data.

    Args:
        steps: the number of search steps. 500 is the paper's, and 0 is plain training.
        lr: the change of a norm per step. 0.1 is the paper's.
        momentum: the momentum of the search. 0.9 is the paper's.
        eps: the number added to gradients, which may be 0. 1e-5 is the paper's.
        batches: the number of batches to search on, on each rank. 0 is random data.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a value out of range. At setup, for a pretrained module without ``force``. At the first batch,
            if there is no nonzero weight of two dimensions, the loss cannot be differentiated three times, or the
            quotient is not finite; weights then stay unchanged.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[MetaInit(steps=100, lr=0.01)])

    References:
        Dauphin & Schoenholz 2019, "MetaInit: Initializing learning by learning to initialize", NeurIPS.
    """

    saves = "steps: networks without norms start where gradient steps can be trusted"
    paper = "Dauphin & Schoenholz 2019, NeurIPS"
    constraints = "losses with third derivatives"
    search_space = SearchSpace(
        {"steps": Choice((100, 500)), "lr": Choice((0.1, 0.01))},
        needs_matrices,
    )
    control = Control("the baseline for as many seconds, including the search, with its learning rate decayed to zero")
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_OTHERS, "both set the norms of weights, and the later one would undo the other"),
        "CompoundGrowth": "it searches on the whole network, but only a part of it is trained first",
    }

    turn: ClassVar[Turn] = Turn.SEARCH
    needs_all: ClassVar[bool] = True
    refuses: ClassVar[Reasons] = TOGETHER
    neutral_at: ClassVar[Mapping[str, Any]] = {"steps": 0}

    def __init__(
        self,
        *,
        steps: Annotated[int, Count(at_least=0)] = 500,
        lr: Annotated[float, Number(above=0)] = 0.1,
        momentum: Annotated[float, Fraction(below=1)] = 0.9,
        eps: Annotated[float, Number(above=0)] = 1e-5,
        batches: Annotated[int, Count(at_least=0)] = 0,
        force: bool = False,
    ) -> None:
        self.steps, self.lr, self.momentum, self.eps = steps, lr, momentum, eps
        self.batches, self.force = batches, force
        self._before = self._after = 0.0

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
            f"{WHO}: the gradient quotient went from {self._before:.4g} to {self._after:.4g} in {self.steps} steps, by scaling"
            f" {len(moved)} weights: {listed(moved)}"
        )
        if not self._after < self._before:
            rank_zero_info(
                f"{WHO}: the gradient quotient did not fall, so the search gained nothing. Try a smaller lr than {self.lr:g},"
                f" since norms were between {min(search.began.values()):.3g} and {max(search.began.values()):.3g} at first, or"
                f" remove {WHO}."
            )
        return numbers

    def _search(self, session: Session, search: "_Search") -> None:
        """Minimize the quotient by sign-SGD with momentum on the norms."""
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
            f"scaled {self._numbers:,} numbers, which brought the gradient quotient from {self._before:.4g} to"
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
    """The quotient of a module's loss, as the norms of its weights change.

    Attributes:
        weights: the weights that change, by name.
        began: their first norms.
        norms: their current norms.
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
                f"{WHO}: none of the {len(self._all)} parameters of {type(module).__name__} has two or more dimensions and is"
                f" not zero, so there is no norm to change. Remove {WHO}."
            )
        self.norms = dict(self.began)
        self._first = {name: w.detach().clone() for name, w in self.weights.items()}

    def usable(self) -> bool:
        """Return whether the step returns a loss for all of the data, on all ranks."""
        with torch.no_grad(), rng.fork():
            seen = [self._loss(batch) is not None for batch in self._data]
        return bool(seen) and all(all(one) for one in self._session.replicas.everyone(seen))

    def slopes(self, step: int) -> tuple[float, dict[str, float]]:
        """Return the quotient and its slope in each norm, as means over the ranks."""
        quotient, slopes = self._evaluate(step, with_slopes=True)
        return quotient, dict(zip(self.weights, slopes, strict=True))

    def quotient(self, step: int) -> float:
        """Return the quotient on the data of a step."""
        return self._evaluate(step, with_slopes=False)[0]

    def scale(self) -> None:
        """Set ``W <- (|W| / |W_0|) W_0``."""
        for name, w in self.weights.items():
            w.data.copy_(self._first[name] * (self.norms[name] / self.began[name]))  # a factor of 1 changes no bit

    def put_back(self) -> None:
        for name, w in self.weights.items():
            w.data.copy_(self._first[name])

    def _evaluate(self, step: int, *, with_slopes: bool) -> tuple[float, list[float]]:
        session = self._session
        with rng.keyed(session.seed, WHO, step, session.rank):
            batch = self._data[step % len(self._data)]
            loss = self._of_noise(batch) if self._made_up else self._loss(batch)
            assert loss is not None, "it was there before"
            quotient, slopes = loss, list[float]()
            with watched(loss) as derived:
                quotient = gradient_quotient(derived.loss, self._all, eps=self._eps)
                slopes = norm_slopes(quotient, [*self.weights.values()]) if with_slopes else []
            if derived.reason:
                raise ValueError(
                    f"{WHO}: the loss of {type(session.module).__name__} cannot be differentiated three times"
                    f" ({derived.reason}). Replace the operation at the start of training, or remove {WHO}. The weights are"
                    " unchanged."
                )
        session.chain.cost.add(batch, backward=3 if with_slopes else 2)
        every = session.gather([float(quotient.detach()), *slopes])
        means = [sum(values) / len(values) for values in zip(*every, strict=True)]
        if not all(abs(value) < float("inf") for value in means):
            raise ValueError(
                f"{WHO}: the gradient quotient of {type(session.module).__name__}, or its slope, is not finite at step"
                f" {step} ({means[0]:.4g}). Start from smaller weights, use a smaller lr, or remove {WHO}."
                " The weights are unchanged."
            )
        return means[0], means[1:]

    def _of_noise(self, batch: Any) -> Tensor | None:
        """The loss of normal noise in the shapes of the batch."""
        try:
            return self._loss(map_tensors(batch, _noise))
        except Exception as e:  # such as of targets that must be within [0, 1]
            self._loss(batch)  # a step that fails on data too says so itself
            raise ValueError(
                f"{WHO}(batches=0): training_step of {type(self._session.module).__name__} fails on normal noise in place of"
                f" the batch's numbers, with {type(e).__name__} ({e}). Set batches=1 or more to use batches of data. The"
                " weights are unchanged."
            ) from e

    def _loss(self, batch: Any) -> Tensor | None:
        step = self._session.own_step
        loss = loss_of(step(batch, *((self._batch_idx,) if takes_index(step) else ())))
        if isinstance(loss, Tensor) and torch.is_grad_enabled() and loss.grad_fn is None:
            raise ValueError(
                f"{WHO}: training_step returned a loss that does not depend on any parameter. Return one that requires grad."
            )
        return loss


def _noise(tensor: Tensor) -> Tensor:
    """Replace a floating-point tensor by normal noise, and put the samples of another tensor in random order."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device="cpu").to(tensor.device)
    return tensor[torch.randperm(len(tensor)).to(tensor.device)] if tensor.ndim else tensor
