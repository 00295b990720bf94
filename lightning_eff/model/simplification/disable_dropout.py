"""DisableDropout: train without the module's dropout (Geiping & Goldstein 2022).

The rule is ``p = 0`` in every call that drops activations or attention weights. In pretraining each sample is seen once, so
the network does not overfit, and dropout only reduces the updates that each parameter gets (section 4.3).
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_eff._core import rng
from lightning_eff._core._architecture.updates import without_updates
from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._branches.sharded_step import step_of
from lightning_eff._core._needs.needs import UNTRIED, Need, Part, Reasons
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core.patches import Patches
from lightning_eff._core.search_space import SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import looking_on, silent
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.simplification._dropouts.calls import Dropouts, Dropped
from lightning_eff.model.simplification._dropouts.places import Place, alike, known, tagged, zeroed

WHO = "DisableDropout"


class DisableDropout(Technique):
    """Turn the module's dropout off during training, for pretraining that sees each sample about once.

    It sets the probability of each dropout to zero: dropout modules, attention's ``dropout_p``, recurrent layers, and
    functional dropout whose probability is an attribute of a module or of its config. Attributes are recognised by what
    reaches the call, not by their names. The callback runs the module's own ``training_step`` twice, aside and without a
    trace, on batches 1, 2, 4, 8 and so on, and verifies that nothing drops any more. The fit ends with the module's own
    probabilities, and checkpoints are those of the plain module.

    Use it to pretrain on much data for few epochs. With many epochs on little data dropout is a regularizer, so expect
    overfitting. Dropout then costs some kernels and memory per layer, which this saves. With ``until`` below 1 dropout returns
    for the rest of the run, which Liu et al. call late dropout. Stochastic depth (DropPath) drops whole branches and stays as
    it is. Masks that a module draws itself, or that custom kernels draw, are not seen. It logs ``disabled``, the number of
    attributes that are zero now.

    Args:
        until: the fraction of the run's budget without dropout. 0 is plain training.

    Raises:
        ValueError: for a value out of range. On a batch, before its step, if the module has no dropout, or a call of dropout
            gets its probability from somewhere else than an attribute, such as a literal.

    Example:
        >>> trainer = L.Trainer(max_epochs=1, callbacks=[DisableDropout()])

    References:
        Geiping & Goldstein 2022, "Cramming: Training a Language Model on a Single GPU in One Day", arXiv:2212.14034.
        Liu et al. 2023, "Dropout Reduces Underfitting", arXiv:2303.01500.
    """

    saves = "steps, if the model does not overfit; the masks of dropout"
    paper = "Geiping & Goldstein 2022, arXiv:2212.14034"
    constraints = "dropout whose probability is an attribute; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, lambda profile: None)
    control = Control("the baseline for the same time, with the module's own dropout")
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    needs: ClassVar[Need] = Need.CALLS
    refuses: ClassVar[Reasons] = dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED)
    neutral_at: ClassVar[Mapping[str, Any]] = {"until": 0.0}
    checkpointed = ("_found", "_batches")

    def __init__(self, until: Annotated[float, Fraction()] = 1.0) -> None:
        self.until = float(until)
        self.needs_budget = self.until < 1.0  # pyright: ignore[reportAttributeAccessIssue]

    def _reset(self) -> None:
        self._found: list[list[str]] = []  # the places, as a checkpoint holds them
        self._batches = 0
        self._off: Patches | None = None

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self.until < 1.0 and session.progress.u >= self.until:
            self._restore()
            return
        self._batches += 1
        if self._batches & (self._batches - 1) == 0:  # a power of two, because later batches may take other branches
            found = on_all_ranks(session, lambda: self._look(session, batch, batch_idx))
            if len(found) > len(self._found):
                self._restore()
            self._found = found
        if self._off is None:
            self._off = zeroed(session.module, [Place(*one) for one in self._found])

    def _restore(self) -> None:
        if self._off is not None:
            self._off.restore()
            self._off = None

    def _look(self, session: Session, batch: Any, batch_idx: int) -> list[list[str]]:
        """The places that this batch and earlier ones showed, verified to turn all dropout off.

        Raises:
            ValueError: if dropout is left, or there is none.
        """
        self._restore()
        module = session.module
        with tagged(module) as by_value:
            calls = self._pass(session, batch, batch_idx)
        found = dict.fromkeys(by_value[call.p] for call in calls if call.p in by_value)
        found |= dict.fromkeys(known(module))
        every = dict.fromkeys([*(Place(*one) for one in self._found), *alike(module, found)])
        if not every and not calls:
            raise ValueError(
                f"{WHO}: {type(module).__name__} has no dropout to disable: no dropout module with p > 0, and no call of"
                " dropout on this batch. Remove the callback."
            )
        patches = zeroed(module, every)
        try:
            left = self._pass(session, batch, batch_idx)
        finally:
            patches.restore()
        if left:
            self._refuse(session, left[0])
        if len(every) > len(self._found):
            told = ", ".join(map(str, [*every][:4]))
            rank_zero_info(f"{WHO}: disabled dropout at {len(every)} attributes, such as {told}.")
        return [list(place) for place in every]

    def _refuse(self, session: Session, call: Dropped) -> None:
        paths = {id(m): path for path, m in session.module.named_modules()}
        where = "code outside of modules"
        if call.module is not None:
            where = f"{paths.get(id(call.module)) or 'the module'} ({type(call.module).__name__})"
        raise ValueError(
            f"{WHO}: {where} calls {call.function} with p={call.p:.6g} at {call.line}, and no attribute holds this"
            " probability. Keep it as an attribute, such as self.p = 0.1, and give F.dropout this attribute, or remove the"
            " callback."
        )

    def _pass(self, session: Session, batch: Any, batch_idx: int) -> list[Dropped]:
        """The calls that drop, in a pass of the module's own step in training mode without a trace."""
        module = session.module
        with ExitStack() as scope:
            scope.enter_context(rng.fork())
            scope.enter_context(silent(module))
            scope.enter_context(looking_on())
            scope.enter_context(uncompiled())
            scope.enter_context(session.trainer.precision_plugin.train_step_context())
            if module.automatic_optimization:
                scope.enter_context(torch.no_grad())
            else:
                scope.enter_context(without_updates(module))
            dropouts = scope.enter_context(Dropouts())
            step_of(session, batch, batch_idx)
        session.chain.cost.forward_passes += 1
        return dropouts.calls

    @override
    def detach(self, session: Session) -> None:
        self._restore()

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"disabled": 0 if self._off is None else len(self._found)}

    @override
    def summary(self) -> str:
        return f"trained without dropout at {len(self._found)} attributes"
