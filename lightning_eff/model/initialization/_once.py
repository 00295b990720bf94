"""The base of techniques that set weights once, before the first step of a fresh fit, from a look at the first batch."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._branches.graph import Graph, TooLarge
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core.batches import num_samples
from lightning_eff._core.session import Session
from lightning_eff._core.steps import in_evaluation, silent, takes_index
from lightning_eff._core.technique import Technique

_TRAINED: WeakSet[LightningModule] = WeakSet()  # begun by an initialization, and trained since


class Initialization(Technique):
    """A technique that sets weights once, before the first step of a fresh fit.

    A subclass sets them in :meth:`initialize`, which follows from the module alone, or from what all ranks know: it is called
    on each. A run that goes on from a checkpoint, and a module that was trained or loaded before, as far as that can be seen,
    are left as they are, unless ``force`` is set.

    Attributes:
        force: also set weights that were loaded or trained before.
    """

    force: bool
    _done = False
    _numbers = 0  # that were set

    @abstractmethod
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        """Set the weights, without a graph, and return how many numbers were set; None for a batch that is passed over.

        Raises:
            ValueError: if nothing is found to set.
        """

    @override
    def check(self, session: Session) -> None:
        source = _pretrained(session.module)
        if source and not self.force:
            raise ValueError(
                f"{type(self).__name__}: {source}; expected random weights, since it would overwrite some of them. Take the"
                " technique out, or give force=True."
            )

    @override
    def attach(self, session: Session) -> None:
        self._done, self._numbers = False, 0
        if session.module in _TRAINED and not self.force:
            self._leave("this module was trained before")

    @override
    def check_checkpoint(self, session: Session, state: dict[str, Any] | None) -> None:
        if state is None and not self.force:
            self._leave("the checkpoint's run did without")

    def _leave(self, why: str) -> None:
        self._done = True
        rank_zero_info(f"{type(self).__name__}: {why}, so weights stay as they are. Give force=True to set them.")

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._done:
            return
        with torch.no_grad():
            numbers = self.initialize(session, batch, batch_idx)
        if numbers is None:  # no weight moves, so the next batch is as good
            return
        self._done, self._numbers = True, numbers
        _TRAINED.add(session.module)
        session.blocks_changed(self)

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"numbers": self._numbers}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "numbers": self._numbers}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done, self._numbers = state_dict["done"], state_dict["numbers"]


def _pretrained(module: nn.Module) -> str:
    """What tells that weights were loaded, in words: what ``from_pretrained`` notes; empty where nothing does."""
    for path, m in module.named_modules():
        source = getattr(getattr(m, "config", None), "_name_or_path", "")
        if isinstance(source, str) and source:
            return f"{path or type(m).__name__} was loaded from {source!r}"
    return ""


def traced(session: Session, batch: Any, batch_idx: int, *, who: str) -> Graph | None:
    """What the loss of the module's own ``training_step`` on ``batch`` is computed from, in one forward pass.

    The whole plain module runs, in evaluation mode, in the run's precision, and leaves no trace. The cost is counted. None
    for a batch that the step passes over, by returning None.

    Raises:
        ValueError: if the step returns no loss with a graph, or one of too many operations.
    """
    module, chain = session.module, session.chain
    with _looked_at(session):
        output = chain.original(batch, *((batch_idx,) if takes_index(chain.original) else ()))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        try:
            graph = Graph(loss, module) if isinstance(loss, Tensor) and loss.grad_fn is not None else None
        except TooLarge as e:
            raise ValueError(
                f"{who}: training_step has {e}. Name what is to be set, where the technique takes names, or take it out."
            ) from e
    chain.cost.forward_passes += 1
    with suppress(ValueError):  # batches of no tensors have no samples to count
        chain.cost.forward_samples += num_samples(batch)
    if output is None:
        return None
    if graph is None:
        raise ValueError(
            f"{who}: training_step returned {type(loss).__name__} on the first batch; expected a loss with a graph, in which"
            " residual branches are looked for."
        )
    return graph


@contextmanager
def _looked_at(session: Session) -> Iterator[None]:
    """All parameters take gradients, and nothing is compiled, kept or drawn."""
    module = session.module
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point() and p.is_leaf]
    with ExitStack() as scope:
        scope.enter_context(torch.enable_grad())
        scope.enter_context(rng.fork())
        scope.enter_context(silent(module))
        scope.enter_context(in_evaluation(module.modules()))
        scope.enter_context(session.trainer.precision_plugin.train_step_context())
        scope.enter_context(uncompiled())
        for p in frozen:
            scope.callback(p.requires_grad_, False)
            p.requires_grad_(True)
        yield
