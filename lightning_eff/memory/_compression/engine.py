"""Compressed activations: saved-tensor hooks that hold codes instead of tensors, and a ledger of their bytes.

The forward pass is exact. :class:`SavedTensors` identifies what an operation saves. It is compressed when it is saved, and
decoded when the backward pass asks for it.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_eff._core.blocks import untraced_hooks
from lightning_eff.kernels.group_quantization import BITS, quantize
from lightning_eff.memory._compression.affine import Line
from lightning_eff.memory._compression.attention import OnResult
from lightning_eff.memory._compression.codes import Codes, GroupCodes, Host
from lightning_eff.memory._compression.held import EXACT_BITS, Held, Restore, dense, fits, mask, memory_order, sign
from lightning_eff.memory._compression.identity import Identity, Storages, identity
from lightning_eff.memory._compression.ledger import Entry, Ledger, ledger_of
from lightning_eff.memory._compression.ranges import RunningRanges
from lightning_eff.memory._compression.saved import KEPT, SavedTensors, Treatment

WIDE_BITS = 8
_FLOOR = 4  # the bits that suffice for the source of derived tensors, if sensitivities were measured
_IN_FLIGHT = 4  # open verdicts of a CUDA device before the oldest is awaited
_ODD = 0x9E3779B97F4A7C15  # separates the seeds of a pass's tensors
_OTHER_ROUNDING = 1 << 32  # more than the number of tensors that a pass saves

BitsOf = Callable[[str, bool], int]


class Engine:
    """Compresses what forward passes save.

    Args:
        module: the module that is trained.
        bits: the bits per element of groups: 1, 2, 4 or 8; or a function of a tensor's key (see :meth:`key`) and of whether it
            is one of those that get more bits than others with a fixed number. ``EXACT_BITS`` keeps a tensor as it is.
        group_size: the number of elements that share scale and minimum, a power of two from 16 to 8192.
        ranges: running ranges, which code tensors instead of groups; ``bits`` are 8 then.
        host: the host memory for codes. None leaves them on their device.
        stochastic: whether to round stochastically instead of to nearest.
        only: a function that returns whether the current save may be compressed.

    Attributes:
        bits: as above. It may be set between passes.
        reseeded: a function that returns by key whose rounding uses other random numbers.
        on_groups: a function that is called with each key and the codes of a tensor compressed by groups.
        on_shared: a function that is called with the key of codes that serve another tensor, and its number of elements.
        on_output: a function that is called with the keys of what an operation saved, and its output.
        ledger: the ledger of the last pass.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bits: int | BitsOf,
        group_size: int = 256,
        ranges: RunningRanges | None = None,
        host: Host | None = None,
        stochastic: bool = True,
        only: Callable[[], bool] | None = None,
    ) -> None:
        self.tensors = SavedTensors(module)
        self.bits = bits
        self.group_size = group_size
        self.ranges = ranges
        self.host = host
        self.stochastic = stochastic
        self.only = only
        self.reseeded: Callable[[str], bool] | None = None
        self.on_groups: Callable[[str, Any], None] | None = None
        self.on_shared: Callable[[str, int], None] | None = None
        self.on_output: Callable[[list[str], Any], None] | None = None
        self.ledger = Ledger()
        self._clear(0)

    def _clear(self, seed: int) -> None:
        self._seed = seed
        self._number = 0
        self._unfit = 0
        self._counted = 0  # the number of tensors when the ledger was last filled
        self._entries: list[Entry] = []
        self._installed: Callable[[Tensor], Any] | None = None  # the pack hook as autograd stores it
        self._known: dict[tuple[Identity, bool], ReferenceType[Held]] = {}
        self._storages = Storages()
        self._occurrences: dict[str, int] = {}
        self._open: deque[tuple[Held, Tensor, torch.cuda.Event]] = deque()
        self._keys: list[str] = []
        self.tensors.notes.clear()
        self.tensors.derivations.clear()

    @contextmanager
    def forward(self, seed: int, batch: Any) -> Iterator[None]:
        """Compress the tensors that code in this context saves.

        Args:
            seed: the seed for rounding, in [0, 2^63). Two passes with the same seed round alike.
            batch: nested tensors that stay alive anyway.
        """
        self._clear(seed)
        self.tensors.begin(t for t in tree_leaves(batch) if isinstance(t, Tensor))
        self.tensors.on_output = None if self.on_output is None else self._output
        self.tensors.on_attention = self._on_attention
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        before = torch.cuda.memory_allocated() if cuda else 0
        hooks = untraced_hooks(self._pack, self._unpack)
        self._installed = hooks.pack_hook
        try:
            with self.tensors, hooks:
                yield
            self._count()
            if cuda:
                self.ledger.allocated_bytes = torch.cuda.memory_allocated() - before
        finally:
            self._settle(0)
            self._clear(0)

    # -- saving

    def _pack(self, x: Tensor) -> Held:
        role, treatment = self.tensors.role(x)
        if treatment is Treatment.ALIVE:
            return Held.exact(x)
        if self.only is not None and not self.only():
            treatment, role = Treatment.EXACT, role if role in KEPT else "other"
        place, signs = identity(x), treatment is Treatment.SIGN
        held = self._find(place, signs=signs)
        if held is not None and held.bits >= self._least(treatment):
            self._keys.append(held.key)
            return held
        self._storages.keep(x)
        held = self._line(x, place, treatment)
        if held is None:
            held, role = self._hold(x, role, treatment)
        self._known[place, signs] = kept = ref(held)
        self._entries.append(Entry(kept, role, place.storage, x.untyped_storage().nbytes()))
        return held

    @property
    def _named(self) -> bool:
        """Whether tensors need names."""
        return self.ranges is not None or callable(self.bits)

    def _find(self, place: Identity, *, signs: bool = False) -> Held | None:
        known = self._known.get((place, signs))
        return None if known is None else known()

    def _least(self, treatment: Treatment) -> int:
        """Return the fewest bits with which an earlier copy of a tensor serves this treatment."""
        if treatment is Treatment.EXACT:
            return EXACT_BITS
        if treatment is Treatment.WIDE:
            return WIDE_BITS
        if treatment is Treatment.DOUBLE and not callable(self.bits):
            return min(2 * self.bits, WIDE_BITS)
        return 1

    def _line(self, x: Tensor, place: Identity, treatment: Treatment) -> Held | None:
        """Hold ``x`` in the codes of a tensor that it is an affine function of, or follows from, if possible."""
        if treatment not in (Treatment.GROUPS, Treatment.DOUBLE, Treatment.WIDE):
            return None
        for source, line in self.tensors.notes.sources(place):
            held = self._source(source, self._least(treatment))
            whole = None if held is None else line.after(held.line)
            if held is not None and whole is not None:
                return self._share(x, held, held.restore, whole)
        found = self.tensors.derivations.of(x)
        least = self._least(treatment)
        held = None if found is None else self._source(found[0], min(least, _FLOOR) if callable(self.bits) else least)
        if found is None or held is None:
            return None
        restore, function = held.restore, found[1]
        kept = self._share(x, held, lambda y: function(restore(y)), held.line)
        kept.derived = True
        return kept

    def _source(self, place: Identity, least: int) -> Held | None:
        """Return what is held there in codes of at least ``least`` bits."""
        held = self._find(place)
        if held is None or held.codes is None or held.derived or held.bits < least:
            return None
        return held

    def _share(self, x: Tensor, held: Held, restore: Restore, line: Line) -> Held:
        """Hold ``x`` in the codes of ``held``."""
        assert held.codes is not None
        if self._named:
            self.key()  # names must not depend on whether codes are shared
        also = [(verdict, event) for other, verdict, event in self._open if other is held]
        kept = Held.of_codes(x, held.codes, restore, line, keep=bool(also))
        kept.key = held.key
        if self.on_shared is not None:
            self.on_shared(held.key, x.numel())
        self._keys.append(held.key)
        self._open.extend((kept, *verdict) for verdict in also)  # fit for use if the source is
        return kept

    def _unpack(self, held: Held) -> Tensor:
        if self._entries:  # a backward pass within the forward context
            self._count()
        return held.get()

    def _hold(self, x: Tensor, role: str, treatment: Treatment) -> tuple[Held, str]:
        if treatment is Treatment.EXACT:
            return Held.exact(x), role
        if treatment is Treatment.SIGN:
            return sign(x), role
        if treatment in (Treatment.MASK, Treatment.MASK_OR_GROUPS):
            held = mask(x)
            if held is not None:
                return held, "mask"
            if treatment is Treatment.MASK:
                return Held.exact(x), role if role in KEPT else "statistic"
        return self._groups(x, treatment), role

    def _groups(self, x: Tensor, treatment: Treatment) -> Held:
        key = self.key() if self._named else ""
        wide, rule = treatment in (Treatment.WIDE, Treatment.DOUBLE), self.bits
        bits = rule(key, wide) if callable(rule) else max(rule, self._least(treatment))
        number, self._number = self._number, self._number + 1
        if bits == EXACT_BITS:
            return Held.exact(x)
        assert bits in BITS, bits
        seed = None
        if self.stochastic:
            number += _OTHER_ROUNDING if self.reseeded is not None and self.reseeded(key) else 0
            seed = (self._seed + _ODD * number) % 2**63
        y, restore = dense(x)
        codes, fit = self._coded(x, y, key, bits, seed)
        if not x.is_cuda and not fit:
            self._unfit += 1
            return Held.exact(x)
        held = Held.of_codes(x, codes, restore, keep=x.is_cuda)
        held.key = key
        if x.is_cuda:  # the host keeps the tensor until the verdict is known, without waiting
            verdict = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(fit, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._open.append((held, verdict, event))
            self._settle(_IN_FLIGHT)
        self._keys.append(key)
        return held

    def _coded(self, x: Tensor, y: Tensor, key: str, bits: int, seed: int | None) -> tuple[Codes, Tensor]:
        """Encode ``y``, which is ``x`` in its memory order, and return whether the codes are fit for use."""
        if self.ranges is not None:
            return self.ranges.encode(key, y, self._heads(x, y), seed, self.host)
        packed = quantize(y, bits, self.group_size, seed=seed)
        fit = fits(y, packed)
        if self.on_groups is not None and (x.is_cuda or fit):
            self.on_groups(key, packed)
        return GroupCodes(packed, self.host), fit

    def _heads(self, x: Tensor, y: Tensor) -> tuple[int, int] | None:
        """Return the dimension of ``y`` with attention's heads, and their number; None if it is not attention's."""
        found = self.tensors.heads(x)
        if found is None or y.shape.numel() != x.shape.numel():  # expanded dimensions are stored once
            return None
        return memory_order(x).index(found[0]), found[1]

    def _on_attention(self) -> OnResult | None:
        """Return the receiver of attention's result; None if what it saves goes to another hook, as in a checkpoint."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
        if hooks is None or hooks[0] is not self._installed or (self.only is not None and not self.only()):
            return None
        return self._attended

    def _attended(self, output: Tensor, lse_bytes: int) -> Held:
        """Record fused attention, which saves neither its output nor the log-sum-exp."""
        none = Held.coded(output, _no_tensor, 0, 0)
        self._entries.append(Entry(ref(none), "statistic", -id(none), lse_bytes))
        place = identity(output)
        self._storages.keep(output)
        self._entries.append(Entry(ref(none), "attention", place.storage, output.untyped_storage().nbytes()))
        return none

    def _settle(self, in_flight: int) -> None:
        """Read the verdicts on compressed tensors until ``in_flight`` are open."""
        while len(self._open) > in_flight:
            held, verdict, event = self._open.popleft()
            event.synchronize()
            fit = bool(verdict)
            self._unfit += not fit
            held.settle(fit=fit)

    def key(self) -> str:
        """Return a name for the present save: module, operation, and the number of saves of this operation in this pass.

        It does not depend on which other modules run, so a dropped block changes no other names.
        """
        name = f"{self.tensors.path(sys._getframe(2))}:{self.tensors.operation}"
        number = self._occurrences[name] = self._occurrences.get(name, -1) + 1
        return f"{name}:{number}"

    def _output(self, output: Any) -> None:
        if self._keys and self.on_output is not None:
            keys, self._keys = self._keys, []
            self.on_output(keys, output)

    # -- the ledger

    def _count(self) -> None:
        """Record the present bytes in the ledger, unless nothing was saved since, or more was held before."""
        if self._counted == len(self._entries) > 0:
            return
        self._settle(0)
        first, self._counted = not self._counted, len(self._entries)
        ledger = ledger_of(self._entries, self._unfit)
        if first or ledger.exact_bytes >= self.ledger.exact_bytes:
            self.ledger = ledger


def _no_tensor() -> Tensor:
    raise AssertionError("exists only in the ledger")
