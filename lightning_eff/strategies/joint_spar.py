"""JointSpar: compute and send unbiased gradients of a random part of the layers (Liu & Mozafari 2022)."""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Number
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core._stack.unused_parameters import look_for_unused, refuse_static_graph
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import LOCAL_STEPS, Control, Technique
from lightning_eff.strategies._communication.exchange import as_real, views_of
from lightning_eff.strategies._communication.hooks import refuse_hook

WHO = "JointSpar"
_CURVATURE = ("KFAC", "MFAC", "SampledQuasiNewton")
_APART = (*LOCAL_STEPS, "ResIST")
_PASSING = ("StochasticDepth", "ProgressiveLayerDropping")


def drawn(p: Tensor, generator: Generator) -> Tensor:
    """Draw ``Z_d ~ Bernoulli(p_d)`` independently for each layer: (D,), True where its gradient is computed."""
    return torch.rand(len(p), generator=generator, dtype=torch.float64) < p


def losses(norms: Tensor, z: Tensor, p: Tensor, largest: float, floor: float) -> Tensor:
    """Estimate the derivative of the variance by each probability from the layers drawn: (D,), in [-1 / p, 0].

    The variance of ``g_d Z_d / p_d`` is ``|g_d|^2 (1 / p_d - 1)``. Its derivative ``-|g_d|^2 / p_d^2`` counts ``Z_d / p_d``
    times. The paper adds ``L^2 / p_min^2``, so that the estimate is not negative. In expectation that is the same constant for
    all layers and changes nothing, and it adds noise for each layer drawn. This function divides by it instead, so that the
    scale of the gradients does not matter.

    Args:
        norms: ``|g_d|`` of the layers drawn, (D,).
        z: which layers were drawn, (D,).
        p: the probabilities of the draw, (D,).
        largest: ``L``, the largest norm so far, > 0.
        floor: ``p_min``.
    """
    # l_d = −(|g_d|² / p_d²) / (L² / p_min²),  l̂_d = l_d Z_d / p_d
    return -((norms * floor / (largest * p)) ** 2) * z / p


def projected(w: Tensor, total: float, floor: float) -> Tensor:
    """Project ``w``: ``argmin_q KL(q || w)`` over ``p_min <= q_d <= 1`` and ``sum_d q_d = total``.

    The solution is ``q_d = min(max(c w_d, p_min), 1)``.

    Args:
        w: positive numbers, (D,).
        total: in [D p_min, D].
        floor: ``p_min``.
    """
    # the sum over d is linear in c between the points where a number leaves p_min or reaches 1
    at, order = torch.cat((floor / w, 1.0 / w)).sort()
    slope = torch.cat((w, -w))[order].cumsum(0)
    sums = len(w) * floor + torch.cat((w.new_zeros(1), (slope[:-1] * at.diff()).cumsum(0)))
    k = max(int((sums < total).sum()) - 1, 0)
    c = at[k] + (total - sums[k]).clamp_min(0.0) / slope[k]
    return (c * w).clamp(floor, 1.0)


def next_probabilities(p: Tensor, estimated: Tensor, *, rate: float, total: float, floor: float) -> Tensor:
    """Take one step of mirror descent: ``p_d exp(-alpha l_d)``, projected."""
    # w_d = p_d exp(−α l̂_d),  p ← argmin_q KL(q ‖ w)
    w = p * torch.exp(-rate * (estimated - estimated.min()))  # a common factor does not matter
    return projected(w.clamp_min(1e-300), total, floor)


def at_least_zero(loss: Tensor, w: Parameter) -> Tensor:
    """Add a zero gradient for ``w`` to ``loss``, which no drawn layer took part in."""
    w.requires_grad_(True)
    return loss + 0.0 * as_real(w).flatten()[:1].sum().to(loss.dtype)


class _Sent:
    """The state of DDP's hook.

    Attributes:
        left: ids of the parameters whose gradients are not sent.
        numbers: number of gradient elements sent in this step.
        whole: number of elements that DDP would have sent.
    """

    def __init__(self) -> None:
        self.left: set[int] = set()
        self.numbers = self.whole = 0


def _reduce(sent: _Sent, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients that were drawn; the others are zeros on all ranks."""
    buffer = bucket.buffer()
    some = [g for p, g in views_of(bucket) if id(p) not in sent.left]
    if bucket.index() == 0:
        sent.numbers = sent.whole = 0
    sent.whole += buffer.numel()
    numbers = sum(g.numel() for g in some)
    sent.numbers += numbers
    done: Future[Tensor] = torch.futures.Future()
    if some:
        whole = numbers == buffer.numel()
        flat = buffer if whole else torch.cat([g.flatten() for g in some])
        flat.div_(dist.get_world_size())
        dist.all_reduce(flat)
        if not whole:
            for g, mean in zip(some, flat.split([g.numel() for g in some]), strict=True):
                g.copy_(mean.view_as(g))
    done.set_result(buffer)
    return done


class JointSpar(Technique):
    """Compute and send the gradients of a random part of the layers in each step, without bias.

    A layer is a module's own parameters. Each step draws each of the D layers with its own probability p, ``share * D``
    of them on average. The gradient of a drawn layer is multiplied by 1 / p, and the others are zero, so the expectation is
    the full gradient. Mirror descent with step size ``rate`` raises the probabilities of layers with large gradients, which
    lowers the variance. No probability falls below ``floor``. The scale of the gradients does not matter.

    Use it where computing or exchanging weight gradients dominates. The weight gradients of layers that are not drawn are
    not computed, and the backward pass ends above the lowest drawn layer. Under DDP all ranks draw the same layers and send
    only their gradients. **Input gradients are computed as before**, so at most a third of a step is saved, and much less
    with a large ``share``. The extra gradient noise costs steps. Optimizers step with the zeros as with any gradient:
    momenta and weight decay continue.

    The callback logs ``drawn`` (the number of layers), ``sent`` (the fraction of gradient elements that were computed, and
    sent under DDP), and ``least`` and ``most`` (the smallest and largest probability).

    Args:
        share: the average fraction of layers drawn per step. 1 is plain training.
        floor: the minimum probability of a layer, at most ``share``. None is half of ``share``.
        rate: the step size of mirror descent. 0 leaves all probabilities at ``share``.

    Raises:
        ValueError: for a value out of range. At setup, if no parameter requires a gradient, with a communication hook or a
            static graph in DDP, or if blocks are checkpointed with ``use_reentrant=True``, which computes no weight
            gradients behind inputs without gradients.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[JointSpar(share=0.7)])

    References:
        Liu & Mozafari 2022, "Communication-Efficient Distributed Learning for Large Batch Optimization", ICML,
        https://proceedings.mlr.press/v162/liu22n.html.
    """

    saves: ClassVar[str] = "weight gradients, and their exchange in DDP, of the layers that are not drawn"
    paper: ClassVar[str] = "Liu & Mozafari 2022, PMLR 162"
    constraints: ClassVar[str] = "DDP without another hook or static_graph; no reentrant checkpointing"
    needs: ClassVar[Need] = Need.DDP
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"share": Choice((0.5, 0.7, 0.9))})
    control: ClassVar[Control] = Control(
        "the same number of layers, drawn with equal probabilities; and the baseline for the same time",
        lambda technique: {} if technique.neutral else {"uniform": JointSpar(share=technique.share, rate=0.0)},
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RegionalCompilation": "compiled blocks would be recompiled for each draw of layers",
        **dict.fromkeys(_PASSING, "a step may skip all layers that were drawn, and would have no gradient"),
        **dict.fromkeys(_CURVATURE, "its curvature would come from gradients in which some layers are zero"),
        **dict.fromkeys(_APART, "ranks with local steps would draw layers by their own gradients"),
    }
    needs_optimizer: ClassVar[bool] = True
    neutral_at: ClassVar[Mapping[str, Any]] = {"share": 1.0}
    checkpointed: ClassVar[tuple[str, ...]] = ("_p", "_largest")

    def __init__(
        self,
        share: Annotated[float, Fraction(above=0)] = 0.7,
        *,
        floor: Annotated[float, Fraction(above=0)] | None = None,
        rate: Annotated[float, Number(at_least=0)] = 0.1,
    ) -> None:
        if floor is not None and floor > share:
            raise ValueError(
                f"{WHO}({floor=}, {share=}): the minimum probability is above the average one. Set floor to at most {share},"
                " or leave it out."
            )
        self.share, self.rate = float(share), float(rate)
        self.floor = share / 2 if floor is None else float(floor)

    def _reset(self) -> None:
        self._layers: list[dict[str, Parameter]] = []  # by name, of each layer
        self._p: Tensor | None = None
        self._z = torch.zeros(0, dtype=torch.bool)  # of the step
        self._largest = self._numbers = 0.0
        self._off: list[Parameter] = []  # that take no gradient in the pass that is under way
        self._sent = _Sent()

    # -- the run

    @override
    def check(self, session: Session) -> None:
        refuse_static_graph(session, who=WHO)
        refuse_hook(session.trainer.strategy, who=WHO)

    @override
    def attach(self, session: Session) -> None:
        session.chain.add(Stage.JOIN, self._link, order=-1)  # of all passes of a step
        strategy = session.trainer.strategy
        if not is_a(strategy, DDPStrategy):
            return
        if look_for_unused(session):
            rank_zero_info(
                f"{WHO}: DDP runs with find_unused_parameters=True, because layers that are not drawn have no gradient."
            )
        wrap = strategy.configure_ddp

        def configure_ddp() -> None:
            wrap()
            assert isinstance(strategy.model, DistributedDataParallel)
            strategy.model.register_comm_hook(self._sent, _reduce)

        session.patches.set(strategy, "configure_ddp", configure_ddp)

    @override
    def on_optimizers(self, session: Session) -> None:
        module = session.module
        if is_checkpointed_reentrantly(module.modules()):
            raise ValueError(
                f"{WHO}: {type(module).__name__} is checkpointed with use_reentrant=True, which computes no weight gradients in"
                " a block whose input needs no gradient. Enable checkpointing with gradient_checkpointing_kwargs="
                "{'use_reentrant': False}."
            )
        self._layers = thawing(lambda: _layers_of(module), session._stacks)()
        if not self._layers:
            raise ValueError(
                f"{WHO}: no parameter of {type(module).__name__} requires a gradient. Set requires_grad=True on some of them,"
                f" or remove {WHO}."
            )
        if self._p is None:
            self._p = torch.full((len(self._layers),), self.share, dtype=torch.float64)
        if len(self._p) != len(self._layers):
            raise ValueError(
                f"{WHO}: the checkpoint has probabilities for {len(self._p)} layers, but {type(module).__name__} has"
                f" {len(self._layers)} trainable layers. Resume with the model that the checkpoint was saved from."
            )
        clip = module.configure_gradient_clipping

        @functools.wraps(clip)
        def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._weigh(session, optimizer)
            clip(optimizer, *args, **kwargs)

        session.patches.set(module, "configure_gradient_clipping", configure_gradient_clipping)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        assert self._p is not None, "on_optimizers has found the layers"
        # probabilities change as the optimizer steps, so that all micro-batches of a step draw the same
        self._z = drawn(self._p, session.generator(WHO, session.trainer.global_step))
        left = [p for layer, z in zip(self._layers, self._z.tolist(), strict=True) if not z for p in layer.values()]
        self._sent.left = {id(p) for p in left}
        whole = sum(p.numel() for layer in self._layers for p in layer.values())
        self._numbers = 1.0 - sum(p.numel() for p in left) / whole

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._thaw()
        if self._z.any():  # without any there would be no graph; then all are computed, and none counts
            trains = [p for layer in self._layers for p in layer.values() if p.requires_grad]
            self._off = [p for p in trains if id(p) in self._sent.left]
            if len(self._off) == len(trains):  # those that were drawn are frozen for now
                self._off = []
            for p in self._off:
                p.requires_grad_(False)
            self.session.when_step_ends(self._thaw)
        output = proceed(batch)
        loss = loss_of(output)
        if self._off and loss is not None and not loss.requires_grad:
            loss = at_least_zero(loss, self._off[0])
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss
        return output

    def _thaw(self) -> None:
        while self._off:
            self._off.pop().requires_grad_(True)

    @torch.no_grad()
    def _weigh(self, session: Session, optimizer: Optimizer) -> None:
        """Divide the complete gradients of the drawn layers by p, and set all others to zero."""
        if session.asleep:
            return
        assert self._p is not None, "on_optimizers has found the layers"
        steps = {id(p) for group in optimizer.param_groups for p in group["params"]}
        squares: dict[int, Tensor] = {}
        for d, (layer, p_d) in enumerate(zip(self._layers, self._p.tolist(), strict=True)):
            for w in (w for w in layer.values() if id(w) in steps and w.requires_grad):
                if not self._z[d]:
                    w.grad = torch.zeros_like(w)
                elif w.grad is not None:
                    size = w.grad.detach().abs() if w.is_complex() else w.grad.detach()
                    square = size.float().square().sum()
                    squares[d] = squares[d] + square if d in squares else square
                    w.grad.div_(p_d)
        self._learn(squares)

    def _learn(self, squares: dict[int, Tensor]) -> None:
        """Update the probabilities for the next step from the gradient norms of this one."""
        assert self._p is not None, "on_optimizers has found the layers"
        if not squares or self.rate == 0.0:
            return
        norms, z = torch.zeros_like(self._p), torch.zeros_like(self._p)
        where = torch.tensor([*squares])
        norms[where] = torch.stack([*squares.values()]).cpu().double().sqrt()
        z[where] = 1.0
        if not norms.isfinite().all():
            return
        self._largest = max(self._largest, float(norms.max()))
        if self._largest > 0.0:
            estimated = losses(norms, z, self._p, self._largest, self.floor)
            total = self.share * len(self._p)
            self._p = next_probabilities(self._p, estimated, rate=self.rate, total=total, floor=self.floor)

    @override
    def detach(self, session: Session) -> None:
        self._thaw()
        self._layers = []

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        p = self._p
        return {
            "drawn": int(self._z.sum()),
            "sent": self._numbers,
            "least": 0.0 if p is None else float(p.min()),
            "most": 0.0 if p is None else float(p.max()),
        }

    @override
    def summary(self) -> str:
        p = self._p
        if p is None:
            return "no layer was drawn"
        return (
            f"drew {self.share:.0%} of {len(p)} layers per step on average, with final probabilities from"
            f" {float(p.min()):.2f} to {float(p.max()):.2f}"
        )


def _layers_of(module: torch.nn.Module) -> list[dict[str, Parameter]]:
    """List the trainable parameters of each module that has some; a shared one belongs to its first module."""
    layers: dict[str, dict[str, Parameter]] = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            layers.setdefault(name.rpartition(".")[0], {})[name] = p
    return [*layers.values()]
