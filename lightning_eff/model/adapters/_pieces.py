"""What adapters need from strategies that divide parameters: which are refused, and how pieces are inspected and read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_eff._core._architecture.record import swapped
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core.session import Session

#: The number of elements of a tensor in its sketch.
LOOKS = 256


def sketch(t: Tensor) -> Tensor:
    """Two numbers that identify a tensor, (2,): a weighted sum of some elements, and the sum of their absolute values."""
    return sketches([t])[0]


def sketches(tensors: Sequence[Tensor]) -> Tensor:
    """The sketches of several tensors, (n, 2). Tensors of the same size, dtype and device share their operations."""
    found = torch.zeros(len(tensors), 2, dtype=torch.float32, device="cpu")
    alike: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(tensors):
        if not t.is_meta and t.numel():
            alike.setdefault((t.numel(), t.dtype, t.device), []).append(i)
    for (numel, *_), places in alike.items():
        every = max(1, numel // LOOKS)
        few = [tensors[i].detach().reshape(-1)[::every][:LOOKS].to(torch.float32) for i in places]
        rows = torch.stack(few).cpu()  # sums on the CPU have the same bits for any number of rows
        weights = 1 + torch.arange(rows.shape[1], device="cpu") % 7
        found[places] = torch.stack([(rows * weights).sum(1), rows.abs().sum(1)], dim=1)
    return found


def local(t: Tensor) -> Tensor:
    """This rank's piece of ``t``, or ``t`` itself if it is not divided."""
    return t.to_local() if isinstance(t, DTensor) else t


def divides(session: Session) -> bool:
    """Whether the strategy may divide parameters."""
    return is_a(session.trainer.strategy, ModelParallelStrategy)


def plans(session: Session) -> bool:
    """Whether it is the hybrid strategy, which divides the module after it was changed."""
    return divides(session) and hasattr(session.trainer.strategy, "pipeline_parallel_size")


def check_strategy(session: Session, *, who: str, save: str) -> None:
    """Raise ``ValueError`` if checkpoints would differ from ``save``, or a parallel plan names layers that are replaced.

    Args:
        session: the run, before any change.
        who: the technique, for messages.
        save: what its checkpoints hold.
    """
    strategy = session.trainer.strategy
    name = type(strategy).__name__
    if save == "adapter" and getattr(strategy, "_save_distributed_checkpoint", False):
        raise ValueError(
            f"{who}(save='adapter'): {name}(save_distributed_checkpoint=True) saves a folder that holds the whole module. Set"
            f" save_distributed_checkpoint=False on the strategy, or use {who}(save='all')."
        )
    tensor = getattr(strategy, "_tensor_parallel_size", 1)
    if divides(session) and not plans(session) and tensor != 1:
        raise ValueError(
            f"{who}: {name}(tensor_parallel_size={tensor}) needs a plan in configure_model, whose layers {who} has replaced by"
            " then. Use tensor_parallel_size=1, or HybridParallelStrategy, which makes the plan itself."
        )


def check_numbers(session: Session, *, who: str) -> None:
    """Raise ``ValueError`` on all ranks if new parameters have no initial values, or would lose them.

    Args:
        session: the run, whose module is complete and not divided by the strategy yet.
        who: the technique, for messages.
    """
    if not divides(session):
        return
    new = {
        f"{path}.{name}": p
        for path, m, swap in swapped(session.module)
        for name, p in m.named_parameters()
        if p.requires_grad and name.removeprefix("base_layer.") not in swap.tensors
    }
    if plans(session):  # all ranks take the values of rank 0
        lost = session.replicas.everyone(next((name for name, p in new.items() if p.is_meta), None))[0]
        why = "has no initial values, because the weights that it depends on are on the meta device"
        fix = "init_on='rank0' with weights on rank 0"
    else:
        lies = any(t.is_meta for t in (*session.module.parameters(), *session.module.buffers()))
        lost = next((name for name in session.replicas.everyone(next(iter(new), None) if lies else None) if name), None)
        why = "would lose its initial values when Lightning materialises the weights on the meta device"
        fix = "HybridParallelStrategy(init_on='rank0') with weights on rank 0"
    if lost:
        raise ValueError(
            f"{who} under {type(session.trainer.strategy).__name__}: {lost} {why}. Build the module with its weights (without"
            f" init_module(empty_init=True)), or use {fix}."
        )


@contextmanager
def nowhere(root: nn.Module) -> Iterator[None]:
    """Move a module that is partly on the meta device there as a whole, so that it can run for its shapes."""
    owners = [(m, kind) for m in root.modules() for kind in ("_parameters", "_buffers")]
    tensors = [t for m, kind in owners for t in getattr(m, kind).values() if t is not None]
    twins: dict[int, Tensor] = {}
    if any(t.is_meta for t in tensors):
        twins = {id(t): t.detach().to("meta") for t in tensors if not t.is_meta}
    before = [(m, kind, getattr(m, kind)) for m, kind in owners]
    try:
        for m, kind, held in before if twins else ():
            there = {key: twins.get(id(t), t) if t is not None else None for key, t in held.items()}
            if kind == "_parameters":
                there = {
                    k: t if t is None or isinstance(t, nn.Parameter) else nn.Parameter(t) for k, t in there.items()
                }
            m.__dict__[kind] = there
        yield
    finally:
        for m, kind, held in before:
            m.__dict__[kind] = held


class Pieces:
    """One run's module in pieces, or whole if nothing divides it.

    Attributes:
        divided: whether a strategy may divide it.
        loads_at_once: whether the strategy loads weights as it reads a file.

    Args:
        session: the run.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._agreed = session, False
        self.divided = divides(session)
        self.loads_at_once = self.divided and not plans(session)

    def whole_sketches(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sketches of whole tensors, (n, 2); NaN for those that are divided by now or on the meta device."""
        found = torch.full((len(tensors), 2), torch.nan, dtype=torch.float32, device="cpu")
        whole = [i for i, t in enumerate(tensors) if not (self.divided and (t.is_meta or isinstance(t, DTensor)))]
        found[whole] = sketches([tensors[i] for i in whole])
        return found

    def agreed(self, base: Tensor, frozen: Mapping[str, Tensor]) -> Tensor:
        """Sketches of the whole tensors, the same on all ranks; a collective operation."""
        if not self.divided or self._agreed:
            return base
        self._agreed = True
        found = self._session.trainer.strategy.broadcast(base)
        for i, t in enumerate(frozen.values()):
            if found[i].isnan().any() and isinstance(t, DTensor):
                found[i] = sketch(t.full_tensor())
            elif found[i].isnan().any() and not t.is_meta:
                found[i] = sketch(t)
        return found

    def put_together(self, states: Callable[[], dict[str, Any]], without: frozenset[str]) -> dict[str, Any]:
        """The module's state; tensors of the keys in ``without`` are not gathered from other processes."""
        if not self.divided:
            return states()
        strategy: Any = self._session.trainer.strategy
        if not self.loads_at_once:
            strategy.leaves_out = without
            try:
                return states()
            finally:
                del strategy.leaves_out
        frozen = {name for name, p in strategy.model.named_parameters() if not p.requires_grad}
        if frozen - without:  # some of them were changed since
            return states()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(strategy.model, options=options)

    def anywhere(self, names: set[str]) -> set[str]:
        """The names that any rank gives; a collective operation if the module is divided."""
        if not self.divided:
            return names
        return {name for one in self._session.replicas.everyone(sorted(names)) for name in one}

    def read(self, path: Any, weights_only: bool | None) -> dict[str, Any] | None:
        """A checkpoint in one file, with its tensors not in memory; None if it is not one file."""
        path = Path(self._session.trainer.strategy.broadcast(path))
        if not path.is_file():
            return None
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
