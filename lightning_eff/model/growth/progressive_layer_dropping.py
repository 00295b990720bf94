"""Progressive layer dropping: pass over more and more blocks, the deeper the likelier (Zhang & He 2020)."""

import functools
import math
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor
from typing_extensions import override

from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core.blocks import BlockStack, refuse_compiled_around
from lightning_eff._core.search_space import SearchSpace, Survey, Uniform, needs_blocks
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.growth._shallower import Shallower


def theta(u: float, *, theta_min: float, gamma: float) -> float:
    """``theta(u) = (1 - theta_min) exp(-gamma u) + theta_min``, with ``u`` in [0, 1]: from 1 down to ``theta_min``."""
    return (1.0 - theta_min) * math.exp(-gamma * u) + theta_min


def keep_probabilities(theta: float, *, num_blocks: int) -> list[float]:
    """``p_i = 1 - (i / L) (1 - theta)`` for the blocks i = 1 .. L."""
    return [1.0 - i / num_blocks * (1.0 - theta) for i in range(1, num_blocks + 1)]


def mean_kept(num_blocks: int, *, theta_min: float, gamma: float) -> float:
    """How many of ``num_blocks`` blocks a step runs, on average over the draws and over ``u`` in [0, 1].

    ``sum_i p_i`` at the mean of theta, as ``p_i`` is linear in it: ``(1 - theta_min) (1 - exp(-gamma)) / gamma +
    theta_min``.
    """
    mean = (1.0 - theta_min) * -math.expm1(-gamma) / gamma + theta_min
    return sum(keep_probabilities(mean, num_blocks=num_blocks))


def draw(keep: list[float], generator: Generator) -> frozenset[int]:
    """The blocks to drop, from 0: each independently, with probability ``1 - p_i``."""
    # one number for each block, whatever its p
    numbers = torch.rand(len(keep), generator=generator).tolist()
    return frozenset(index for index, (number, p) in enumerate(zip(numbers, keep, strict=True)) if number >= p)


def _shallower(technique: "ProgressiveLayerDropping") -> dict[str, Callback]:
    """As many blocks throughout as dropping runs on average, from the schedule and the number of blocks."""
    if technique.neutral:
        return {}
    kept = functools.partial(mean_kept, theta_min=technique.theta_min, gamma=technique.gamma)
    return {"mean depth throughout": Shallower(kept=kept, layers=technique.layers)}


class ProgressiveLayerDropping(Technique):
    """Drop whole blocks at random for an optimizer step: few at first, soon a share that stays.

    Block ``i`` of ``L`` is kept with ``p_i = 1 - (i/L)(1 - theta(u))``, where ``theta`` falls from 1 to ``theta_min``
    over the budget. One draw holds for an optimizer step, all its micro-batches and all ranks. A dropped block does no
    work, forward or backward, and gets no gradient; of a kept one ``h + f(h)`` the branch counts ``1/p_i``, so that
    the expectation is that of the full block. Validation, test and prediction run all blocks, unscaled.

    Where blocks hand tensors on beside the hidden state (T5's position bias), and where nothing outside the blocks is
    trained, the first block is always kept. With :class:`ProgressiveStacking`, ``L`` counts the blocks that run. Under
    DDP, ``find_unused_parameters`` is switched on.

    Logged: ``theta``, and ``layers_dropped``, the number of blocks that the step passed over.

    Args:
        theta_min: the limit of theta, in (0, 1]; the expected share of dropped blocks tends to
            ``(1 - theta_min)(L + 1) / 2L``. 1 is plain training.
        gamma: how fast theta falls, > 0, by the whole budget: at 100 it is down within a few percent of it.
        layers: dotted path of the ``nn.ModuleList`` or ``nn.Sequential`` of blocks; None finds the longest.

    Raises:
        ValueError: if an argument is out of its range; at setup, if blocks are shared or the strategy is DDP with
            ``static_graph=True`` or with reentrant checkpointing.

    Sources:
        Zhang & He 2020, arXiv:2010.13369.
    """

    saves: ClassVar[str] = (
        "compute of the dropped blocks, forward and backward: about a quarter of all at theta_min 0.5"
    )
    paper: ClassVar[str] = "Zhang & He 2020, arXiv:2010.13369"
    constraints: ClassVar[str] = (
        "residual blocks, best pre-norm; DDP without static_graph, and with use_reentrant=False where blocks are"
        " checkpointed"
    )
    survey: ClassVar[Survey | None] = Survey("progressive layer dropping", zhuang="2.1", shen="4.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"theta_min": Uniform(0.4, 0.9), "gamma": Uniform(5.0, 200.0, log=True)}, needs_blocks
    )
    control: ClassVar[Control] = Control(
        "a shallower model with as many FLOPs a step: throughout the first blocks alone, as many as are kept on average",
        _shallower,
    )
    needs_automatic_optimization: ClassVar[bool] = False
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(self, *, theta_min: float = 0.5, gamma: float = 100.0, layers: str | None = None) -> None:
        if not 0.0 < theta_min <= 1.0:
            raise ValueError(
                f"ProgressiveLayerDropping(theta_min={theta_min}): expected a probability in (0, 1], that with which"
                " the last block is kept in the end. 0.5 is the paper's; 1 is plain training."
            )
        if not 0.0 < gamma < math.inf:
            raise ValueError(
                f"ProgressiveLayerDropping(gamma={gamma}): expected a finite number > 0, how fast theta falls over the"
                " budget. 100 is the paper's; to drop nothing set theta_min=1."
            )
        self.theta_min = theta_min
        self.gamma = gamma
        self.layers = layers
        self._reset()

    def _reset(self) -> None:
        self._stack: BlockStack | None = None
        self._learnt: dict[str, Any] | None = None
        self._only_blocks_train = False
        self._theta, self._dropped = 1.0, 0
        self._passes, self._passed_over = 0, 0
        self._where = ""

    @property
    @override
    def neutral(self) -> bool:
        return self.theta_min == 1.0

    @override
    def check(self, session: Session) -> None:
        strategy = session.trainer.strategy
        if isinstance(strategy, DDPStrategy) and strategy._ddp_kwargs.get("static_graph"):
            raise ValueError(
                "ProgressiveLayerDropping: got DDPStrategy(static_graph=True); expected static_graph=False, because"
                " other blocks are dropped at each step. Leave static_graph out, or take the technique out."
            )

    @property
    @override
    def drops_blocks(self) -> bool:
        return not self.neutral

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        strategy = session.trainer.strategy
        if isinstance(strategy, DDPStrategy) and not strategy._ddp_kwargs.get("find_unused_parameters"):
            rank_zero_info(
                "ProgressiveLayerDropping: DDP runs with find_unused_parameters=True, for the dropped blocks."
            )
            session.patches.set(strategy, "_ddp_kwargs", {**strategy._ddp_kwargs, "find_unused_parameters": True})

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        stack = self._stack = session.stack(self.layers, who="ProgressiveLayerDropping")
        refuse_compiled_around(session.module, stack.path, who="ProgressiveLayerDropping")
        if len({id(block) for block in stack.blocks}) < len(stack):
            raise ValueError(
                f"ProgressiveLayerDropping: {stack} holds the same block several times; expected different ones,"
                " because each is kept with a probability of its own. Name another stack by layers=, or take the"
                " technique out."
            )
        if isinstance(session.trainer.strategy, DDPStrategy):
            _refuse_reentrant(stack)
        inside = {id(p) for block in stack.blocks for p in block.parameters()}
        self._only_blocks_train = not any(p.requires_grad and id(p) not in inside for p in session.module.parameters())
        if self._learnt is not None:
            stack.load_state_dict(self._learnt)
        self._where = f"{len(stack)} blocks of {stack.path!r}"
        stack.watch(scales=True)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        assert self._stack is not None, "on_model has found the blocks"
        if batch_idx % session.trainer.accumulate_grad_batches == 0 or not self._stack.keep:
            self._draw(session)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        self._draw(session)

    def _draw(self, session: Session) -> None:
        """Draw for this optimizer step; the same numbers on all ranks, and each time it is asked for in the step."""
        stack = self._stack
        assert stack is not None, "on_model has found the blocks"
        self._theta = theta(session.progress.u, theta_min=self.theta_min, gamma=self.gamma)
        if stack.carries is None:  # no block has run yet, so what a dropped one must return is not known
            stack.keep, stack.dropped = [1.0] * stack.active, frozenset()
        else:
            stack.keep = keep_probabilities(self._theta, num_blocks=stack.active)
            if stack.carries or self._only_blocks_train:
                stack.keep[0] = 1.0
            stack.dropped = draw(stack.keep, session.generator(self.name(), session.trainer.global_step))
        self._dropped = len(stack.dropped)

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        assert self._stack is not None, "on_model has found the blocks"
        self._passes += self._stack.active
        self._passed_over += self._dropped

    @override
    def detach(self, session: Session) -> None:
        if self._stack is not None:
            self._learnt, self._stack = self._stack.state_dict(), None

    @override
    def state_dict(self) -> dict[str, Any]:
        stack = self._learnt if self._stack is None else self._stack.state_dict()
        return {"passes": self._passes, "passed_over": self._passed_over, "stack": stack}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._passes, self._passed_over = state_dict["passes"], state_dict["passed_over"]
        self._learnt = state_dict["stack"]

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"theta": self._theta, "layers_dropped": self._dropped}

    @override
    def summary(self) -> str:
        share = self._passed_over / max(self._passes, 1)
        return f"{share:.1%} of block passes dropped, theta {self._theta:.3f} at the end, of {self._where}"


def _refuse_reentrant(stack: BlockStack) -> None:
    """DDP's search for unused parameters counts those of a reentrant checkpoint twice."""
    if is_checkpointed_reentrantly(m for block in stack.blocks for m in block.modules()):
        raise ValueError(
            f"ProgressiveLayerDropping: {stack} is checkpointed with use_reentrant=True, under DDP; expected"
            " use_reentrant=False, because DDP must look for the parameters of dropped blocks. Enable"
            " checkpointing with gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
