"""TrainLargeThenCompress: train a large network, stop early, prune it and round its weights (Li et al. 2020)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff._core.search_space import RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.arguments import Dense, Scope, Sparsity, Weights
from lightning_eff.model.sparsity._masks.finding import Weight, chosen
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, rivals
from lightning_eff.model.sparsity._masks.pruning import num_survivors, smallest_masked
from lightning_eff.model.sparsity._random_mask import RandomMask, fixed

WHO = "TrainLargeThenCompress"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def flattened(curve: Sequence[float], *, gain: float, patience: int) -> bool:
    """Whether the last ``patience`` values of a loss curve are no gain on the values before them.

    A value ``m_k`` is a gain if ``m_k < m* - gain |m*|``, and then becomes ``m*``, which starts as ``m_1``. Small gains add
    up, because ``m*`` stays until then. NaN is no gain.

    Args:
        curve: mean losses in order of time.
        gain: the fraction by which the loss must fall, >= 0.
        patience: the number of successive values without a gain, >= 1.
    """
    best, waited = float("inf"), 0
    for m in curve:
        # m_k < m* − γ |m*|
        gained = m < best - gain * abs(best) if best < float("inf") else m < best
        best, waited = (m, 0) if gained else (best, waited + 1)
    return waited >= patience


def survivors(total: int, *, sparsity: float, done: int, rounds: int) -> int:
    """``round(n (1 - s)^(k / r))``, at least 1: the number of ``n`` elements that the ``k``-th of ``r`` prunings keeps."""
    return num_survivors(total, share=sparsity, rounds=done / rounds)


def on_grid(weight: Tensor, bits: int, dims: Sequence[int]) -> Tensor:
    """``w^ = D round(w / D)`` with ``D = max |w| / (2^(b - 1) - 1)``; zeros stay zeros.

    Args:
        weight: of any shape.
        bits: ``b``, >= 2. There are ``2^b - 1`` values for each ``D``.
        dims: the dimensions of the maximum; there is a ``D`` for each index of the others.
    """
    w = weight.float()
    # Δ = max|w| / (2^(b−1) − 1)
    step = w.abs().amax(dim=[*dims], keepdim=True) / (2 ** (bits - 1) - 1)
    step = torch.where(step > 0, step, 1.0)
    # ŵ = Δ round(w / Δ)
    return ((w / step).round() * step).to(weight.dtype)


def compressed(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it."""
    return "the large network is the user's, and compressing it saves no time in a training of equal length"


def _random(technique: "TrainLargeThenCompress") -> Mapping[str, RandomMask]:
    return fixed(technique) if technique.sparsity else {}


class TrainLargeThenCompress(Masked):
    """Train a network that is larger than needed, stop when its loss curve is flat, then prune it and round its weights.

    1. **Train** the dense network. The mean training loss of each ``window`` optimizer steps, over all ranks, is a value of
    its
       curve. This phase ends once ``patience`` successive values have not fallen by the fraction ``gain``, or the fraction
       ``latest`` of the budget is used.
    2. **Prune** ``rounds`` times at equal distances within the fraction ``retrain`` of the budget. Each time, the same
    fraction
       of the remaining weights is masked, the smallest ones, until ``sparsity`` of all is zero. The others continue to train.
    3. **Quantise** the weights: those of each output (or of each matrix of experts in one tensor) are rounded to ``2^bits -
    1``
       evenly spaced values around zero. They stay floating-point numbers under the module's own names, and zeros stay zeros.
       The run then ends, even if some budget is left.

    Checkpoints are the plain module's. The checkpoint saved at the end of the last step is the compressed network. If
    something else ends the run earlier, such as ``EarlyStopping``, the rest of steps 2 and 3 is done at its end without
    retraining, and a log line says so. A checkpoint of a complete run trains no further.

    **When it pays.** A large network reaches a given loss in less time than a small network trained to its end, and tolerates
    more compression. To find out whether this holds for you, compare it with a smaller module for the same time and the same
    size; this callback cannot. Compressing **saves no time** in training, as ``RigL``, and saves memory only if you store the
    zeros and the few values compactly. Learning rates are the module's: a schedule over the whole budget has not decayed if
    the curve ends the run earlier. The paper stops after a number of hours; the rule on the curve is this library's. It finds
    weights as ``RigL`` does. It logs ``sparsity``, ``kept`` (elements), ``loss`` (the curve's last value) and ``stopped``
    (the fraction of the budget at which pruning started; 0 before).

    Args:
        sparsity: the fraction of the masked weights that is zero in the end. 0 prunes nothing.
        bits: the number of bits of each weight in the end. None does not round weights; with ``sparsity=0`` this is plain
            training.
        window: the number of optimizer steps per value of the curve.
        gain: the fraction by which the loss must fall.
        patience: the number of values without a gain that end the dense training. None trains until ``latest``, as modules
            with manual optimization must, because they need not return their loss.
        latest: the fraction of the budget at which the dense training ends at the latest.
        retrain: the fraction of the budget for pruning and retraining, at most ``1 - latest``.
        rounds: the number of times it prunes.
        scope: where the smallest weights are chosen. "global" compares all weights together (of several optimizers, those of
            each), "layer" each weight separately.
        names: the weights to mask, see ``RigL``.
        dense: the weights to leave alone, see ``RigL``.

    Raises:
        ValueError: for a value out of range. At setup, if there is nothing to mask, a name matches nothing, or the module uses
            manual optimization and ``patience`` is not None.

    Example:
        >>> trainer = L.Trainer(max_epochs=50, callbacks=[TrainLargeThenCompress(0.6, bits=8)])

    References: Li et al. 2020, "Train Large, Then Compress: Rethinking Model Size for Efficient Training and Inference of
        Transformers", arXiv:2002.11794.
    """

    saves = "time to a given loss if the larger network pays off; bytes if you store it compactly"
    paper = "Li et al. 2020, arXiv:2002.11794"
    constraints = "you build the larger module"
    search_space = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, compressed)
    control = Control(
        "a fixed random mask of the same size; and the baseline, a module that is smaller from the start", _random
    )
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        sparsity: Sparsity = 0.6,
        *,
        bits: Annotated[int | None, Count(at_least=2, at_most=16)] = 8,
        window: Annotated[int, Count()] = 100,
        gain: Annotated[float, Fraction(below=1)] = 0.01,
        patience: Annotated[int | None, Count()] = 3,
        latest: Annotated[float, Fraction(above=0, below=1)] = 0.75,
        retrain: Annotated[float, Fraction(above=0)] = 0.25,
        rounds: Annotated[int, Count()] = 3,
        scope: Scope = "global",
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        if retrain > 1.0 - latest + 1e-9:
            raise ValueError(
                f"{WHO}({latest=}, {retrain=}): together they exceed the budget. Give retrain={1.0 - latest:.3g} or less, or a"
                " smaller latest."
            )
        self.bits, self.window, self.gain, self.patience = bits, window, gain, patience
        self.latest, self.retrain, self.rounds = latest, retrain, rounds
        self.scope: Scope = scope
        self._take(sparsity=sparsity, names=names, dense=dense)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._found: list[str] = []  # the weights of a checkpoint
        self._curve: list[float] = []
        self._sum: Tensor | float = 0.0  # of losses since the last value of the curve
        self._losses = self._steps = 0  # the number of these losses, and of their steps
        self._stop: float | None = None  # the fraction of the budget at which the dense training ended
        self._pruned = 0  # rounds so far
        self._rounded = self._complete = False
        self._seen = 0  # the trainer's step count at the start of the batch

    @property
    @override
    def neutral(self) -> bool:
        return (self.sparsity == 0.0 and self.bits is None) or self.names == []

    @override
    def asked(self) -> dict[str, Any]:
        own = {"bits": self.bits, "latest": self.latest, "retrain": self.retrain, "rounds": self.rounds}
        curve = {"window": self.window, "gain": self.gain, "patience": self.patience}
        return {"sparsity": self.sparsity, "scope": self.scope, **own, **curve}

    @override
    def find(self, module: nn.Module) -> dict[str, Weight]:
        """The weights to mask; after a resume the checkpoint's, some of which may be frozen by now."""
        then = self._found
        found = chosen(module, self.names, self.dense, self.block, who=WHO, masked=then)
        return {name: weight for name, weight in found.items() if name in then} if then else found

    @override
    def check(self, session: Session) -> None:
        module = session.module
        if self.patience is not None and not module.automatic_optimization:
            raise ValueError(
                f"{WHO}(patience={self.patience}): {type(module).__name__} has automatic_optimization=False, so its"
                " training_step need not return the loss whose curve ends the dense training. Set patience=None, and `latest`"
                " to the fraction of the budget at which it ends."
            )

    # -- the dense training, and its curve

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        if self.patience is not None:
            session.chain.add(Stage.JOIN, self._link, order=-1)  # outside all others, to see the final loss

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        output = proceed(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self._stop is None and isinstance(loss, Tensor):
            self._sum = self._sum + loss.detach().float()
            self._losses += 1
        return output

    def _flat(self, session: Session) -> bool:
        """Whether the step that has just ended is the last one of the dense training."""
        self._steps += 1
        if self.patience is None or self._steps < self.window:
            return False
        ranks = session.gather((float(self._sum), self._losses))
        count = sum(losses for _, losses in ranks)
        if count:
            self._curve.append(sum(total for total, _ in ranks) / count)
        self._sum, self._losses, self._steps = 0.0, 0, 0
        return flattened(self._curve, gain=self.gain, patience=self.patience)

    # -- pruning

    @property
    def _last(self) -> float:
        """The fraction of the budget at which the run is complete."""
        return 1.0 if self._stop is None else min(self._stop + self.retrain, 1.0)

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        return None  # the first masks come when the dense training ends

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._seen = session.trainer.global_step
        u = session.progress.u
        if self._stop is None and u >= self.latest:
            self._stop = u
        if self._stop is not None and self.sparsity:
            length = self._last - self._stop
            due = 1 + int((u - self._stop) / length * self.rounds + 1e-9) if length > 0 else self.rounds
            self._prune(session, min(due, self.rounds))

    def _prune(self, session: Session, due: int) -> None:
        """Prune until ``due`` rounds are done."""
        if due <= self._pruned:
            return
        self._pruned = due
        if not self.masks:
            self.masks = {
                name: torch.ones_like(self.parameter(name), dtype=torch.bool, requires_grad=False)
                for name in self.weights
            }
        before = self.masks
        self.put(
            smallest_masked(
                self,
                session,
                self.scope,
                lambda n: survivors(n, sparsity=self.sparsity, done=due, rounds=self.rounds),
            )
        )
        self.clear_state(session, {name: before[name] ^ mask for name, mask in self.masks.items()})
        self.tell_of_empty()
        session.blocks_changed(self)

    # -- the end

    @override
    def after_step(self, session: Session, optimizer: Optimizer) -> None:
        self._rounded = False

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if session.trainer.global_step == self._seen:
            return
        if self._stop is None:
            if self._flat(session):
                self._stop = session.progress.after(batch_idx)
            return
        if session.progress.after(batch_idx) >= self._last - 1e-9:
            self._end(session)
            session.trainer.should_stop |= self._last < 1.0 - 1e-9

    @torch.no_grad()
    def _end(self, session: Session) -> None:
        """Do the remaining rounds of pruning, and round the weights."""
        if self.sparsity and self._pruned < self.rounds:
            rank_zero_info(
                f"{WHO}: the run ended after {self._pruned} of {self.rounds} prunings, so the others follow now without"
                " retraining. Give it a longer run, or remove the callback that ends it."
            )
            self._prune(session, self.rounds)
        self._complete = True
        if self.bits is None or self._rounded:
            return
        self._rounded = True
        for name, dims in self._rows(session.module).items():
            p = self.parameter(name)
            p.copy_(on_grid(p, self.bits, dims))
        session.blocks_changed(self)

    def _rows(self, module: nn.Module) -> dict[str, list[int]]:
        """The dimensions of each weight except its output dimension."""
        columns = {
            id(m._parameters.get("weight")) for m in module.modules() if is_conv1d(m) or isinstance(m, _TRANSPOSED)
        }
        found: dict[str, list[int]] = {}
        for name, weight in self.weights.items():
            p = self.parameter(name)
            out = 0 if weight.stack or id(p) not in columns else 1
            found[name] = [dim for dim in range(p.ndim) if dim != out]
        return found

    def _close(self) -> None:
        session = self._session
        if session is not None and session.fitting and self in session.working and not self._complete:
            self._end(session)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._complete and self._session is not None and self._session.fitting:
            rank_zero_info(f"{WHO}: the checkpoint is from a complete run, so nothing is trained.")
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._close()

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "loss": self._curve[-1] if self._curve else 0.0, "stopped": self._stop or 0.0}

    @override
    def summary(self) -> str:
        when = "not pruned yet" if self._stop is None else f"pruned from {self._stop:.0%} of the budget on"
        bits = f", and weights have {self.bits} bits" if self._rounded else ""
        return f"{when}: {super().summary()}{bits}"

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = (float(self._sum), self._losses)
        return {
            **super().state_dict(),
            "weights": [*self.weights] or self._found,
            "curve": list(self._curve),
            "sums": [own] if session is None else session.gather(own),
            "steps": self._steps,
            "stop": self._stop,
            "pruned": self._pruned,
            "complete": [self._rounded, self._complete],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._found = list(state_dict["weights"])
        self._curve, self._steps, self._stop = list(state_dict["curve"]), state_dict["steps"], state_dict["stop"]
        self._pruned, (self._rounded, self._complete) = state_dict["pruned"], state_dict["complete"]
        sums = state_dict["sums"]
        rank = 0 if self._session is None else self._session.rank
        if rank < len(sums):  # with another number of ranks, the window continues with some of its losses
            self._sum, self._losses = sums[rank]
