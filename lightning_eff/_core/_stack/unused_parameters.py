"""Blocks that a step passes over, under DDP: it must look for the parameters that are not used."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.session import Session


def _name(strategy: Strategy) -> str | None:
    """The attribute of what torch's DDP is made with, where it trains whole modules; None elsewhere."""
    names = ("ddp_options", "_ddp_kwargs") if is_plain(strategy) else ()
    return next((name for name in names if hasattr(strategy, name)), None)


def _options(strategy: Strategy) -> dict[str, Any]:
    name = _name(strategy)
    return {} if name is None else getattr(strategy, name)


def refuse_static_graph(session: Session, *, who: str) -> None:
    """Raise ``ValueError`` where DDP takes it that each step runs the same blocks."""
    strategy = session.trainer.strategy
    if _options(strategy).get("static_graph"):
        raise ValueError(
            f"{who}: got DDPStrategy(static_graph=True); expected static_graph=False, because"
            " each step uses other parameters. Leave static_graph out, or take the technique out."
        )


def look_for_unused(session: Session, *, look: bool = True) -> bool:
    """Let DDP look for the parameters that a step does not use, or not, to the end of the run; whether that is new."""
    strategy = session.trainer.strategy
    name, options = _name(strategy), _options(strategy)
    if name is None or bool(options.get("find_unused_parameters")) == look:
        return False
    session.patches.set(strategy, name, {**options, "find_unused_parameters": look})
    return True


def refuse_reentrant(session: Session, stacks: Sequence[BlockStack], *, who: str) -> None:
    """Raise ``ValueError`` where DDP's search for unused parameters would count those of a reentrant checkpoint twice."""
    for stack in stacks if _name(session.trainer.strategy) is not None else ():
        if is_checkpointed_reentrantly(m for block in stack.blocks for m in block.modules()):
            raise ValueError(
                f"{who}: {stack} is checkpointed with use_reentrant=True, under DDP; expected"
                " use_reentrant=False, because DDP must look for the parameters of dropped blocks. Enable"
                " checkpointing with gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
