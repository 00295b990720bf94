"""Averages of the weights, which validation, checkpoints and the end of the fit see instead of the trained weights."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._optim.tensors import Tensors, pieces
from lightning_eff._core.session import Session
from lightning_eff._core.technique import LOCAL_STEPS, OtherWeights
from lightning_eff.optim.averaging import _buffers
from lightning_eff.optim.averaging._batch_norm import batch_norms, modes, recompute_statistics
from lightning_eff.optim.averaging._shared import share

#: how many training batches BatchNorm's statistics are recomputed from
BNBatches = Annotated[int, Count()] | None


def rivals(*names: str) -> dict[str, str]:
    """The ``conflicts`` of a weight average: other averages, by name, and strategies whose ranks have their own weights."""
    return {
        **dict.fromkeys(names, "both replace the weights that are validated and saved"),
        **dict.fromkeys(
            LOCAL_STEPS, "each rank would average its own weights, and only rank 0's average would be saved"
        ),
    }


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype for sums of many such tensors: float64, or float32 on MPS, which has no float64."""
    return torch.promote_types(tensor.dtype, torch.float32 if tensor.device.type == "mps" else torch.float64)


class AveragedWeights(OtherWeights):
    """A technique that computes other weights from the trained ones, and shows them in validation and checkpoints.

    A subclass yields the other weights in :meth:`average`, stores the tensors to compute them, and calls :meth:`outdate` when
    they change. The module holds the other weights while the trainer validates, and from the end of fit on. Every checkpoint's
    ``state_dict`` contains them once there are any; the trained weights are in the callback's state. Buffers that a
    parametrisation computes from weights (such as spectral normalisation's vectors) are computed at the other weights.
    BatchNorm statistics are recomputed for them if ``recomputes`` is True.

    Attributes:
        bn_batches: the number of training batches, on each rank, from which BatchNorm statistics are recomputed; None
            means a whole epoch.
        recomputes: whether BatchNorm statistics are recomputed.
    """

    _tensors: Tensors | None = None  # of the run's module
    bn_setting: ClassVar[str] = ""  # the argument that makes it recompute statistics, where one does
    needs: ClassVar[Need] = Need.PIECES
    needs_automatic_optimization: ClassVar[bool] = False
    needs_optimizer: ClassVar[bool] = True
    bn_batches: int | None = 100
    recomputes: bool = True

    def _reset(self) -> None:
        self._taken = 0  # number of trained weights in the average
        self._held: dict[str, Tensor] = {}  # the average, if it is a single copy
        self._raw: dict[str, Tensor] | None = None  # set while the module holds the other weights
        self._statistics: dict[str, Tensor] | None = None  # BatchNorm's, at the other weights; None until needed
        self._modes: dict[str, bool] = {}
        self._computed: dict[str, tuple[str, ...]] = {}  # buffers that follow from weights, by who computes them
        self._step = 0
        self._finished = False

    # -- what subclasses say

    @abstractmethod
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        """Yield the other weights with the dotted names of their parameters and buffers, before any is replaced."""

    @property
    def names(self) -> Iterable[str]:
        """The names that :meth:`average` yields; empty while there is nothing to show."""
        return self._held

    def forget(self) -> None:
        """Drop the stored tensors, because another technique changed the network's blocks or overwrote weights."""
        self._held = {}

    def to_devices(self, devices: Mapping[str, torch.device]) -> None:
        """Move the tensors of a checkpoint to the module's devices."""
        self._held = {name: value.to(devices[name]) for name, value in self._held.items()}

    def saved(self) -> dict[str, Any]:
        """Return the stored tensors for a checkpoint."""
        return {"held": dict(self._held)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`saved`."""
        self._held = dict(state["held"])

    def saved_weights(self, state: dict[str, Any]) -> Mapping[str, Tensor]:
        """The weights within the result of :meth:`saved`, by name."""
        return state["held"]

    # -- the run

    def tensors(self, session: Session) -> Tensors:
        """The module's parameters and buffers as they are now."""
        if self._tensors is None or self._tensors.session is not session:
            self._tensors = Tensors(session)
        self._tensors.look()
        return self._tensors

    def pieces(self, session: Session) -> dict[str, Tensor]:
        """This process's part of the module's parameters and buffers, by name. Writing to a piece writes to the parameter.

        Without sharding, a piece is the whole tensor. Under a strategy that shards, it is the local part of the DTensor.
        """
        return pieces(self.tensors(session))

    @override
    def check(self, session: Session) -> None:
        who = type(self).__name__
        for other in session.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            averages = isinstance(other, AveragedWeights) and other is not self and not other.neutral
            if averages or is_a(other, WeightAveraging, StochasticWeightAveraging):
                raise ValueError(
                    f"{who} and {type(other).__name__} cannot train together: both replace the weights that are validated and"
                    " saved. Remove one of them from the trainer's callbacks."
                )

    def check_budget(self, session: Session, setting: str, otherwise: str) -> None:
        """Raise ``ValueError`` if ``setting`` is a fraction of the run and the run has no end."""
        if not session.progress.limits():
            raise ValueError(
                f"{type(self).__name__}({setting}): this is a fraction of the run, and the Trainer has no max_steps, max_epochs"
                " or"
                f" max_time. Set one of them, or {otherwise}."
            )

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if not session.fitting or not state:
            return
        here = session.trainer.world_size if _divided(session) else 1
        there = len(state.get("ranks", [state]))
        if here != there or _divided(session) != ("ranks" in state):
            was, is_here = (f"the pieces of {n} processes" if n > 1 else "whole tensors" for n in (there, here))
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's averages are {was}, and this run's are {is_here}. Resume with the"
                " same"
                " strategy and number of processes, or start a new fit from the checkpoint's weights, which are the average."
            )
        held, saved = self.pieces(session), self.saved_weights(_own(session, state))
        wrong = [name for name, w in saved.items() if name not in held or held[name].shape != w.shape]
        if wrong:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint has averages of {len(wrong)} parameters that"
                f" {type(session.module).__name__} lacks or has in another shape, such as {wrong[0]!r}. Resume with the model"
                " that the checkpoint was saved from."
            )

    @override
    def attach(self, session: Session) -> None:
        strategy = session.trainer.strategy
        original = strategy.lightning_module_state_dict

        def averaged_state_dict() -> dict[str, Any]:
            if self._raw is not None or not self.names:
                return original()
            with self.shown(session):
                return deepcopy(original())  # tied weights stay one tensor

        session.patches.set(strategy, "lightning_module_state_dict", averaged_state_dict)
        if not is_plain(strategy):
            save = strategy.save_checkpoint

            def save_averaged(
                *args: Any, **kwargs: Any
            ) -> None:  # where each rank writes its pieces, it reads them here
                if self._raw is not None or not self.names:
                    return save(*args, **kwargs)
                with self.shown(session):
                    return save(*args, **kwargs)

            session.patches.set(strategy, "save_checkpoint", save_averaged)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        if self.recomputes and batch_norms(session.module) and not session.module.automatic_optimization:
            raise ValueError(
                f"{type(self).__name__}: {type(session.module).__name__} has BatchNorm layers and automatic_optimization=False."
                " Their statistics are recomputed by running training_step, which must not make optimizer steps itself. Use"
                " automatic optimization, or normalization layers without running statistics."
            )
        if self.recomputes and batch_norms(session.module) and not is_plain(session.trainer.strategy):
            settings = f"({self.bn_setting})" if self.bn_setting else ""
            other = "batch_norm='average'" if self.bn_setting else "layers without running statistics"
            raise ValueError(
                f"{type(self).__name__}{settings}: {type(session.trainer.strategy).__name__} shards the module, and BatchNorm"
                f" statistics can only be recomputed on a whole one. Use strategy='ddp' or {other}."
            )
        self._modes = modes(session.module)
        self._computed = _buffers.computed(session.module) if is_plain(session.trainer.strategy) else {}
        self.take_out(session)

    @override
    def on_optimizers(self, session: Session) -> None:
        self.to_devices({name: t.device for name, t in self.pieces(session).items()})

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        self._step = session.trainer.global_step

    def stepped(self, session: Session) -> bool:
        """Whether an optimizer made a step since the batch began; for :meth:`on_batch_end`."""
        return session.trainer.global_step > self._step

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self.forget()
        self._statistics = None

    def outdate(self, session: Session) -> None:
        """Note that the other weights changed."""
        self._taken += 1
        self._statistics = None
        if self.recomputes:
            self._modes = self.tensors(session).modes()

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._tensors = None

    # -- shown and put away

    @override
    def put_in(self, session: Session) -> None:
        """Put the other weights into the module, unless there are none or they are there already."""
        if self._raw is not None or not self.names:
            return
        held = self.pieces(session)
        with torch.inference_mode(False), torch.no_grad():
            raw: dict[str, Tensor] = {}
            for name, value in self.average(session):
                raw[name] = held[name].clone()
                held[name].copy_(value)
            self._raw = raw
            if self._computed:
                trained = _buffers.values_of(session.module, self._computed)
                for name, value in trained.items():
                    raw.setdefault(name, value)
                _buffers.compute(session.module, self._computed)
            if self._statistics is None and self.recomputes:
                self._statistics = recompute_statistics(session, self._modes, self.bn_batches, epoch=self._taken)
            for name, value in (self._statistics or {}).items():
                raw.setdefault(name, held[name].clone())  # an average of statistics may be there already
                held[name].copy_(value)

    @override
    @torch.no_grad()
    def take_out(self, session: Session) -> None:
        """Put the trained weights back if the module holds the others."""
        held = self.pieces(session) if self._raw is not None else {}
        for name, value in (self._raw or {}).items():
            held[name].copy_(value)
        self._raw = None

    # -- Lightning's hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self.neutral:
            # strategies that shard restore as late as this; and a tuner's trial run may have loaded its checkpoint
            self.to_devices({name: t.device for name, t in self.pieces(self.session).items()})
            self.take_out(self.session)

    @override
    def state_dict(self) -> dict[str, Any]:
        raw, names = self._raw, [*self.names]
        if raw is None and names and self._session is not None:
            held = self.pieces(self._session)
            computed = [name for found in self._computed.values() for name in found]
            raw = {name: held[name] for name in (*names, *(self._statistics or ()), *computed)}
        state = {"taken": self._taken, **self.saved(), "raw": raw, "statistics": self._statistics}
        session = self._session or self._past
        if session is None or not _divided(session):
            return state
        return {"ranks": session.replicas.everyone(apply_to_collection(state, Tensor, lambda t: t.detach().cpu()))}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        states = checkpoint.get("callbacks", {})
        if states.get(self.state_key):
            states[self.state_key] = share(states[self.state_key], checkpoint.get("state_dict") or {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.neutral or (self._session is not None and not self._session.fitting):
            return  # the checkpoint's weights are the ones to validate or test
        own = state_dict if self._session is None else _own(self._session, state_dict)
        self._taken = own["taken"]
        self._raw = own["raw"]
        self._statistics = own["statistics"]
        self.restore(own)
        # in a checkpoint, the average may be the same tensor as the weights
        self._held = {name: value.clone() for name, value in self._held.items()}


def _divided(session: Session) -> bool:
    """Whether each rank holds a different part of the weights."""
    return not is_plain(session.trainer.strategy) and session.trainer.world_size > 1


def _own(session: Session, state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of the result of :meth:`AveragedWeights.state_dict`."""
    return state["ranks"][session.replicas.process] if "ranks" in state else state
