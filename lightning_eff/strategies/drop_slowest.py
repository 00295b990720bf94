"""Non-blocking mini-batches: ranks that come late leave out what is left of their accumulation window (He & Dube 2022)."""

import math
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._needs.needs import Need
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_processes
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step
from lightning_eff._core.technique import Control, Technique
from lightning_eff.strategies._communication.exchange import as_real

_FAR = 1_000_000


def is_late(elapsed: float, survivors: float, *, grace: float) -> bool:
    """``t > (1 + grace) T``: whether a rank has taken longer than those that are through.

    Args:
        elapsed: seconds ``t`` of this rank since its window began.
        survivors: seconds ``T`` that the last of the survivors took for all of it.
        grace: >= 0.
    """
    return elapsed > (1 + grace) * survivors


def scale(done: int, *, window: int, ranks: int) -> float:
    """``W N / sum_r n_r``, which makes of the mean over all ``W N`` micro-batches the mean over those that were done.

    DDP leaves ``(1/N) sum_r (1/W) sum_{k <= n_r} g_rk``, where those left out count as 0.

    Args:
        done: ``sum_r n_r``, >= 1.
        window: ``W``, the micro-batches of a rank.
        ranks: ``N``.
    """
    return window * ranks / done


def nothing(parameters: list[nn.Parameter]) -> Tensor:
    """A loss of 0 whose gradient in each of ``parameters`` is 0: DDP's exchange takes part in its backward pass."""
    return torch.stack([as_real(p).flatten()[:1].sum().float() * 0 for p in parameters]).sum()


class DropSlowest(Technique):
    """Under DDP with gradient accumulation, let late ranks leave out the rest of their micro-batches, and wait for none.

    An optimizer step waits for the slowest rank. As soon as all but ``slowest`` of the ranks are through with the micro-batches
    of a window, those that took more than ``1 + grace`` times as long without being through leave out what they have not begun.
    The gradient is the mean over the micro-batches that were done, of all ranks: one that did one of four counts with that one.
    Every rank does at least its first. All of them get the same gradient by DDP's own exchange, and a window in which nobody is
    late is DDP, bit for bit.

    So what is saved is at most the micro-batches after the first that a slow rank would still do: without
    ``accumulate_grad_batches`` there is nothing to leave out, and it is plain DDP, of which a warning tells. A rank that is
    always slow sees less of its data, and one whose samples are long or hard is left out for that: the mean leans towards
    samples that are quick. Runs in which ranks were late do not repeat bit for bit, because clocks decide. Samples of
    micro-batches that are left out are not trained on in that epoch.

    Ranks tell by the process group's store when they are through, by one word a window; a late one asks it before each
    micro-batch. On a GPU each micro-batch ends with a synchronisation, since the host would be through with all of them before
    the device is; that costs some of the overlap. How many were done is summed once a step, by an exchange of one number.

    In place of a micro-batch that is left out, ``training_step`` returns a loss of 0, which callbacks see; it logs nothing.
    Beside techniques that exchange something within each micro-batch, such as those that choose samples by scores of all
    ranks, nobody is ever late, since these hold the ranks together.

    Logged: ``dropped``, micro-batches of all ranks left out so far; ``microbatches``, those done; ``share``, that of the last
    window that was done.

    Args:
        slowest: how many ranks may be left behind, >= 0. 0 waits for all and is plain DDP.
        grace: how much longer than the others a rank may take, as a share of what they took, >= 0; ``math.inf`` is plain DDP.

    Raises:
        ValueError: for other values; at setup, where not even one rank would be waited for, or with ``static_graph=True`` or
            SyncBatchNorm, whose ranks would wait for each other; where ``training_step`` logs with ``sync_dist=True`` at
            each step, for the same reason.

    Sources:
        He & Dube 2022, arXiv:2211.00889: batches cut into mini-batches, and updates from those that are finished. Ours: that
        it is the others' time which says who is late, and DDP's exchange.
    """

    saves: ClassVar[str] = "waiting for a rank that is late, by the micro-batches that it then leaves out"
    paper: ClassVar[str] = "He & Dube 2022, arXiv:2211.00889"
    constraints: ClassVar[str] = "DDP with accumulate_grad_batches > 1; no exchange between ranks within training_step"
    needs: ClassVar[Need] = Need.DDP
    survey: ClassVar[Survey | None] = Survey("non-blocking minibatches", shen="3.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"grace": Choice((0.05, 0.1, 0.3))}, needs_processes)
    control: ClassVar[Control] = Control("the baseline under DDP for as many seconds: it trades samples for waiting")
    conflicts: ClassVar = {
        "LocalSGD": "its gradients stay on their rank, so there is no step that waits for others",
        "EfficientSAM": "it compares losses of two passes, of which a micro-batch that is left out has none",
    }

    def __init__(self, slowest: int = 1, *, grace: float = 0.1) -> None:
        if isinstance(slowest, bool) or not isinstance(slowest, int) or slowest < 0:
            raise ValueError(
                f"DropSlowest({slowest=}): expected an integer >= 0, how many ranks may be left behind. 0 waits for all."
            )
        if isinstance(grace, bool) or not isinstance(grace, int | float) or not grace >= 0:
            raise ValueError(
                f"DropSlowest({grace=}): expected a number >= 0, how much longer than the others a rank may take, as a share of"
                " what they took. 0.1 is a tenth longer, math.inf waits for all."
            )
        self.slowest, self.grace = slowest, grace
        self._reset()

    def _reset(self) -> None:
        self._window = self._done = 0  # micro-batches of the running window, and those that this rank did
        self._skips = self._announced = self._warned = False
        self._began = 0.0
        self._windows = 0  # of this process, which keys are of
        self._key = ""
        self._totals = {"done": 0, "dropped": 0}
        self._share = 1.0

    @property
    @override
    def neutral(self) -> bool:
        return self.slowest == 0 or self.grace == math.inf

    @override
    def check(self, session: Session) -> None:
        strategy, ranks = session.trainer.strategy, session.trainer.world_size
        if 1 < ranks <= self.slowest:
            raise ValueError(
                f"DropSlowest(slowest={self.slowest}): got {ranks} processes; expected fewer that may be left behind, because"
                f" at least one must be waited for. Use slowest={ranks - 1} or less."
            )
        if is_a(strategy, DDPStrategy) and strategy._ddp_kwargs.get("static_graph"):
            raise ValueError(
                "DropSlowest: got DDP with static_graph=True; expected False, because a micro-batch that is left out has"
                " another graph. Take static_graph out."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        if session.trainer.world_size == 1:
            return
        store, name = _store(), "lightning_eff/drop_slowest"
        self._key = f"{name}/{session.gather(store.add(name, 1) if session.rank == 0 else 0)[0]}"
        log = session.module.log

        def checked(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("sync_dist") and kwargs.get("on_step") is not False and session.trainer.training:
                raise ValueError(
                    f"DropSlowest: {type(session.module).__name__} logs {args[0] if args else kwargs.get('name')!r} with"
                    " sync_dist=True at each step, for which a rank that leaves one out would be waited for; expected"
                    " sync_dist=False, or on_step=False."
                )
            log(*args, **kwargs)

        loop = session.trainer.fit_loop.epoch_loop
        tell = getattr(loop, "_broadcast_sigterm_tensor", None)

        def tell_at_windows() -> None:
            if self._window == 0:
                assert tell is not None
                tell()

        if tell is not None:  # Lightning's exchange before each micro-batch, in which the others would wait
            session.patches.set(loop, "_broadcast_sigterm_tensor", tell_at_windows)
        session.patches.set(session.module, "log", checked)
        session.chain.add(Stage.JOIN, self._outermost, order=-_FAR)
        session.chain.add(Stage.SAVE, self._innermost, order=_FAR)

    @override
    def on_optimizers(self, session: Session) -> None:
        for name, m in session.module.named_modules():
            if isinstance(m, nn.SyncBatchNorm) and session.trainer.world_size > 1:
                raise ValueError(
                    f"DropSlowest: {name} is a SyncBatchNorm, whose ranks wait for each other in each micro-batch; expected"
                    " none. Take sync_batchnorm=True out."
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
        # they are through as one of them wrote it
        return bool(store.check([key])) and is_late(
            time.perf_counter() - self._began, float(store.get(key)), grace=self.grace
        )

    def _innermost(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """The user's own step, or none: other techniques do what they do where it skips a batch, exchanges among it."""
        if self._skips:
            return None
        output = proceed(batch)
        if not self._announced and not self.session.trainer.fit_loop.epoch_loop._should_accumulate():
            self._announced = True
            self._announce(self.session)
        return output

    def _outermost(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        """What Lightning gets of one that is left out: a loss of 0, the last one's with DDP's exchange behind it."""
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
        """This rank is through but for its last backward pass, in which it would wait for the others."""
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
                "DropSlowest: windows have one micro-batch, so that a late rank has nothing to leave out: this is plain DDP."
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
        """Take out what ranks wrote of a window that all of them have left."""
        for part in ("through", "seconds"):
            _store().delete_key(f"{key}/{part}")

    # -- what it tells and keeps

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
        return f"late ranks left out {dropped:,} of {done + dropped:,} micro-batches"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _settle(session: Session) -> None:
    """Wait for the device, whose work the host may be far ahead of."""
    device = session.trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
