"""Finds the modules that attend to the patches of an image, and the places of the patches among the tokens, in one pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core.patches import hook_before, hook_behind
from lightning_eff.model.initialization._gated.mixing import FUSED, MODULE, SOFTMAX, Grid

_MOST = 16  # the largest number of tokens that are not patches
_CONVOLUTIONS = (F.conv2d, torch.conv2d)


@dataclass
class Attending:
    """A call of attention.

    Attributes:
        path: the path of the innermost module that makes it.
        heads: the number of heads.
        tokens: the number of queries and keys; None if the two differ.
        causal: whether it is causal.
    """

    path: str
    heads: int
    tokens: int | None
    causal: bool

    def __str__(self) -> str:
        on = "on other tokens than its own" if self.tokens is None else f"on {self.tokens} tokens"
        return f"{self.path or 'the module itself'} attends {on}{', causally' if self.causal else ''}"


@dataclass
class Found:
    """The findings of one pass.

    Attributes:
        attending: the modules that attend to all tokens, in order, with their number of heads.
        grid: the patches among the tokens.
        of: which module ran on which input, in words.
    """

    attending: dict[str, int]
    grid: Grid
    of: str


class _Seeing(TorchFunctionMode):
    """Records calls of attention, and the sizes of convolution outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.seen: list[Attending] = []
        self.grids: list[tuple[int, int]] = []
        self.inputs: list[list[Tensor]] = []  # the inputs of the modules that run
        self.first: list[Tensor] = []  # the inputs of the first module that attends

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in _CONVOLUTIONS and output.ndim == 4:
            self.grids.append((output.shape[-2], output.shape[-1]))
        elif func is F.scaled_dot_product_attention:
            given: dict[str, Any] = {**dict(zip(FUSED, args, strict=False)), **kwargs}
            q, k = given["query"], given["key"]
            self._note(q.shape[-3], q.shape[-2], k.shape[-2], bool(given.get("is_causal")))
        elif func is F.multi_head_attention_forward:
            bound = MODULE.bind(*args, **kwargs).arguments
            same = len(bound["key"]) if args[0] is args[1] else -1
            self._note(bound["num_heads"], len(bound["query"]), same, bool(bound.get("is_causal")))
        elif func in SOFTMAX and output.ndim == 4:
            self._note(output.shape[1], output.shape[2], output.shape[3], bool((output.triu(1) == 0).all()))
        return output

    def _note(self, heads: int, queries: int, keys: int, causal: bool) -> None:
        if not self.seen:
            self.first = [t for t in (self.inputs[-1] if self.inputs else []) if t.ndim == 3]
        self.seen.append(
            Attending(self.stack[-1] if self.stack else "", heads, queries if queries == keys else None, causal)
        )


@contextmanager
def _seeing(module: nn.Module) -> Iterator[_Seeing]:
    seeing, handles = _Seeing(), list[Any]()

    def entering(path: str) -> Callable[..., None]:
        def enter(m: nn.Module, args: Any, kwargs: Any) -> None:
            seeing.stack.append(path)
            seeing.inputs.append([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])

        return enter

    def leave(m: nn.Module, args: Any, output: Any) -> None:
        seeing.stack.pop()
        seeing.inputs.pop()

    try:
        for path, m in module.named_modules():
            handles.append(hook_before(m, entering(path), with_kwargs=True, prepend=True))
            handles.append(hook_behind(m, leave, always_call=True))
        with seeing:
            yield seeing
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class _Tried:
    seen: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def find(module: nn.Module, *, who: str, batch: Any = None) -> Found:
    """Return the self-attention of ``module`` on the patches of an image, from the first pass that shows some.

    Args:
        module: the module.
        who: the technique's name, for messages.
        batch: a batch of the module's own data; None makes inputs up.

    Raises:
        ValueError: if nothing ran, or nothing attends to the patches of an image.
    """
    tried = _Tried()
    for of, call in attempts(module, batch):
        try:
            with aside(module), _seeing(module) as seeing:
                call()
        except Exception as e:  # the module may not take these made-up inputs, but the next ones
            tried.failed.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:120] if str(e) else ''})")
            continue
        if not seeing.seen:
            tried.seen.append(f"{of} ran without attention")
            continue
        grid = _grid(seeing)
        if isinstance(grid, Grid):
            tokens = grid.height * grid.width + grid.before + grid.after
            attending = [one for one in seeing.seen if one.tokens == tokens and not one.causal]
            counts = {one.path: sum(other.path == one.path for other in attending) for one in attending}
            several = [path for path, count in counts.items() if count > 1]
            if several or "" in counts:
                raise ValueError(
                    f"{who}: {several[0] if several else 'the module itself'} attends"
                    f" {'several times' if several else 'in its own forward'}, but gates are learnt for submodules of"
                    f" {type(module).__name__} that each attend once. Remove {who}."
                )
            return Found({one.path: one.heads for one in attending}, grid, of)
        tried.seen.append(f"in {of}, {seeing.seen[0]} ({len(seeing.seen)} calls of attention), but {grid}")
        if seeing.grids:  # on images of the size of a window, it would seem to attend to all patches
            break
    raise ValueError(
        f"{who}: {type(module).__name__} does not attend to the patches of an image:"
        f" {'; '.join((tried.seen or tried.failed)[:2]) or 'there was nothing to run'}. Give a batch of your own, as in"
        f" lightning_eff.apply(module, technique, batch=batch), or remove {who}."
    )


def _grid(seeing: _Seeing) -> Grid | str:
    """Return the grid of patches of the first attention call, or why there is none, in words."""
    one = next((one for one in seeing.seen if one.tokens is not None), None)
    if one is None or one.tokens is None:
        return "none is self-attention"
    if one.causal:
        return "it is causal, as for texts"
    fits = [(h, w) for h, w in seeing.grids if h * w > 1 and 0 <= one.tokens - h * w <= _MOST]
    if not fits:
        grids = ", ".join(f"{h} x {w}" for h, w in dict.fromkeys(seeing.grids)) or "nothing"
        return f"convolutions returned {grids} before, which are not these tokens"
    height, width = fits[-1]
    others = one.tokens - height * width
    if not others:
        return Grid(height, width, 0, 0)
    for t in seeing.first:
        for dim in (1, 0):
            if t.shape[dim] == one.tokens and t.shape[1 - dim] > 1:
                rows = t if dim == 1 else t.transpose(0, 1)
                same = (rows == rows[:1]).all(dim=-1).all(dim=0).tolist()
                before = next((i for i, s in enumerate(same) if not s), 0)
                if before <= others and not any(same[before : before + height * width]):
                    after = others - before
                    if all(same[one.tokens - after :]):
                        return Grid(height, width, before, after)
    return f"it is unclear which of the {one.tokens} tokens are the {height} x {width} patches"
