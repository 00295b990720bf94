"""JointSpar: gradients of some layers alone are computed and sent, without bias (Liu & Mozafari 2022)."""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

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

from lightning_eff._core._lightning.names import is_a, like
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core._stack.unused_parameters import look_for_unused, refuse_static_graph
from lightning_eff._core.losses import loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.strategies._communication.exchange import as_real, views_of

WHO = "JointSpar"
_CURVATURE = ("KFAC", "MFAC", "SampledQuasiNewton")
_APART = ("LocalSGD", "ResIST")
_PASSING = ("StochasticDepth", "ProgressiveLayerDropping")


def drawn(p: Tensor, generator: Generator) -> Tensor:
    """``Z_d ~ Bernoulli(p_d)``, each layer by itself: (D,), True where its gradient is computed."""
    return torch.rand(len(p), generator=generator, dtype=torch.float64) < p


def losses(norms: Tensor, z: Tensor, p: Tensor, largest: float, floor: float) -> Tensor:
    """How the variance falls with each probability, estimated from the layers that were drawn: (D,), in [-1 / p, 0].

    The variance of ``g_d Z_d / p_d`` is ``|g_d|^2 (1 / p_d - 1)``, with the derivative ``-|g_d|^2 / p_d^2``, which is counted
    ``Z_d / p_d`` times. The paper adds ``L^2 / p_min^2`` to it, so that it is not negative: that is a constant for all layers
    in expectation, which changes nothing, and noise for each that is drawn. Here that is what it is divided by, so that the
    scale of gradients does not matter.

    Args:
        norms: ``|g_d|`` of those that were drawn, (D,).
        z: which were.
        p: with which probabilities.
        largest: ``L``, the largest norm so far, > 0.
        floor: ``p_min``.
    """
    # l_d = −(|g_d|² / p_d²) / (L² / p_min²),  l̂_d = l_d Z_d / p_d
    return -((norms * floor / (largest * p)) ** 2) * z / p


def projected(w: Tensor, total: float, floor: float) -> Tensor:
    """``argmin_q KL(q || w)`` over ``p_min <= q_d <= 1`` and ``sum_d q_d = total``: ``q_d = min(max(c w_d, p_min), 1)``.

    Args:
        w: positive numbers, (D,).
        total: in [D p_min, D].
        floor: ``p_min``.
    """
    # the sum over d is linear in c between the places where a number leaves p_min, or comes to 1
    at, order = torch.cat((floor / w, 1.0 / w)).sort()
    slope = torch.cat((w, -w))[order].cumsum(0)
    sums = len(w) * floor + torch.cat((w.new_zeros(1), (slope[:-1] * at.diff()).cumsum(0)))
    k = max(int((sums < total).sum()) - 1, 0)
    c = at[k] + (total - sums[k]).clamp_min(0.0) / slope[k]
    return (c * w).clamp(floor, 1.0)


def next_probabilities(p: Tensor, estimated: Tensor, *, rate: float, total: float, floor: float) -> Tensor:
    """One step of mirror descent: ``p_d exp(-alpha l_d)``, projected."""
    # w_d = p_d exp(−α l̂_d),  p ← argmin_q KL(q ‖ w)
    w = p * torch.exp(-rate * (estimated - estimated.min()))  # a common factor does not matter
    return projected(w.clamp_min(1e-300), total, floor)


def at_least_zero(loss: Tensor, w: Parameter) -> Tensor:
    """``loss``, in which none of the layers that were drawn had a part, with a gradient of zero for ``w``."""
    w.requires_grad_(True)
    return loss + 0.0 * as_real(w).flatten()[:1].sum().to(loss.dtype)


class _Sent:
    """What DDP's hook knows: which parameters were drawn, and what was sent.

    Attributes:
        left: ids of the parameters whose gradients are not sent.
        numbers: that were sent in this step.
        whole: what DDP would have sent.
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
    """Compute and send the gradients of some layers of each step, drawn at random, so that their mean is the whole gradient.

    A layer is a module's own parameters. Of D layers, each is drawn with a probability p, and ``share`` D of them on average.
    A drawn layer's gradient counts 1 / p times, and that of one that is not drawn is zero: the expectation is the gradient.
    Which layers are drawn more often follows from what was seen: by mirror descent, probabilities go to where gradients are
    large, so that the variance falls, and none falls below ``floor``. The step of that descent is ``rate``, in units in which
    gradients have no scale.

    A layer that is not drawn takes no gradient in the step: its product for the weights is not made, and where no layer below
    is drawn, the backward pass ends. Under DDP all ranks draw the same layers, and send the gradients of these alone.
    **Products back to inputs are made as before**, so that at most a third of a step's are saved, and with large ``share``
    much less; and the noise of what is left out costs steps. Optimizers step with the zeros, as with any gradient: momenta
    and weight decay go on.

    Logged: ``drawn`` (layers), ``sent`` (the share of the gradients' numbers that were computed, and sent under DDP), ``least``
    and ``most`` (probabilities).

    Args:
        share: of the layers that are drawn on average, in (0, 1]. 1 is plain training.
        floor: p_min, the least probability, in (0, share]; None for half of ``share``.
        rate: alpha, of mirror descent, >= 0. 0 leaves all probabilities at ``share``.

    Raises:
        ValueError: for other values; at setup, if nothing trains, with a communication hook or a static graph in DDP, or where
            blocks are checkpointed with use_reentrant=True, which passes over weights behind inputs without gradients.

    Sources:
        Liu & Mozafari 2022, ICML, https://proceedings.mlr.press/v162/liu22n.html.
    """

    saves: ClassVar[str] = "products for the weights' gradients, and what DDP sends, of the layers that are not drawn"
    paper: ClassVar[str] = "Liu & Mozafari 2022, PMLR 162"
    constraints: ClassVar[str] = "DDP without another hook and static_graph; no reentrant checkpoints"
    needs: ClassVar[Need] = Need.DDP
    survey: ClassVar[Survey | None] = Survey("JointSpar", zhuang="2.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"share": Choice((0.5, 0.7, 0.9))})
    control: ClassVar[Control] = Control(
        "as many layers drawn with one probability for all; and the baseline for as many seconds",
        lambda technique: {} if technique.neutral else {"uniform": JointSpar(share=technique.share, rate=0.0)},
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "RegionalCompilation": "blocks that take other gradients in each step would be compiled anew for each draw",
        **dict.fromkeys(_PASSING, "a step may pass over all layers that were drawn, and would have no gradient"),
        **dict.fromkeys(_CURVATURE, "curvature would be of gradients of which some layers are zero"),
        **dict.fromkeys(_APART, "ranks that train apart would draw layers by gradients of their own"),
    }
    needs_optimizer: ClassVar[bool] = True

    def __init__(self, share: float = 0.7, *, floor: float | None = None, rate: float = 0.1) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ValueError(
                f"{WHO}({share=}): expected the share of the layers that is drawn, in (0, 1]; 1 draws all."
            )
        if floor is not None and (isinstance(floor, bool) or not 0.0 < floor <= share):
            raise ValueError(f"{WHO}({floor=}, {share=}): expected the least probability, in (0, share], or None.")
        if isinstance(rate, bool) or not 0.0 <= rate < float("inf"):
            raise ValueError(f"{WHO}({rate=}): expected a finite number >= 0, the step of mirror descent.")
        self.share, self.rate = float(share), float(rate)
        self.floor = share / 2 if floor is None else float(floor)
        self._reset()

    def _reset(self) -> None:
        self._layers: list[dict[str, Parameter]] = []  # by name, of each layer
        self._p: Tensor | None = None
        self._z = torch.zeros(0, dtype=torch.bool)  # of the step
        self._largest = self._numbers = 0.0
        self._off: list[Parameter] = []  # that take no gradient in the pass that is under way
        self._sent = _Sent()

    @property
    @override
    def neutral(self) -> bool:
        return self.share == 1.0

    # -- the run

    @override
    def check(self, session: Session) -> None:
        strategy = session.trainer.strategy
        refuse_static_graph(session, who=WHO)
        if is_a(strategy, DDPStrategy) and (
            strategy._ddp_comm_hook is not None
            or type(strategy)._register_ddp_hooks is not like(strategy, DDPStrategy)._register_ddp_hooks
        ):
            raise ValueError(
                f"{WHO}: {type(strategy).__name__} has a communication hook already, and DDP takes one; expected DDP without"
                " one. Use strategy='ddp', or take the technique out."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.JOIN, self._link, order=-1)  # of all passes of a step
        strategy = session.trainer.strategy
        if not is_a(strategy, DDPStrategy):
            return
        if look_for_unused(session):
            rank_zero_info(f"{WHO}: DDP runs with find_unused_parameters=True, for the layers that are not drawn.")
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
                f"{WHO}: {type(module).__name__} is checkpointed with use_reentrant=True, which passes over the weights of a"
                " block whose input needs no gradient; expected use_reentrant=False. Enable checkpointing with"
                " gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        self._layers = thawing(lambda: _layers_of(module), session._stacks)()
        if not self._layers:
            raise ValueError(
                f"{WHO}: nothing of {type(module).__name__} takes a gradient; expected layers that train. Let some require"
                " gradients, or take the technique out."
            )
        if self._p is None:
            self._p = torch.full((len(self._layers),), self.share, dtype=torch.float64)
        if len(self._p) != len(self._layers):
            raise ValueError(
                f"{WHO}: the checkpoint has probabilities of {len(self._p)} layers, and {type(module).__name__} has"
                f" {len(self._layers)} that train; expected as many. Resume with the model it was saved from."
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
        """Gradients are whole: those of drawn layers count 1 / p times, the others' are zero."""
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
        """Probabilities of the next step, by the norms that were seen."""
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

    # -- what is told and kept

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
            f"{self.share:.0%} of {len(p)} layers drawn in a step on average, with probabilities from {float(p.min()):.2f} to"
            f" {float(p.max()):.2f} in the end"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"p": self._p, "largest": self._largest}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._p, self._largest = state_dict["p"], state_dict["largest"]


def _layers_of(module: torch.nn.Module) -> list[dict[str, Parameter]]:
    """The parameters that train, of each module that has some of its own; a shared one is of the first."""
    layers: dict[str, dict[str, Parameter]] = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            layers.setdefault(name.rpartition(".")[0], {})[name] = p
    return [*layers.values()]
