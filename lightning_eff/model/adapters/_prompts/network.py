"""Finds the module whose calls get prompts: the smallest that is called with the ids and contains all blocks."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.patches import hook_before, hook_behind


@dataclass(frozen=True)
class Network:
    """A module whose calls get prompts.

    Attributes:
        path: the dotted path.
        module: the module.
        ids: the name of the argument with the ids, (B, T).
    """

    path: str
    module: nn.Module
    ids: str


@dataclass
class _Seen:
    """The modules that one pass called with the ids, outermost first, and the number of look-ups."""

    calls: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)
    found: list[tuple[nn.Module, str]] = field(default_factory=list)
    lookups: int = 0


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those beyond the signature by position, as ``*0``."""
    names = [p.name for p in inspect.signature(type(module).forward).parameters.values() if p.kind in _POSITIONAL][1:]
    found = {names[i] if i < len(names) else f"*{i}": value for i, value in enumerate(args)}
    return {**found, **kwargs}


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def network(root: nn.Module, embeddings: dict[str, nn.Embedding], batch: Any, *, who: str) -> Network:
    """The module whose calls get prompts, found in a pass on a batch or a made-up input.

    Args:
        root: the module tree.
        embeddings: the token embeddings by path.
        batch: a batch of the module's data; None makes one up.
        who: the technique, for messages.

    Raises:
        ValueError: if nothing ran, tokens are looked up several times in a pass, or no module was called with them.
    """
    blocks = [m for stack in candidates(root) if stack.composite for m in stack.container.children()]
    paths = {id(m): path for path, m in root.named_modules()}
    tried: list[str] = []
    for of, call in attempts(root, batch):
        seen = _Seen()
        try:
            with aside(root), ExitStack() as scope:
                for handle in _watching(root, embeddings, seen):
                    scope.callback(handle.remove)
                call()
        except Exception as e:  # the module may not accept a made-up input, and may accept the next
            tried.append(f"{of} raised {type(e).__name__} ({first_line(e, 100)})")
            continue
        if not seen.lookups:
            tried.append(f"{of} looked up no tokens")
            continue
        if seen.lookups > 1:
            raise ValueError(
                f"{who}: {type(root).__name__} looks up tokens {seen.lookups} times in a pass, as encoder-decoders do, and"
                " prompts need a single text. Use LoRA instead, or remove the callback."
            )
        around = [(m, name) for m, name in seen.found if {*map(id, blocks)} <= {*map(id, m.modules())}]
        whole = sum(p.numel() for p in root.parameters())
        if not blocks:
            around = [(m, name) for m, name in around if 2 * sum(p.numel() for p in m.parameters()) > whole]
        if not around:
            tried.append(f"{of} called no module that contains the blocks with the ids")
            continue
        m, name = around[-1]
        return Network(paths[id(m)], m, name)
    raise ValueError(
        f"{who}: found no call of {type(root).__name__} with ids (B, T) that could get prompts ({'; '.join(tried[:3])}). Call"
        f" lightning_eff.apply(module, {who}(), batch=batch), or set example_input_array on the LightningModule."
    )


def _watching(root: nn.Module, embeddings: dict[str, nn.Embedding], seen: _Seen) -> Iterator[Any]:
    ours = {id(m) for m in embeddings.values()}

    def enter(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(m) not in ours:
            seen.calls.append((m, arguments(m, args, kwargs)))
            return
        seen.lookups += 1
        ids = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        for outer, handed in seen.calls:
            seen.found += [(outer, name) for name, value in handed.items() if ids and _same(value, ids[0])]

    def leave(m: nn.Module, args: Any, output: Any) -> None:
        if id(m) not in ours:
            seen.calls.pop()

    for m in root.modules():
        yield hook_before(m, enter, with_kwargs=True)
        yield hook_behind(m, leave)


def _same(value: Any, ids: Tensor) -> bool:
    """Whether an argument is the ids that were looked up, in any view, (B, T)."""
    return (
        isinstance(value, Tensor)
        and value.ndim == 2
        and value.numel() == ids.numel()
        and value.untyped_storage()._cdata
        == ids.untyped_storage()._cdata  # on the meta device too, where all addresses are 0
    )
