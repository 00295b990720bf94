"""The bytes that compressed activations hold between a forward pass and its backward pass."""

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
    """The bytes held between a forward pass and its backward pass.

    Attributes:
        exact_bytes: what plain autograd would hold: the storages of all saved tensors, each once, without those of
            parameters, buffers and the batch, which stay alive anyway.
        exact_by_category: ``exact_bytes`` by category. A storage counts where it was saved first.
        by_category: what is held instead, by category.
        bits: the mean bits per element of coded tensors. A tensor without its own codes counts as 0.
        unfit: the number of tensors kept exactly because they hold NaN or infinity, or would round too badly.
        host_bytes: the bytes held in host memory in addition.
        allocated_bytes: the growth of CUDA's allocated memory in the forward pass; 0 elsewhere.
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
        """The sum of all held bytes."""
        return sum(self.by_category.values())


def ledger_of(entries: Iterable[Entry], unfit: int) -> Ledger:
    """Return the present state. Codes that serve several tensors, and storages, count once, with the first of them.

    Args:
        entries: the entries of the tensors saved so far.
        unfit: the number of them that were kept exactly instead of compressed.
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
            if id(codes) not in coded:  # otherwise counted with the first tensor that it serves
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
