"""A module whose parameters lie in pieces on the ranks (FSDP2): its step, and what they are called once they come together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from lightning_eff._core.patches import Patches, hook_before
from lightning_eff._core.session import Session
from lightning_eff._core.steps import takes_index


def take_apart(session: Session) -> None:
    """Let what came together in a pass lie in pieces again, which are the parameters; nothing where all is whole."""
    for m in _gathering(session):
        m.reshard()


def step_of(session: Session, batch: Any, batch_idx: int) -> Any:
    """What the module's own ``training_step`` returns on ``batch``, called as the strategy does."""
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
    """The parameters' names by ``id``; those of what comes together meanwhile are added as it does."""
    module = session.module
    names = {id(p): name for name, p in module.named_parameters()}
    paths = {id(m): path for path, m in module.named_modules()}
    with ExitStack() as scope:
        for m in _gathering(session):
            path = paths.get(id(m))  # one that a strategy put around the module has none
            within, prefix = (module, "") if path is None else (m, f"{path}." if path else "")

            def note(_: Any, args: Any, within: nn.Module = within, prefix: str = prefix) -> None:
                names.update({id(p): prefix + name for name, p in within.named_parameters()})

            scope.callback(hook_before(m, note).remove)
        yield names


def _gathering(session: Session) -> list[Any]:
    """The modules whose parameters come together when they are called."""
    from torch.distributed.fsdp import FSDPModule

    model = session.trainer.strategy.model
    trees = [session.module, *([model] if model is not None else [])]
    return list({id(m): m for tree in trees for m in tree.modules() if isinstance(m, FSDPModule)}.values())
