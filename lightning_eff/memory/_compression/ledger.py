"""What compressed activations hold between a forward pass and its backward pass, in bytes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType

from lightning_eff.memory._compression.held import EXACT_BITS, Held
from lightning_eff.memory._compression.saved import COMPRESSED, KEPT

CATEGORIES = (*COMPRESSED, *KEPT)


class Entry(NamedTuple):
    """A line of the ledger: what is held for one saved tensor, and what plain autograd would hold."""

    held: "ReferenceType[Held]"
    category: str
    storage: int
    storage_bytes: int


@dataclass
class Ledger:
    """Bytes that are held between a forward pass and its backward pass.

    Attributes:
        exact_bytes: what plain autograd would hold: the storages of all saved tensors, each once, without those of
            parameters, buffers and the batch, which stay alive anyway.
        exact_by_category: ``exact_bytes`` by category; a storage counts where it was saved first.
        by_category: what is held instead, by category.
        bits: the mean bits of an element of what is held in codes; a tensor that needs none of its own counts with 0.
        unfit: tensors kept exact because they hold NaN or infinity, or would round too badly.
        host_bytes: what is held in host memory beside that.
        allocated_bytes: by how much the forward pass raised what CUDA's allocator has handed out; 0 elsewhere.
    """

    exact_bytes: int = 0
    exact_by_category: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    by_category: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    bits: float = 0.0
    unfit: int = 0
    host_bytes: int = 0
    allocated_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """All that is held."""
        return sum(self.by_category.values())


def ledger_of(entries: Iterable[Entry], unfit: int) -> Ledger:
    """What is held at this moment: codes that serve several tensors, and storages, count once, with the first of them.

    Args:
        entries: of the tensors saved so far.
        unfit: how many of them were kept exact though they would have been compressed.
    """
    ledger = Ledger(unfit=unfit)
    seen: set[int] = set()
    whole: set[int] = set()
    coded: set[int] = set()
    elements = bits = 0
    for entry in entries:
        held = entry.held()
        if held is None:
            continue
        exact = held.bits == EXACT_BITS
        category = "unfit" if exact and entry.category in COMPRESSED else entry.category
        codes = held.codes
        if codes is not None:
            elements += codes.numel
            if id(codes) not in coded:  # else counted with the first tensor that it serves
                coded.add(id(codes))
                ledger.by_category[category] += codes.num_bytes
                ledger.host_bytes += codes.host_bytes
                bits += codes.bits * codes.numel
        elif not exact:
            ledger.by_category[category] += held.num_bytes
        elif entry.storage not in whole:
            whole.add(entry.storage)
            ledger.by_category[category] += entry.storage_bytes
        if entry.storage not in seen:
            seen.add(entry.storage)
            ledger.exact_bytes += entry.storage_bytes
            ledger.exact_by_category[entry.category] += entry.storage_bytes
    ledger.bits = bits / elements if elements else 0.0
    return ledger
