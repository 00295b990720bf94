"""Whether the gradients of a table can be sparse in a run, given everything that reads them."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_eff._core._lightning.names import is_exactly, is_lightnings, is_overridden
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from lightning_eff.model.layers._ngrams.table import Ngrams

_READS_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


def dense_for(session: Session) -> str:
    """Why gradients of the table are dense in this run; empty if they are sparse."""
    trainer, module = session.trainer, session.module
    plugin = trainer.strategy.precision_plugin
    if not is_exactly(trainer.strategy, SingleDeviceStrategy):
        return f"{type(trainer.strategy).__name__} exchanges whole gradients"
    if not module.automatic_optimization:
        return "under manual optimization the module may read them"
    if not is_lightnings(type(plugin)):
        return f"{type(plugin).__name__} may read them"
    if compiled_around(module, [m for m in module.modules() if isinstance(m, Ngrams)]):
        return "the embedding is in a module that is compiled as a whole"
    for technique in session.working:
        if not (isinstance(technique, Technique) and technique.sparse_gradients):
            return f"{type(technique).__name__} may read them"
    for name in _READS_GRADIENTS:
        if is_overridden(name, module):
            return f"{type(module).__name__}.{name} may read them"
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        known = isinstance(callback, Technique) or is_lightnings(type(callback))
        known = known or getattr(callback, "sparse_gradients", False)
        if not known and any(is_overridden(name, callback, pl.Callback) for name in _READS_GRADIENTS[:2]):
            return f"{type(callback).__name__} may read them"
    return ""
