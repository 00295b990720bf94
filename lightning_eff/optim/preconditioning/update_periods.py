"""UpdatePeriods: step some parameters only at every n-th optimizer step (Jordan et al. 2024, modded-nanogpt).

At optimizer steps t = n, 2n, ... the gradient of such a parameter is ``(g_{t-n+1} + ... + g_t) / n``, or the sum. At all other
steps it has none, so that the optimizer touches neither its weight nor its state.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.naming import meets, nearest
from lightning_eff._core._branches.probing import probed
from lightning_eff._core.optimizers import evaluates_anew
from lightning_eff._core.search_space import Choice, SearchSpace, needs_sequences
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, Control, Technique
from lightning_eff.optim.preconditioning._arguments import Periods
from lightning_eff.optim.preconditioning._gradients import stepped

WHO = "UpdatePeriods"
KINDS = ("embedding", "head")


class Accumulator:
    """The gradients of one parameter since its last step.

    Args:
        period: n.
        mean: whether the sum is divided by n.
    """

    def __init__(self, period: int, *, mean: bool) -> None:
        self.period, self.mean = period, mean
        self.total: Tensor | None = None

    @torch.no_grad()
    def take(self, gradient: Tensor | None, step: int) -> Tensor | None:
        """Add the gradient of an optimizer step, and return the gradient for the step, or None if it is to be skipped.

        Args:
            gradient: g_t, in the parameter's shape; None counts as zero.
            step: t, from 1 on.
        """
        if gradient is not None:
            fine = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
            self.total = fine.clone() if self.total is None else self.total.to(fine.device).add_(fine)
        if step % self.period or self.total is None:
            return None
        total, self.total = self.total, None
        return total.div_(self.period) if self.mean else total


class UpdatePeriods(Technique):
    """Step parameters such as the embedding and the output layer only at every n-th optimizer step.

    Their gradients are added up between their steps, and the optimizer gets the mean: it sees a larger batch for them. At other
    steps they have no gradient. The optimizer then leaves their weights, moments, step counts and weight decay alone. The
    learning rate is that of the step at which they move.

    Use it for language models with a large vocabulary, where stepping the embedding and the output layer takes much of a step.
    It costs a copy of these gradients. Gradients are taken after micro-batches and ranks have been summed, and after all
    hooks, but before clipping. So clipping sees the mean at a parameter's own steps, and nothing of it at others. With a
    gradient scaler, a step whose gradients are not finite does not count. A checkpoint holds the gradients since the last
    step. Those that are left at the end of a fit are not used. It logs ``updated``, the number of parameters with a period that
    moved in the last step, and ``waiting``, the number that did not.

    Args:
        periods: the period of each kind of parameters, or pattern of names. The kinds are "embedding", the weights of
            ``nn.Embedding``, and "head", the output layer, which is found by looking at a pass. A pattern is a parameter's
            name, the end of one, or a pattern of them: ``{"lm_head.weight": 2, "*.bias": 4}``. If all are 1, it is plain
            training.
        reduce: "mean" or "sum" of the gradients. Steps of Adam hardly depend on it; those of SGD do.

    Raises:
        ValueError: for a value out of range. At setup, if a kind or pattern matches no trained parameter, two give a parameter
            different periods, or an optimizer computes the loss anew in its step, as LBFGS does.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[UpdatePeriods({"embedding": 2, "head": 2})])

    References:
        Jordan et al. 2024, modded-nanogpt, github.com/KellerJordan/modded-nanogpt.
    """

    saves = "the optimizer's time on large tables, at every other step"
    paper = "Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt"
    constraints = "whole parameters on each process; no optimizer that steps within the backward pass"
    search_space = SearchSpace(
        {"embedding": Choice((1, 2)), "head": Choice((2, 4))},
        needs_sequences,
        make=lambda cls, values, profile: cls(dict(values)),
    )
    control = Control("the baseline for the same time with its learning rate decayed to zero")
    needs_automatic_optimization: ClassVar[bool] = True
    needs_optimizer: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(LOCAL_STEPS, "each rank has its own gradients, and only rank 0's would be saved"),
        **dict.fromkeys(
            ("KFAC", "MFAC", "SampledQuasiNewton"),
            "it computes directions from the gradients of all parameters at each step",
        ),
        "OptimizerInBackward": "it uses gradients within the backward pass, before they could be kept",
    }
    checkpointed = ("_steps",)

    def __init__(self, periods: Periods, *, reduce: Literal["mean", "sum"] = "mean") -> None:
        self.periods: Mapping[str, int] = periods
        self.reduce = reduce

    @property
    @override
    def neutral(self) -> bool:
        return all(period == 1 for period in self.periods.values())

    def _reset(self) -> None:
        self._sums: dict[str, Accumulator] = {}
        self._of: dict[int, str] = {}
        self._steps: list[int] = []  # of each optimizer
        self._saved: dict[str, Tensor] = {}  # of a checkpoint, until the optimizers are there
        self._last: dict[str, float | int | Tensor] = {}

    # -- which parameters

    @override
    def on_optimizers(self, session: Session) -> None:
        if any(evaluates_anew(optimizer) for optimizer in session.optimizers):
            raise ValueError(
                f"{WHO}: an optimizer of {type(session.module).__name__} computes the loss anew within its step, as LBFGS does,"
                f" so gradients cannot be kept for later. Use SGD or Adam, or remove {WHO}."
            )
        trained = stepped(session)
        periods: dict[str, tuple[int, str]] = {}
        for pattern, period in self.periods.items():
            for name in self._meant(session.module, pattern, trained):
                before = periods.setdefault(name, (period, pattern))
                if before[0] != period:
                    raise ValueError(
                        f"{WHO}(periods={dict(self.periods)}): {before[1]!r} gives {name} the period {before[0]}, and"
                        f" {pattern!r} {period}. Give it one; a head that is tied to an embedding is the same parameter."
                    )
        self._sums = {
            name: Accumulator(period, mean=self.reduce == "mean") for name, (period, _) in periods.items() if period > 1
        }
        self._check_groups(session)
        self._of = {id(p): name for name, p in session.module.named_parameters() if name in self._sums}
        self._steps = self._steps or [0] * len(session.optimizers)
        for name, total in self._saved.items():
            if name not in self._sums:
                raise ValueError(
                    f"{WHO}(periods={dict(self.periods)}): the checkpoint holds gradients of {name}, which would now be stepped"
                    " each time. Resume with the periods of the run that saved it."
                )
            self._sums[name].total = total.to(trained[name].device, copy=True)
        self._saved = {}
        listed = ", ".join(f"{name} every {one.period}" for name, one in list(self._sums.items())[:5])
        rank_zero_info(f"{WHO}: steps {len(self._sums)} parameters less often: {listed}.")

    def _check_groups(self, session: Session) -> None:
        """Raise ``ValueError`` if torch's fused SGD would begin the momenta of a group at different steps, which it cannot."""
        names = {id(p): name for name, p in session.module.named_parameters()}
        for group in (group for o in session.optimizers if isinstance(o, torch.optim.SGD) for group in o.param_groups):
            own = {self._sums[n].period if (n := names.get(id(p))) in self._sums else 1 for p in group["params"]}
            if group["fused"] and group["momentum"] and len(own) > 1:
                raise ValueError(
                    f"{WHO}(periods={dict(self.periods)}): SGD(momentum={group['momentum']:g}, fused=True) cannot begin"
                    " parameters of a group at different steps. Leave out fused=True, or give parameters with a period their"
                    " own group."
                )

    def _meant(self, module: nn.Module, pattern: str, trained: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the names of the parameters that a kind or a pattern means."""
        if pattern == "embedding":
            tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
            found = [name for name, p in trained.items() if id(p) in tables]
        elif pattern == "head":
            try:
                found = [name for name in probed(module, who=WHO).heads if name in trained]
            except ValueError as e:
                raise ValueError(
                    f"{WHO}(periods={dict(self.periods)}): found no output layer ({str(e).partition('. ')[0]}). Give the name"
                    " of its weight instead of 'head'."
                ) from e
        else:
            found = [name for name in trained if meets(name, pattern)]
        if not found:
            near = ", ".join(nearest(pattern, [*KINDS, *trained])) or ", ".join(list(trained)[:4])
            raise ValueError(
                f"{WHO}(periods={dict(self.periods)}): {pattern!r} matches no trained parameter; expected one of the kinds"
                f" {', '.join(map(repr, KINDS))}, or a pattern of names. Nearest: {near}."
            )
        return found

    # -- every step

    @override
    def attach(self, session: Session) -> None:
        clip = session.module.configure_gradient_clipping

        @functools.wraps(clip)
        def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._hold_back(session, getattr(optimizer, "_optimizer", optimizer))
            clip(optimizer, *args, **kwargs)

        session.patches.set(session.module, "configure_gradient_clipping", configure_gradient_clipping)

    @torch.no_grad()
    def _hold_back(self, session: Session, optimizer: Optimizer) -> None:
        if session.asleep:  # a tuner's trial run
            return
        scaler = getattr(session.trainer.precision_plugin, "scaler", None)
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._of]
        every = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if scaler is not None and not all(bool(g.isfinite().all()) for g in every):
            return  # the scaler skips this step
        by_itself = scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False)  # fused ones do
        factor = scaler.get_scale() if scaler is not None and by_itself else 1.0
        at = session.optimizers.index(optimizer)
        self._steps[at] += 1
        updated = 0
        for p in mine:
            given = p.grad if p.grad is None or factor == 1.0 else p.grad / factor
            gradient = self._sums[self._of[id(p)]].take(given, self._steps[at])
            p.grad = None if gradient is None else (gradient * factor if factor != 1.0 else gradient).to(p.dtype)
            updated += gradient is not None
        if mine:
            self._last = {"updated": updated, "waiting": len(mine) - updated}

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return dict(self._last)

    @override
    def summary(self) -> str:
        return f"stepped {len(self._of)} parameters less often in {sum(self._steps):,} steps"

    @override
    def state_dict(self) -> dict[str, Any]:
        kept = {name: one.total for name, one in self._sums.items() if one.total is not None} or self._saved
        return {**super().state_dict(), "sums": {name: total.detach().cpu().clone() for name, total in kept.items()}}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._saved = dict(state_dict["sums"])
