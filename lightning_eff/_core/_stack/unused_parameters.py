"""DDP settings for steps that skip blocks: it must search for unused parameters."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_eff._core._needs.offers import is_plain
from lightning_eff._core._run.checks import is_checkpointed_reentrantly
from lightning_eff._core.blocks import BlockStack
from lightning_eff._core.session import Session


def _name(strategy: Strategy) -> str | None:
    """Return the strategy's attribute with the options of torch's DDP, if it trains whole modules; otherwise None."""
    names = ("ddp_options", "_ddp_kwargs") if is_plain(strategy) else ()
    return next((name for name in names if hasattr(strategy, name)), None)


def _options(strategy: Strategy) -> dict[str, Any]:
    name = _name(strategy)
    return {} if name is None else getattr(strategy, name)


def refuse_static_graph(session: Session, *, who: str) -> None:
    """Raise ``ValueError`` if DDP assumes that each step runs the same blocks."""
    strategy = session.trainer.strategy
    if _options(strategy).get("static_graph"):
        raise ValueError(
            f"{who}: got DDPStrategy(static_graph=True); expected static_graph=False, because"
            " each step uses other parameters. Remove static_graph, or remove the technique."
        )


def look_for_unused(session: Session, *, look: bool = True) -> bool:
    """Set whether DDP searches for unused parameters for the rest of the run; return whether this is a change."""
    strategy = session.trainer.strategy
    name, options = _name(strategy), _options(strategy)
    if name is None or bool(options.get("find_unused_parameters")) == look:
        return False
    session.patches.set(strategy, name, {**options, "find_unused_parameters": look})
    return True


def refuse_reentrant(session: Session, stacks: Sequence[BlockStack], *, who: str) -> None:
    """Raise ``ValueError`` if DDP's search for unused parameters would count those of a reentrant checkpoint twice."""
    for stack in stacks if _name(session.trainer.strategy) is not None else ():
        if is_checkpointed_reentrantly(m for block in stack.blocks for m in block.modules()):
            raise ValueError(
                f"{who}: {stack} is checkpointed with use_reentrant=True, under DDP; expected"
                " use_reentrant=False, because DDP must look for the parameters of dropped blocks. Enable"
                " checkpointing with gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
