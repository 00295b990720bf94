"""Non-blocking mini-batches: late ranks skip the rest of their accumulation window (He & Dube 2022)."""

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Either, Number, OneOf
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.search_space import Choice, SearchSpace, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import LOCAL_STEPS, Control, Technique
from lightning_eff.strategies._communication.exchange import as_real

_FAR = 1_000_000
_HINT = "0.1 allows a tenth longer, math.inf waits for all ranks."


def is_late(elapsed: float, survivors: float, *, grace: float) -> bool:
    """Whether ``t > (1 + grace) T``, that is, a rank takes longer than the ranks that have finished.

    Args:
        elapsed: the seconds ``t`` since this rank began its window.
        survivors: the seconds ``T`` that the last of the finished ranks took for its whole window.
        grace: >= 0.
    """
    return elapsed > (1 + grace) * survivors


def scale(done: int, *, window: int, ranks: int) -> float:
    """Return ``W N / sum_r n_r``, which turns the mean over all ``W N`` micro-batches into the mean over those computed.

    DDP computes ``(1/N) sum_r (1/W) sum_{k <= n_r} g_rk``, in which skipped micro-batches count as 0.

    Args:
        done: ``sum_r n_r``, >= 1.
        window: ``W``, the number of micro-batches per rank.
        ranks: ``N``, the number of ranks.
    """
    return window * ranks / done


def nothing(parameters: list[nn.Parameter]) -> Tensor:
    """Return a loss of 0 with zero gradients for all ``parameters``, so that DDP's exchange runs in its backward pass."""
    return torch.stack([as_real(p).flatten()[:1].sum().float() * 0 for p in parameters]).sum()


class DropSlowest(Technique):
    """Let late DDP ranks skip the rest of their micro-batches in gradient accumulation, instead of waiting for them.

    In plain DDP an optimizer step waits for the slowest rank. Here, once all ranks but ``slowest`` have finished the
    micro-batches of an accumulation window, a rank that has taken more than ``1 + grace`` times as long skips the
    micro-batches it has not begun. Every rank computes at least its first. The gradient is the mean over the micro-batches
    that were computed on all ranks, exchanged by DDP. A window in which no rank is late is DDP, bit for bit.

    Use it where ranks are slow now and then, with ``accumulate_grad_batches`` of 2 or more. At most the micro-batches
    after a slow rank's first are saved. Without accumulation there is nothing to skip, and a warning says so. A rank that
    is always slow sees less of its data, and long or hard samples are skipped more often, so the gradient leans towards
    samples that are quick to compute. Skipped samples are not trained on in that epoch. Runs with late ranks are not
    repeatable bit for bit, because they depend on clocks.

    Each window costs one message per rank to the process group's store, one query before each micro-batch of a late rank,
    and one exchange of a number per step. On a GPU each micro-batch ends with a synchronization, which costs some overlap.

    For a skipped micro-batch, ``training_step`` returns a loss of 0, which callbacks see, and logs nothing. Techniques that
    exchange data within each micro-batch, such as those that score the samples of all ranks, keep the ranks together, so no
    rank is late beside them. The callback logs ``dropped`` (micro-batches skipped so far on all ranks), ``microbatches``
    (those computed) and ``share`` (the fraction of the last window that was computed).

    Args:
        slowest: the number of ranks that need not be waited for. 0 waits for all ranks and is plain DDP.
        grace: the extra time a rank may take, as a fraction of the time of the finished ranks. ``math.inf`` is plain DDP.

    Raises:
        ValueError: for a value out of range. At setup, if no rank would be waited for, with ``static_graph=True``, or with
            SyncBatchNorm, whose ranks wait for each other. In training, if ``training_step`` logs with ``sync_dist=True``
            at each step, for the same reason.

    Example:
        >>> callbacks = [DropSlowest(slowest=1, grace=0.1)]
        >>> trainer = L.Trainer(max_epochs=10, accumulate_grad_batches=4, callbacks=callbacks)

    References:
        He & Dube 2022, arXiv:2211.00889: updates from the mini-batches that are finished. This implementation differs in
        that the time of the finished ranks decides which rank is late, and in that DDP does the exchange.
    """

    saves: ClassVar[str] = "waiting for late ranks, which skip micro-batches instead"
    paper: ClassVar[str] = "He & Dube 2022, arXiv:2211.00889"
    constraints: ClassVar[str] = "DDP with accumulate_grad_batches > 1; no exchange between ranks within training_step"
    needs: ClassVar[Need] = Need.DDP
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"grace": Choice((0.05, 0.1, 0.3))}, needs_processes)
    control: ClassVar[Control] = Control(
        "the baseline under DDP for the same time: the technique trades samples for waiting time"
    )
    conflicts: ClassVar = {
        **dict.fromkeys(LOCAL_STEPS, "its gradients stay on their rank, so no step waits for other ranks"),
        "EfficientSAM": "it compares the losses of two passes, and a skipped micro-batch has none",
    }
    neutral_at: ClassVar[Mapping[str, Any]] = {"slowest": 0, "grace": math.inf}

    def __init__(
        self,
        slowest: Annotated[int, Count(at_least=0)] = 1,
        *,
        grace: Annotated[float, Either(Number(at_least=0), OneOf(math.inf), hint=_HINT)] = 0.1,
    ) -> None:
        self.slowest, self.grace = slowest, grace

    def _reset(self) -> None:
        self._window = self._done = 0  # micro-batches of the running window, and those that this rank did
        self._skips = self._announced = self._warned = False
        self._began = 0.0
        self._windows = 0  # windows of this process, for keys in the store
        self._key = ""
        self._totals = {"done": 0, "dropped": 0}
        self._share = 1.0

    @override
    def check(self, session: Session) -> None:
        strategy, ranks = session.trainer.strategy, session.trainer.world_size
        if 1 < ranks <= self.slowest:
            raise ValueError(
                f"DropSlowest(slowest={self.slowest}): the run has {ranks} processes, and at least one of them must be waited"
                f" for. Use slowest={ranks - 1} or less."
            )
        if is_a(strategy, DDPStrategy) and strategy._ddp_kwargs.get("static_graph"):
            raise ValueError(
                "DropSlowest: DDP has static_graph=True, but a skipped micro-batch has another graph. Remove static_graph=True"
                " from the strategy."
            )

    @override
    def attach(self, session: Session) -> None:
        if session.trainer.world_size == 1:
            return
        store, name = _store(), "lightning_eff/drop_slowest"
        self._key = f"{name}/{session.gather(store.add(name, 1) if session.rank == 0 else 0)[0]}"
        log = session.module.log

        def checked(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("sync_dist") and kwargs.get("on_step") is not False and session.trainer.training:
                raise ValueError(
                    f"DropSlowest: {type(session.module).__name__} logs {args[0] if args else kwargs.get('name')!r} with"
                    " sync_dist=True at each step, so all ranks would wait for one that skips a micro-batch. Set"
                    " sync_dist=False, or on_step=False."
                )
            log(*args, **kwargs)

        loop = session.trainer.fit_loop.epoch_loop
        tell = getattr(loop, "_broadcast_sigterm_tensor", None)

        def tell_at_windows() -> None:
            if self._window == 0:
                assert tell is not None
                tell()

        if tell is not None:  # Lightning's exchange before each micro-batch, in which other ranks would wait
            session.patches.set(loop, "_broadcast_sigterm_tensor", tell_at_windows)
        session.patches.set(session.module, "log", checked)
        session.chain.add(Stage.JOIN, self._outermost, order=-_FAR)
        session.chain.add(Stage.SAVE, self._innermost, order=_FAR)

    @override
    def on_optimizers(self, session: Session) -> None:
        for name, m in session.module.named_modules():
            if isinstance(m, nn.SyncBatchNorm) and session.trainer.world_size > 1:
                raise ValueError(
                    f"DropSlowest: {name} is a SyncBatchNorm, which makes ranks wait for each other in each micro-batch. Remove"
                    " sync_batchnorm=True from the Trainer."
                )

    # -- a window

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._window == 0:
            self._began, self._announced = time.perf_counter(), False
            self._skips = False
            self._windows += 1
        elif not self._skips and session.trainer.world_size > 1:
            self._skips = self._is_late(session)
        self._window += 1
        self._done += not self._skips

    def _is_late(self, session: Session) -> bool:
        _settle(session)
        store, key = _store(), f"{self._key}/{self._windows}/seconds"
        # the key exists once enough ranks have finished
        return bool(store.check([key])) and is_late(
            time.perf_counter() - self._began, float(store.get(key)), grace=self.grace
        )

    def _innermost(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Run the user's own step, or skip it: other techniques then act as for a skipped batch, exchanges included."""
        if self._skips:
            return None
        output = proceed(batch)
        if not self._announced and not self.session.trainer.fit_loop.epoch_loop._should_accumulate():
            self._announced = True
            self._announce(self.session)
        return output

    def _outermost(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """Return a loss of 0 for a skipped micro-batch; that of the window's last one triggers DDP's exchange."""
        output = proceed(batch)
        if output is not None or not self._skips:
            return output
        trainer, module = self.session.trainer, self.session.module
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return torch.zeros((), device=module.device, requires_grad=True)
        strategy = trainer.strategy
        unused = is_a(strategy, DDPStrategy) and bool(strategy._ddp_kwargs.get("find_unused_parameters"))
        return nothing([p for p in module.parameters() if p.requires_grad and (p.grad is not None or not unused)])

    def _announce(self, session: Session) -> None:
        """Announce that this rank has only its last backward pass left, in which it would wait for the other ranks."""
        if self._window < 2:
            self._warn()
            return
        _settle(session)
        store, key = _store(), f"{self._key}/{self._windows}"
        elapsed = time.perf_counter() - self._began
        if store.add(f"{key}/through", 1) == session.trainer.world_size - self.slowest:
            store.set(f"{key}/seconds", repr(elapsed))

    def _warn(self) -> None:
        if not self._warned:
            rank_zero_warn(
                "DropSlowest: each optimizer step has one micro-batch, so a late rank has none to skip and this is plain DDP."
                " Set accumulate_grad_batches to 2 or more."
            )
        self._warned = True

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self.neutral or self._session is None or self._window == 0:
            return
        ranks, window, total = trainer.world_size, self._window, self._done
        if ranks > 1 and window > 1:
            counted = torch.tensor([float(self._done)], device=trainer.strategy.root_device)
            dist.all_reduce(counted)
            total = int(counted)
            if self.session.rank == 0 and self._windows > 1:
                self._forget(f"{self._key}/{self._windows - 1}")
        elif ranks > 1:
            total = ranks
        if total < window * ranks:
            factor = scale(total, window=window, ranks=ranks)
            for p in pl_module.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        self._totals["done"] += total
        self._totals["dropped"] += window * ranks - total
        self._share = total / (window * ranks)
        self._window = self._done = 0

    def _forget(self, key: str) -> None:
        """Delete the entries of a window that all ranks have left."""
        for part in ("through", "seconds"):
            _store().delete_key(f"{key}/{part}")

    # -- reports and state

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = (self._window, self._done, self._skips)
        return {
            "totals": dict(self._totals),
            "share": self._share,
            "windows": [own] if session is None or not session.fitting else session.gather(own),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals, self._share = dict(state_dict["totals"]), state_dict["share"]
        windows = state_dict["windows"]
        if self._session is not None and len(windows) == self._session.trainer.world_size:
            self._window, self._done, self._skips = windows[self._session.rank]
            self._began = time.perf_counter()

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"dropped": self._totals["dropped"], "microbatches": self._totals["done"], "share": self._share}

    @override
    def summary(self) -> str:
        done, dropped = self._totals["done"], self._totals["dropped"]
        return f"late ranks skipped {dropped:,} of {done + dropped:,} micro-batches"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _settle(session: Session) -> None:
    """Synchronize the device, because the host may be far ahead of it."""
    device = session.trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
