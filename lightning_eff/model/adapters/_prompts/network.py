"""Which module's calls get prompts: the smallest that is called with the ids and has all blocks in it."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_eff._core._branches.probing import aside, attempts
from lightning_eff._core._stack.finding import candidates
from lightning_eff._core.patches import hook_before, hook_behind


@dataclass(frozen=True)
class Network:
    """A module whose calls get prompts.

    Attributes:
        path: dotted.
        module: it.
        ids: the name of the argument that is the ids, (B, T).
    """

    path: str
    module: nn.Module
    ids: str


@dataclass
class _Seen:
    """What one pass showed: the modules that were called with the ids, outermost first, and how often they were looked up."""

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
    """The network of a language model, by a pass over a batch, or an input that is made up.

    Args:
        root: the module tree.
        embeddings: those of the tokens.
        batch: of the module's data; None makes an input up.
        who: the technique, for messages.

    Raises:
        ValueError: where nothing ran, or tokens are looked up several times in a pass, or by no module that was called with
            them.
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
        except Exception as e:  # what is made up may not be what the module takes: the next may be
            tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:100] if str(e) else ''})")
            continue
        if not seen.lookups:
            tried.append(f"{of} ran, and looked up no tokens")
            continue
        if seen.lookups > 1:
            raise ValueError(
                f"{who}: {type(root).__name__} looks up tokens {seen.lookups} times in a pass, as encoder-decoders do: which"
                " text the prompts are for, and who is to see them, cannot be told. Expected a model of one text, an encoder or"
                " a decoder. Take the technique out, or tune by LoRA."
            )
        around = [(m, name) for m, name in seen.found if {*map(id, blocks)} <= {*map(id, m.modules())}]
        whole = sum(p.numel() for p in root.parameters())
        if not blocks:
            around = [(m, name) for m, name in around if 2 * sum(p.numel() for p in m.parameters()) > whole]
        if not around:
            tried.append(
                f"{of} ran, and no module that has the blocks in it was called with the ids that were looked up"
            )
            continue
        m, name = around[-1]
        return Network(paths[id(m)], m, name)
    raise ValueError(
        f"{who}: no call of {type(root).__name__} was seen to which prompts could be given. {'; '.join(tried[:3])}. Expected"
        " a module whose forward, or that of a part with all blocks in it, is called with ids (B, T). Give a batch,"
        " lightning_eff.apply(module, technique, batch=batch), or an example_input_array to the LightningModule; or take the"
        " technique out."
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
    """Whether an argument is the ids that were looked up, in whatever view, (B, T)."""
    return (
        isinstance(value, Tensor)
        and value.ndim == 2
        and value.numel() == ids.numel()
        and value.untyped_storage()._cdata
        == ids.untyped_storage()._cdata  # on the meta device too, where all addresses are 0
    )
