"""FlexAttention of samples that share a row: block masks and score functions of a padded batch, evaluated for slots of rows.

No torch mode sees ``flex_attention``, so it is replaced under the names that modules use: globals of their files and their own
attributes, including ``torch.compile(flex_attention)`` and Hugging Face's. The user's own function is called, with a mask and
scores for slots. A mask or score function that is built from inputs in rows already uses slots. Which of the two applies cannot
be seen, so both are tried.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lightning_eff._core._run.listeners import without_listeners
from lightning_eff._core.patches import Patches
from lightning_eff.data.tokens._packing.rows import Rows

Mod = Callable[..., Tensor]
Name = tuple[Any, str, Any]
_HOME = "torch.nn.attention.flex_attention"
_HUGGING_FACE = "transformers.integrations.flex_attention"
_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")


@dataclass(frozen=True)
class Mods:
    """Whether the functions passed to a block's FlexAttention use slots of rows instead of the batch's places.

    Attributes:
        mask_by_slots: whether block masks do.
        score_by_slots: whether score functions do.
    """

    mask_by_slots: bool = False
    score_by_slots: bool = False


#: The possibilities, the likeliest first.
EVERY = (Mods(), Mods(score_by_slots=True), Mods(mask_by_slots=True), Mods(True, True))


def mask_of_slots(mask_mod: Mod | None, rows: Rows, *, by_slots: bool = False) -> Mod:
    """Return the mask function for slots: those of one sample attend to each other, if ``mask_mod`` allows it for their tokens.

    Args:
        mask_mod: ``(b, h, q, k)`` of the padded batch; None allows all.
        rows: the positions of the tokens.
        by_slots: whether ``mask_mod`` uses slots.
    """
    segment, sample, place = rows.segment, rows.sample.int(), rows.place.int()

    def alone(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return segment[b, q] == segment[b, k]

    def own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert mask_mod is not None
        return (segment[b, q] == segment[b, k]) & mask_mod(b, h, q, k)

    def of_batch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert mask_mod is not None
        return (segment[b, q] == segment[b, k]) & mask_mod(sample[b, q], h, place[b, q], place[b, k])

    return alone if mask_mod is None else own if by_slots else of_batch


def scores_of_slots(score_mod: Mod, rows: Rows) -> Mod:
    """Return the padded batch's ``score_mod(score, b, h, q, k)`` for slots."""
    sample, place = rows.sample.int(), rows.place.int()

    def of_batch(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score_mod(score, sample[b, q], h, place[b, q], place[b, k])

    return of_batch


def sees_padding(block_mask: Any, rows: Rows) -> Tensor:
    """Return whether a block mask of the padded batch lets any token attend to padding, as a tensor."""
    from torch.nn.attention.flex_attention import create_mask

    size, tokens = rows.keep.shape
    keep = rows.keep

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return keep[b, q] & ~keep[b, k] & block_mask.mask_mod(b, h, q, k)

    return create_mask(seen, size, _heads(block_mask), tokens, tokens, device=str(keep.device)).any()


def _heads(block_mask: Any) -> int:
    return 1 if block_mask is None or len(block_mask.shape) < 4 else block_mask.shape[1]


class Flex:
    """FlexAttention of blocks on rows.

    Args:
        check: a function that is called before each use, and may raise.

    Attributes:
        met: whether a function was used that may depend on places or slots.
        seen: for each block mask of the padded batch, whether it lets tokens attend to padding.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.met = False
        self.seen: list[Tensor] = []
        self._check = check
        self._rows: Rows | None = None
        self._mods = Mods()
        self._held: dict[Any, tuple[Any, Any]] = {}
        self._files: tuple[Any, list[Name]] = (None, [])
        self._blocks: WeakKeyDictionary[nn.Module, tuple[Any, list[Name]]] = WeakKeyDictionary()

    def forget(self) -> None:
        """End a step, or a trial."""
        self.met = False
        self.seen.clear()
        self._held.clear()

    @contextmanager
    def within(self, block: nn.Module, rows: Rows, mods: Mods) -> Iterator[None]:
        """Let ``block`` call FlexAttention on these rows, with functions according to ``mods``."""
        around, patches = (self._rows, self._mods), Patches()
        self._rows, self._mods = rows, mods
        try:
            for owner, name, stand_in in self._names(block):
                patches.set(owner, name, stand_in)
            yield
        finally:
            patches.restore()
            self._rows, self._mods = around

    def _names(self, block: nn.Module) -> list[Name]:
        """List where the block may find FlexAttention, and its replacement there."""
        home = sys.modules.get(_HOME)
        if home is None:
            return []
        flex = home.flex_attention
        loaded = len(sys.modules), flex
        if self._files[0] != loaded:
            self._files = loaded, [(m, name, self._stand_in(func)) for m, name, func in _in_files(flex)]
        if self._blocks.get(block, (None,))[0] is not flex:
            own = ((m, name, value) for m in block.modules() for name, value in vars(m).items() if _is(value, flex))
            self._blocks[block] = flex, [(m, name, self._stand_in(func)) for m, name, func in own]
        return self._files[1] + self._blocks[block][1]

    def _stand_in(self, func: Callable[..., Any]) -> Callable[..., Any]:
        hugging_face = func.__module__ == _HUGGING_FACE
        names = (*_NAMES[:3], "training") if hugging_face else _NAMES

        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            given, rows, mods = {**dict(zip(names, args, strict=False)), **kwargs}, self._rows, self._mods
            shapes = [given[name].shape for name in _NAMES[:3]]
            if rows is None or any(len(s) != 4 or (s[0], s[2]) != (rows.count, rows.length) for s in shapes):
                return func(*args, **kwargs)
            self._check()
            score_mod, block_mask = given.get("score_mod"), given.get("block_mask")
            with without_listeners():
                if hugging_face:  # its score function is built within the block, from inputs in rows
                    mods = replace(mods, score_by_slots=True)
                else:
                    self.met |= score_mod is not None or block_mask is not None
                given["block_mask"] = self._mask(block_mask, rows, mods)
                if score_mod is not None and not mods.score_by_slots:
                    given["score_mod"] = scores_of_slots(score_mod, rows)
                return func(**given)

        return flex_attention

    def _mask(self, block_mask: Any, rows: Rows, mods: Mods) -> Any:
        """Return the block mask of rows, created once per step for all blocks with the same mask."""
        from torch.nn.attention.flex_attention import create_block_mask

        key = id(block_mask), id(rows), mods.mask_by_slots
        if key not in self._held:
            mask_mod = None if block_mask is None else block_mask.mask_mod
            if mask_mod is not None and not mods.mask_by_slots:
                self.seen.append(sees_padding(block_mask, rows))
            size = {} if block_mask is None else {"BLOCK_SIZE": block_mask.BLOCK_SIZE}
            made = create_block_mask(
                mask_of_slots(mask_mod, rows, by_slots=mods.mask_by_slots),
                rows.count,
                _heads(block_mask),
                rows.length,
                rows.length,
                device=str(rows.segment.device),
                **size,
            )
            self._held[key] = (block_mask, rows), made
        return self._held[key][1]


def _is(value: Any, flex: Any) -> bool:
    """Return whether ``value`` is FlexAttention, compiled or not."""
    return value is flex or (type(value) is FunctionType and value.__dict__.get("_torchdynamo_orig_callable") is flex)


def _in_files(flex: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the globals of all loaded files that are FlexAttention."""
    for name, file in list(sys.modules.items()):
        if not isinstance(file, ModuleType) or (name.startswith("torch.") and name != _HOME):
            continue
        if name == _HUGGING_FACE:  # it compiles the function once in one global, and calls it by another
            func = getattr(file, "compile_friendly_flex_attention", None)
            if func is not None:
                yield file, func.__name__, func
            continue
        for at, value in list(vars(file).items()):
            if _is(value, flex):
                yield file, at, value
