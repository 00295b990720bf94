"""Blocks that a step passes over, under DDP: it must look for the parameters that are not used."""

from collections.abc import Sequence

from lightning.pytorch.strategies import DDPStrategy

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.session import Session


def refuse_static_graph(session: Session, *, who: str) -> None:
    """Raise ``ValueError`` where DDP takes it that each step runs the same blocks."""
    strategy = session.trainer.strategy
    if is_a(strategy, DDPStrategy) and strategy._ddp_kwargs.get("static_graph"):
        raise ValueError(
            f"{who}: got DDPStrategy(static_graph=True); expected static_graph=False, because"
            " each step uses other parameters. Leave static_graph out, or take the technique out."
        )


def look_for_unused(session: Session) -> bool:
    """Let DDP look for the parameters that a step does not use, to the end of the run; whether it did not do so."""
    strategy = session.trainer.strategy
    if not is_a(strategy, DDPStrategy) or strategy._ddp_kwargs.get("find_unused_parameters"):
        return False
    session.patches.set(strategy, "_ddp_kwargs", {**strategy._ddp_kwargs, "find_unused_parameters": True})
    return True


def refuse_reentrant(session: Session, stacks: Sequence[BlockStack], *, who: str) -> None:
    """Raise ``ValueError`` where DDP's search for unused parameters would count those of a reentrant checkpoint twice."""
    for stack in stacks if is_a(session.trainer.strategy, DDPStrategy) else ():
        if is_checkpointed_reentrantly(m for block in stack.blocks for m in block.modules()):
            raise ValueError(
                f"{who}: {stack} is checkpointed with use_reentrant=True, under DDP; expected"
                " use_reentrant=False, because DDP must look for the parameters of dropped blocks. Enable"
                " checkpointing with gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
