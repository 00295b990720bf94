"""Train a large network, stop early by its curve, prune it by magnitude, round what is left (Li et al. 2020)."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._architecture.linear_maps import is_conv1d
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control
from lightning_eff.model.sparsity._masks.finding import Weight, chosen
from lightning_eff.model.sparsity._masks.masked import RIVALS_IN_STATE, Masked, rivals
from lightning_eff.model.sparsity._masks.pruning import Scope, check_scope, smallest_masked
from lightning_eff.model.sparsity._random_mask import RandomMask, fixed

WHO = "TrainLargeThenCompress"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def flattened(curve: Sequence[float], *, gain: float, patience: int) -> bool:
    """Whether the last ``patience`` numbers of a curve of losses are no gain on what was reached before them.

    A number ``m_k`` is a gain where ``m_k < m* - gain |m*|``, and is then ``m*``, which at first is ``m_1``. Small gains add
    up, since ``m*`` waits for them. What is not a number is none.

    Args:
        curve: means of losses, in the order of time.
        gain: the share of the loss by which it must fall, >= 0.
        patience: how many in succession must be no gain, >= 1.
    """
    best, waited = float("inf"), 0
    for m in curve:
        # m_k < m* − γ |m*|
        gained = m < best - gain * abs(best) if best < float("inf") else m < best
        best, waited = (m, 0) if gained else (best, waited + 1)
    return waited >= patience


def survivors(total: int, *, sparsity: float, done: int, rounds: int) -> int:
    """``round(n (1 - s)^(k / r))``: how many of ``n`` numbers the ``k``-th of ``r`` prunings keeps, at least 1."""
    return max(round(total * (1.0 - sparsity) ** (done / rounds)), 1)


def on_grid(weight: Tensor, bits: int, dims: Sequence[int]) -> Tensor:
    """``w^ = D round(w / D)`` with ``D = max |w| / (2^(b - 1) - 1)``; zeros stay zeros.

    Args:
        weight: of any shape.
        bits: ``b``, >= 2. There are ``2^b - 1`` values of each ``D``.
        dims: those over which the maximum is taken; there is a ``D`` for each place in the others.
    """
    w = weight.float()
    # Δ = max|w| / (2^(b−1) − 1)
    step = w.abs().amax(dim=[*dims], keepdim=True) / (2 ** (bits - 1) - 1)
    step = torch.where(step > 0, step, 1.0)
    # ŵ = Δ round(w / Δ)
    return ((w / step).round() * step).to(weight.dtype)


def compressed(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it, in words."""
    return "the large network is the user's, and compressing it saves no second of a training of equal length"


def _random(technique: "TrainLargeThenCompress") -> Mapping[str, RandomMask]:
    return fixed(technique) if technique.sparsity else {}


class TrainLargeThenCompress(Masked):
    """Train a network that is larger than what shall be used, stop when its curve is flat, then prune it and round weights.

    1. **Train** the dense network. Each ``window`` optimizer steps the mean of the training loss over steps and ranks is a
       number of its curve. Once ``patience`` of them in succession have not fallen by the share ``gain``, or the share
       ``latest`` of the budget is used, this ends.
    2. **Prune**, ``rounds`` times at equal distances within the share ``retrain`` of the budget: the smallest weights that are
       left, the same share of them each time, until ``sparsity`` of all is zero. Masks hold while the others train on.
    3. **Quantise** the weights: those of each output are set to ``2^bits - 1`` evenly spaced values about zero (of each matrix,
       where experts' matrices lie in one tensor). They stay plain floating-point numbers under the module's own names, and
       zeros stay zeros. Then the run ends, be the budget used or not.

    Checkpoints are the plain module's. The one that is saved as the last step ends is the compressed network. Where something
    else ends the run earlier, as an ``EarlyStopping`` does, what is left of steps 2 and 3 is done at its end, without
    retraining, and said. A checkpoint of a run that is complete resumes to nothing.

    **When it pays.** A large network reaches a given loss in less time than a small one that is trained to its end, and bears
    more compression. Whether that is so is the comparison with a smaller module, for as many seconds, of as many bytes; this
    callback cannot make it. Compressing **saves no time** in training, as ``RigL``, and less memory only for who stores the
    zeros and the few values as such. Rates are the module's: a schedule over the whole budget has not decayed where the
    curve ends the run earlier. The paper stops by a budget of hours; the rule by the curve is this library's.

    The weights are found as by ``RigL``.

    Logged: ``sparsity``, ``kept`` (numbers), ``loss`` (the curve's last number), ``stopped`` (the share of the budget at which
    pruning began; 0 before).

    Args:
        sparsity: the share of the masked weights that is zero in the end, in [0, 1). 0 prunes nothing.
        bits: of each weight in the end, from 2 to 16; None leaves weights as they are, which with ``sparsity=0`` is plain
            training.
        window: optimizer steps of each of the curve's numbers, >= 1.
        gain: the share by which the loss must fall, in [0, 1).
        patience: how many numbers without a gain end the training, >= 1; None leaves that to ``latest``.
        latest: the share of the budget at which it ends at the latest, in (0, 1).
        retrain: the share of the budget for pruning and training on, in (0, 1 - latest].
        rounds: how often is pruned, >= 1.
        scope: "global", the smallest of all weights together; "layer", of each by itself.
        names: see ``RigL``.
        dense: see ``RigL``.

    Raises:
        ValueError: for other values; at setup, if there is nothing to mask, or a name means nothing.

    Sources:
        Li et al. 2020, arXiv:2002.11794.
    """

    saves: ClassVar[str] = "seconds to a given loss where the larger network pays; and bytes, for who stores them"
    paper: ClassVar[str] = "Li et al. 2020, arXiv:2002.11794"
    constraints: ClassVar[str] = "the larger module is the user's to build"
    survey: ClassVar[Survey | None] = Survey("train large, then compress", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Uniform(0.5, 0.9)}, compressed)
    control: ClassVar[Control] = Control(
        "a random mask of the same size from the first step on; and the baseline, a module that is smaller from the start",
        _random,
    )
    conflicts: ClassVar[Mapping[str, str]] = {**rivals(WHO), **RIVALS_IN_STATE}
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        sparsity: float = 0.6,
        *,
        bits: int | None = 8,
        window: int = 100,
        gain: float = 0.01,
        patience: int | None = 3,
        latest: float = 0.75,
        retrain: float = 0.25,
        rounds: int = 3,
        scope: Scope = "global",
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        for name, value in (("window", window), ("rounds", rounds), ("patience", patience)):
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not whole and not (name == "patience" and value is None):
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 1.")
        if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16):
            raise ValueError(
                f"{WHO}({bits=}): expected bits of a weight from 2 to 16, or None to leave weights as they are."
            )
        if not 0.0 <= gain < 1.0:
            raise ValueError(f"{WHO}({gain=}): expected the share by which the loss must fall, in [0, 1).")
        if not 0.0 < latest < 1.0:
            raise ValueError(f"{WHO}({latest=}): expected a share of the budget, in (0, 1).")
        if not 0.0 < retrain <= 1.0 - latest + 1e-9:
            raise ValueError(
                f"{WHO}({latest=}, {retrain=}): expected retrain above 0 and at most {1.0 - latest:.3g}, what latest leaves of"
                " the budget."
            )
        self.bits, self.window, self.gain, self.patience = bits, window, gain, patience
        self.latest, self.retrain, self.rounds = latest, retrain, rounds
        self.scope: Scope = check_scope(scope, who=WHO)
        self._take(sparsity=sparsity, names=names, dense=dense)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._found: list[str] = []  # the weights of a checkpoint
        self._curve: list[float] = []
        self._sum: Tensor | float = 0.0  # of losses since the curve's last number
        self._losses = self._steps = 0  # and how many they are, and of how many steps
        self._stop: float | None = None  # the share of the budget at which the dense training ended
        self._pruned = 0  # rounds so far
        self._rounded = self._complete = False
        self._seen = 0  # the trainer's count of steps when the batch began

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
        """What is masked: on resume what the checkpoint says, of which some may be frozen by now."""
        then = self._found
        found = chosen(module, self.names, self.dense, self.block, who=WHO, masked=then)
        return {name: weight for name, weight in found.items() if name in then} if then else found

    # -- the dense training, and its curve

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        if self.patience is not None:
            session.chain.add(Stage.JOIN, self._link, order=-1)  # what the step returns in the end

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        output = proceed(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self._stop is None and isinstance(loss, Tensor):
            self._sum = self._sum + loss.detach().float()
            self._losses += 1
        return output

    def _flat(self, session: Session) -> bool:
        """A step of the dense training has ended: whether it is the last."""
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
        """The share of the budget at which the run is complete."""
        return 1.0 if self._stop is None else min(self._stop + self.retrain, 1.0)

    @override
    def begin(self, session: Session, batch: Any, batch_idx: int) -> dict[str, Tensor] | None:
        return None  # masks come when the dense training ends

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
        """Let ``due`` rounds of pruning be done."""
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
    def after_step(self, session: Session) -> None:
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
        """What remains to be done of pruning, and weights set to few values."""
        if self.sparsity and self._pruned < self.rounds:
            rank_zero_info(
                f"{WHO}: the run ended after {self._pruned} of {self.rounds} prunings; the others are made now, without"
                " training after them. Give it a longer run, or take out what ends it."
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
        """Of each weight, the dimensions that are not its outputs'."""
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
            rank_zero_info(f"{WHO}: the checkpoint is of a run that is complete; nothing is trained.")
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._close()

    # -- what is told and kept

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "loss": self._curve[-1] if self._curve else 0.0, "stopped": self._stop or 0.0}

    @override
    def summary(self) -> str:
        when = "no pruning yet" if self._stop is None else f"pruned from {self._stop:.0%} of the budget on"
        bits = f", and weights are of {self.bits} bits" if self._rounded else ""
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
        if rank < len(sums):  # of another number of ranks, the window goes on with some of its losses
            self._sum, self._losses = sums[rank]
