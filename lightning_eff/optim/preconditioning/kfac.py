"""K-FAC: precondition gradients by Kronecker factors of the Fisher matrix (Martens & Grosse 2015)."""

import contextlib
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Number
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core._samples.scoring import agree
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core.batches import num_samples
from lightning_eff._core.losses import LOSSES, LossNotVisible, SeeLosses, loss_of
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.optim.preconditioning._estimates import Estimates
from lightning_eff.optim.preconditioning._gradients import Gradients, Preconditioner, rivals
from lightning_eff.optim.preconditioning._kronecker_factors import Moments, clipping_factor, moments, precondition
from lightning_eff.optim.preconditioning._maps import Map, maps_of, rows_of
from lightning_eff.optim.preconditioning._sampled_labels import sampled_gradients, weights_of
from lightning_eff.optim.preconditioning._taps import REENTRANT, Taps, last_reached

_NAMES = ", ".join(f"F.{fn.__name__}" for fn in LOSSES)


class KFAC(Preconditioner):
    """Precondition the gradients of linear layers and convolutions by the Fisher matrix, before the optimizer steps.

    The curvature of each weight ``W`` of a layer ``y = W a`` (with its bias as the weight of a constant input) is
    approximated by the Kronecker product of ``A = mean a a^T`` of its inputs and ``S = sum g g^T`` of the gradients at its
    outputs. The gradient ``G`` becomes ``nu (S + sqrt(damping) / pi)^-1 G (A + pi sqrt(damping))^-1``. The rows of a layer are
    its samples, tokens or positions, in all its calls. Rows on which no loss depends, such as padding, do not count. So one
    undamped, unclipped step of plain SGD with a learning rate of 1 solves linear regression.

    Use it with SGD with momentum, and large batches. An optimizer that divides by the size of gradients, such as Adam, undoes
    part of it. It costs memory for two factors and their inverses per layer.

    **When.** Statistics are taken in every ``every``-th optimizer step, over all its micro-batches, and averaged over ranks
    and time. Inverses are computed in the first step, and again after ``inverse_every`` steps or more. Gradients are
    preconditioned when they are complete and unscaled, so gradient clipping acts on the result. A step with a gradient that
    is not finite is left alone.

    **Which gradients ``g``.** With ``fisher="model"``, ``g`` is of losses on labels that are drawn from the model, which makes
    ``A`` and ``S`` factors of the Gauss-Newton matrix. Steps with statistics then cost one more backward pass, through the
    same forward pass, to the layers' outputs only. The loss must come from loss functions of ``torch.nn.functional``, of which
    there may be several, summed or weighted. Other parts of the loss add no curvature. With ``fisher="empirical"``, ``g`` is
    of the step's own loss, without another pass. If no loss call is seen, the loss is taken as a mean over the batch's
    samples, and the log says so. In both cases a constant factor of the loss, and sum or mean, make no difference.

    Left alone are embeddings and weights tied to one, norms, transposed convolutions, recurrent networks, computed weights
    (parametrizations), layers whose class has a forward of its own, and ``nn.MultiheadAttention``, which calls none of its
    layers. A layer without a gradient, such as an expert that sees no token, keeps its factors; a layer without factors keeps
    its gradient. Compiled modules run uncompiled in steps with statistics.

    It logs ``gradient_norm`` of all gradients, ``direction_norm`` of the preconditioned ones, ``maps`` (the number of layers
    preconditioned in the last step), ``clipping`` (the factor ``nu``), ``statistics`` (the number of steps with statistics),
    and ``rewritten`` and ``left`` (the numbers of steps with and without preconditioning).

    Args:
        damping: the damping ``lambda``, in units of the curvature of a mean loss. 0 takes pseudo-inverses.
        kl_clip: the bound ``kappa``. Preconditioned gradients are scaled down so that the squared learning rate times
            ``V . G`` is at most this; None does not clip.
        decay: the decay factor of the factors' mean over time. The first statistics are a plain mean.
        every: the number of optimizer steps from statistics to statistics; 0 is plain training.
        inverse_every: the smallest number of optimizer steps from inverses to inverses.
        fisher: the labels of the Fisher matrix, as above.
        max_size: the number of rows of the largest factor that is kept whole. A larger one, such as a head's ``S`` over a
            large vocabulary, is kept as its diagonal.

    Raises:
        ValueError: for a value out of range. At setup, if no optimizer has a weight of such a layer, or if a parameter group
            has no learning rate to clip by. With "model", if part of the network is checkpointed with ``use_reentrant=True``
            (at setup or in the first step); and in the first step, on all ranks, if no loss call is seen.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[KFAC(damping=1e-3, every=10, inverse_every=50)])

    References:
        Martens & Grosse 2015, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", arXiv:1503.05671.
        Grosse & Martens 2016, arXiv:1602.01407 (convolutions). Osawa et al. 2019, arXiv:1811.12019. Eschenhagen et al. 2023,
        arXiv:2311.00636.
    """

    saves: ClassVar[str] = "steps, according to the papers, mostly with large batches"
    paper: ClassVar[str] = (
        "Martens & Grosse 2015, arXiv:1503.05671; convolutions: Grosse & Martens 2016, arXiv:1602.01407"
    )
    constraints: ClassVar[str] = "needs automatic optimization; keeps two factors and their inverses per layer"
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {
            "damping": Uniform(1e-4, 1e-1, log=True),
            "every": Choice((5, 10, 20)),
            "fisher": Choice(("model", "empirical")),
        }
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with its own tuned learning rate that decays to zero, in more steps"
    )
    conflicts: ClassVar = {
        **rivals("MFAC"),
        "Fixup": "it has scalars in its layers, so their outputs are not products of inputs and weights",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"every": 0}
    checkpointed: ClassVar[tuple[str, ...]] = ("_inverted", "_checked")

    def __init__(
        self,
        damping: Annotated[float, Number(at_least=0)] = 1e-3,
        *,
        kl_clip: Annotated[float, Number(above=0)] | None = 1e-3,
        decay: Annotated[float, Fraction(below=1)] = 0.95,
        every: Annotated[int, Count(at_least=0)] = 10,
        inverse_every: Annotated[int, Count()] = 50,
        fisher: Literal["model", "empirical"] = "model",
        max_size: Annotated[int, Count()] = 8192,
    ) -> None:
        self.damping, self.kl_clip, self.decay, self.fisher = damping, kl_clip, decay, fisher
        self.every, self.inverse_every, self.max_size = every, inverse_every, max_size

    @override
    def _reset(self) -> None:
        super()._reset()
        self._maps: dict[str, Map] = {}
        self._weights: dict[nn.Module, nn.Parameter] = {}
        self._paths: dict[nn.Module, str] = {}
        self._estimates = Estimates(decay=self.decay, max_size=self.max_size)
        self._inverted: int | None = None  # the step of the last inverses
        self._measuring: int | None = None  # the step whose statistics are being taken
        self._saved: dict[str, Any] | None = None
        self._step: Step | None = None
        self._taps: Taps | None = None
        self._per_square = 1.0  # the factor on squared gradients in this backward pass
        self._checked = False

    # -- the run

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        session.chain.add(Stage.MEASURE, self._link)

    @override
    def on_optimizers(self, session: Session) -> None:
        super().on_optimizers(session)
        if self.fisher == "model" and is_checkpointed_reentrantly(session.module.modules()):
            raise ValueError(REENTRANT)
        groups = [group for optimizer in session.optimizers for group in optimizer.param_groups]
        held = {id(p) for group in groups for p in group["params"]}
        found, left = maps_of(session.module, held)
        alone = "".join(f" Left alone: {name}, for {reason}." for name, reason in left.items())
        if not found:
            raise ValueError(
                f"KFAC: no optimizer of {type(session.module).__name__} has the weight of an nn.Linear, Conv1D, nn.Conv1d,"
                f" nn.Conv2d or nn.Conv3d that is called.{alone} Give one to an optimizer, or remove KFAC."
            )
        without = [i for i, group in enumerate(groups) if not isinstance(group.get("lr"), float | int | Tensor)]
        if self.kl_clip is not None and without:
            raise ValueError(
                f"KFAC(kl_clip={self.kl_clip}): parameter group {without[0]} has no learning rate 'lr', which clipping needs."
                " Set kl_clip=None, or use an optimizer with a learning rate in each group."
            )
        self._maps = {m.name: m for m in found}
        self._weights = {owner: m.weight for m in found for owner in m.owners}
        self._paths = {owner: m.name for m in found for owner in m.owners}
        rank_zero_info(f"KFAC: preconditions the gradients of {len(found)} layers.{alone}")
        if self._saved is not None:
            windows = self._saved["windows"]
            own = windows[session.rank] if session.rank < len(windows) else None
            self._estimates.load(self._saved, own, self._maps)
            self._measuring, self._saved = self._saved["measuring"], None

    # -- statistics

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if step.global_step % self.every:
            return proceed(batch)
        if step is self._step:  # a second pass on the micro-batch, at other weights
            if self._taps is not None:
                self._taps.remove()
            return proceed(batch)
        if self._measuring != step.global_step:
            self._estimates.drop_window()
        self._step, self._measuring = step, step.global_step
        taps = self._taps = Taps(self._weights, self._take)
        taps.armed = self.fisher == "empirical"
        scope = ExitStack()
        scope.enter_context(uncompiled())
        scope.callback(taps.remove)
        self.session.when_step_ends(scope.close)
        seen = SeeLosses()
        with seen:
            output = proceed(batch)
        taps.close()
        loss = loss_of(output)
        if loss is not None and loss.requires_grad:
            self._measure(step, batch, loss, seen, taps)
        return output

    def _measure(self, step: Step, batch: Any, loss: Tensor, seen: SeeLosses, taps: Taps) -> None:
        """After the forward pass: find the weight of each loss call, and with "model" run backward for drawn labels."""
        device = step.module.device.type
        plain = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
        began = time.perf_counter()
        with plain:
            outputs = [call.output for call in seen.calls]
            found = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True) if outputs else ()
            with torch.no_grad():
                calls = [
                    (call, weights_of(call, g)) for call, g in zip(seen.calls, found, strict=True) if g is not None
                ]
            self._check(seen, any_seen=bool(calls))
            self._estimates.window_scale += sum(float(weights.sum()) for _, weights in calls) if calls else 1.0
            if self.fisher == "empirical":
                total = sum(float(w.sum()) for _, w in calls)
                squares = sum(float(w.square().sum()) for _, w in calls)
                each = squares / total if total > 0 else 1.0 / num_samples(batch)
                loss.register_hook(lambda g: self._begin(float(g), each))
                return
            generator = self.session.generator("KFAC", step.global_step, step.batch_idx, self.session.rank)
            with torch.no_grad():
                roots = [pair for call, w in calls for pair in sampled_gradients(call, w, generator)]
            tensors, gradients = [t for t, _ in roots], [g for _, g in roots]
            ends = last_reached(tensors, taps.edges)
            self._per_square, taps.armed = 1.0, True
            if ends:
                torch.autograd.grad(tensors, ends, gradients, retain_graph=True, allow_unused=True)
            taps.armed = False
        cost = self.session.chain.cost
        cost.backward_passes += 1
        cost.seconds += time.perf_counter() - began

    def _check(self, seen: SeeLosses, *, any_seen: bool) -> None:
        """Check in the first step with statistics that the loss is seen; the ranks agree on it."""
        if self._checked:
            return
        problem = None
        if not any_seen and self.fisher == "model":
            names = ", ".join(dict.fromkeys(f"F.{call.fn.__name__}" for call in seen.calls)) or "none"
            problem = LossNotVisible(
                f"KFAC(fisher='model'): the loss of training_step does not come from a known loss call (seen: {names}). Compute"
                f" it with one of {_NAMES}, outside of custom autograd functions, or set fisher='empirical'."
            )
        agree(self.session, problem)
        self._checked = True
        if not any_seen:
            rank_zero_info("KFAC: no loss call was seen; the loss is treated as a mean over the batch's samples.")

    def _begin(self, factor: float, each: float) -> None:
        """Begin the backward pass through the step's own loss times ``factor`` (a gradient scaler's or a window's).

        Rows' gradients are ``factor * w dl``, and ``S`` is the sum of ``w dl dl^T``.
        """
        square = factor * factor * each
        self._per_square = 1.0 / square if 0.0 < square < math.inf else math.nan

    def _take(self, owner: nn.Module, given: Tensor, gradient: Tensor) -> None:
        name = self._paths[owner]
        for a, g in rows_of(owner, given, gradient, bias=self._maps[name].has_bias):
            found = moments(a, g, max_size=self.max_size)
            if self._per_square != 1.0:
                found = Moments(found.A, found.rows, found.S * self._per_square)
            self._estimates.add(name, found)

    def _sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        found = self.session.trainer.strategy.reduce(x.contiguous(), reduce_op="sum")
        assert isinstance(found, Tensor)
        return found

    # -- gradients

    @override
    def precondition(self, session: Session, gradients: Gradients) -> Gradients | None:
        trainer, estimates = session.trainer, self._estimates
        if self._measuring == trainer.global_step:
            estimates.average(self._maps.values(), trainer.accumulate_grad_batches, trainer.world_size, self._sum)
        self._measuring = None
        if self._inverted is None or trainer.global_step - self._inverted >= self.inverse_every:
            estimates.inverses.clear()  # computed again when needed
            self._inverted = trainer.global_step if estimates.factors else None
        rates = {
            id(p): group.get("lr", 1.0) for o in session.optimizers for group in o.param_groups for p in group["params"]
        }
        done: list[tuple[Map, Tensor, bool]] = []
        square: Tensor | None = None
        for name in estimates.factors:
            found = self._maps[name].gradient(gradients)
            if found is None:
                continue
            m, (gradient, with_bias) = self._maps[name], found
            v = precondition(gradient, *estimates.inverses_of(m, self.damping, with_bias=with_bias))
            done.append((m, v, with_bias))
            part = (v * gradient).sum() * rates[id(m.weight)] ** 2
            square = part if square is None else square + part.to(square.device)
        if square is None:
            return None
        factor = torch.ones_like(square)
        if self.kl_clip is not None and estimates.scale > 0:
            factor = clipping_factor(square / estimates.scale, self.kl_clip)
        self._last |= {"maps": float(len(done)), "clipping": factor}
        found = [m.parts(v * factor.to(v.device), with_bias=with_bias) for m, v, with_bias in done]
        return {name: direction for parts in found for name, direction in parts.items()}

    # -- state and reports

    @override
    def detach(self, session: Session) -> None:
        self._step = self._taps = self._saved = None
        self._maps, self._weights, self._paths = {}, {}, {}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "statistics": self._estimates.statistics}

    @override
    def summary(self) -> str:
        if not self._estimates.statistics:
            return "no statistics were taken"
        return (
            f"took statistics of {len(self._estimates.factors)} layers in {self._estimates.statistics:,} steps; clipping scaled"
            f" the last gradients by {float(self._last.get('clipping', 1.0)):.2g}"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        within = self._measuring is not None and self._session is not None
        windows = self.session.gather(self._estimates.window_state()) if within else []
        return {
            **super().state_dict(),
            **self._estimates.state_dict(),
            "windows": windows,
            "measuring": self._measuring,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._saved = state_dict
