"""Run the step of a module with sharded parameters (FSDP2), and name the gathered parameters."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_eff._core.patches import Patches, hook_before
from lightning_eff._core.session import Session
from lightning_eff._core.steps import takes_index


def take_apart(session: Session) -> None:
    """Shard gathered parameters again; nothing happens if none are sharded."""
    for m in _gathering(session):
        m.reshard()


def step_of(session: Session, batch: Any, batch_idx: int) -> Any:
    """Return the output of the module's own ``training_step`` on ``batch``, called as the strategy calls it."""
    module, step, model = session.module, session.own_step, session.trainer.strategy.model
    arguments = (batch, *((batch_idx,) if takes_index(step) else ()))
    if model is None or model is module or not any(m is model for m in _gathering(session)):
        return step(*arguments)
    forwarded = Patches()

    def forward(*handed: Any) -> Any:
        forwarded.restore()
        return step(*handed)

    forwarded.set(module, "forward", forward)
    try:
        return model(*arguments)
    finally:
        forwarded.restore()


@contextmanager
def named(session: Session) -> Iterator[dict[int, str]]:
    """Return the parameters' names by ``id``; those of gathered parameters are added when they are gathered."""
    module = session.module
    names = {id(p): name for name, p in module.named_parameters()}
    paths = {id(m): path for path, m in module.named_modules()}
    with ExitStack() as scope:
        for m in _gathering(session):
            path = paths.get(id(m))  # a strategy's wrapper has none
            within, prefix = (module, "") if path is None else (m, f"{path}." if path else "")

            def note(_: Any, args: Any, within: nn.Module = within, prefix: str = prefix) -> None:
                names.update({id(p): prefix + name for name, p in within.named_parameters()})

            scope.callback(hook_before(m, note).remove)
        yield names


def _gathering(session: Session) -> list[Any]:
    """Return the modules whose parameters are gathered when they are called."""
    from torch.distributed.fsdp import FSDPModule

    model = session.trainer.strategy.model
    trees = [session.module, *([model] if model is not None else [])]
    return list({id(m): m for tree in trees for m in tree.modules() if isinstance(m, FSDPModule)}.values())
