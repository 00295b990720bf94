"""Calls of modules through code that torch compiles once for all modules that are alike, and the time this takes."""

import contextlib
import functools
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff._core._run.listeners import without_listeners
from lightning_eff._core._tokens.inputs import is_cache
from lightning_eff._core.blocks import signature

Shapes = tuple[tuple[int, ...], ...]
_KEPT = 256  # the largest number of compiled calls to keep


@dataclass
class Kept:
    """A compiled call that outlives the run that made it.

    Attributes:
        call: the function.
        versions: how many of its calls were compiled; no part of its code has more versions.
    """

    call: Callable[..., Any]
    versions: int = 0


_KINDS: dict[tuple[Any, ...], Kept] = {}  # compiled calls of this process, by purpose


def _run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def compiled_call(name: str, **settings: Any) -> Callable[..., Any]:
    """Return ``torch.compile`` of ``fn(forward, *args, **kwargs) -> forward(*args, **kwargs)``, with its own cache.

    Dynamo stores compiled versions by code object, and checks each version when that code is called. So all calls of
    this function share versions with each other and with nothing else. The module of a bound method is an input: guards
    check its class, its structure and what its code reads of it, but not which module it is.

    Args:
        name: the name shown in logs and profiles.
        settings: those of ``torch.compile``.
    """
    code = _run.__code__.replace(co_name=name, co_qualname=name)
    return torch.compile(types.FunctionType(code, _run.__globals__, name), **settings)


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shapes:
    """Return the shapes of all tensors in a call's arguments, in order."""
    found: list[tuple[int, ...]] = []
    _collect(args, found)
    _collect(tuple(kwargs.values()), found)
    return tuple(found)


def _collect(value: Any, found: list[tuple[int, ...]]) -> None:
    if isinstance(value, Tensor):
        found.append(tuple(value.shape))
    elif isinstance(value, tuple | list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        _collect(tuple(value.values()), found)


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks are registered for the calls of this module itself, or of all modules."""
    every = nn.modules.module
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )


@contextmanager
def forward_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace ``module.forward`` on this instance."""
    space = module.__dict__
    missing = object()
    before = space.get("forward", missing)
    space["forward"] = forward
    try:
        yield
    finally:
        if before is missing:
            del space["forward"]
        else:
            space["forward"] = before


@dataclass
class Stopwatch:
    """Measures what torch's compiler does in calls within :meth:`mine`, and later for their backward passes.

    Meanwhile torch's warnings about its own code are ignored; where warnings are errors, it could compile nothing.
    Sizes that happen to be equal in the first call, such as the numbers of samples and features, are not treated as one
    size.

    Attributes:
        seconds: the wall-clock time of compiling.
        events: the number of compiled frames: one per version of a call's code, and more if it breaks into pieces.
    """

    seconds: float = 0.0
    events: int = 0
    _began: float | None = None
    _inside: int = 0
    _ids: set[str] = field(default_factory=set)
    _settings: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)

    def stop(self) -> None:
        from torch._dynamo.callback import callback_handler

        with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed it
            callback_handler.remove_start_callback(self._on_start)
        with contextlib.suppress(ValueError):
            callback_handler.remove_end_callback(self._on_end)

    @contextmanager
    def mine(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _on_start(self, args: Any) -> None:
        from torch.fx.experimental import _config

        shapes: Any = _config  # its functions are set as it is imported
        with self._lock:
            if self._inside:
                self._ids.add(args.compile_id)
            if args.compile_id in self._ids:
                self._began = time.perf_counter()
                self.events += bool(self._inside)
                self._settings.enter_context(warnings.catch_warnings())
                self._settings.enter_context(shapes.patch(use_duck_shape=False))
                warnings.filterwarnings("ignore", module=r"torch\.")

    def _on_end(self, args: Any) -> None:
        with self._lock:
            if self._began is not None:
                self.seconds += time.perf_counter() - self._began
                self._began = None
                self._settings.close()


@dataclass(frozen=True)
class Event:
    """A call that was compiled.

    Attributes:
        block: the number of the module.
        pieces: the number of compiled frames: more than one if the code breaks into pieces.
        broken: the condition that no longer holds, so that no existing version fits; None for a first version.
        breaks: why the code breaks into pieces.
    """

    block: int
    pieces: int
    broken: str | None
    breaks: tuple[str, ...]


@dataclass(frozen=True)
class GivenUp:
    """The compiler makes no more versions of some code, and runs further ones uncompiled.

    Attributes:
        code: the name of a module's class, or of a function within it.
        broken: the condition that no longer holds.
    """

    code: str
    broken: str


class CannotCompile(RuntimeError):
    """torch's compiler failed on the module with this number."""

    def __init__(self, block: int, why: str) -> None:
        super().__init__(f"torch's compiler failed on block {block}: {why}")
        self.block, self.why = block, why


class Calls:
    """Calls modules through compiled code.

    Args:
        blocks: the modules.
        settings: those of ``torch.compile``, except ``dynamic``.
        dynamic: True for one version for all shapes, False for one for each, None for one for the first shapes of a
            kind of module and one for all others.
        on_event: called for each call that was compiled.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        settings: Mapping[str, Any],
        *,
        dynamic: bool | None,
        on_event: Callable[[Event], None],
    ) -> None:
        self.blocks = blocks
        self.settings = dict(settings)
        self.dynamic = dynamic
        self.on_event = on_event
        self.watch = Stopwatch()
        self.first: dict[tuple[int, bool], Shapes] = {}  # by kind of block, and whether gradients are recorded
        self.used: set[int] = set()  # blocks that were called
        kinds: dict[Any, int] = {}
        self._kind = [kinds.setdefault(_make(block), len(kinds)) for block in blocks]
        self._makes = list(kinds)
        self._calls: dict[tuple[Any, ...], tuple[Kept, int]] = {}  # with the number of versions from earlier runs
        self._breaks: set[str] = set()
        self._limits = 0

    def begin(self) -> None:
        """Follow the compiler from now on, until :meth:`end`."""
        self.watch.start()
        self.given_up()  # forget what other code has reached

    def end(self) -> None:
        self.watch.stop()

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of block ``index``, computed by compiled code; hooks on the block itself stay outside of it."""
        block = self.blocks[index]
        forward = block.forward
        kept, earlier = self._compiled(index, args, kwargs)
        compiled, before = kept.call, self.watch.events
        unheard = without_listeners() if torch._C._len_torch_function_stack() else nullcontext()
        try:
            with self.watch.mine(), _versions_beside(earlier), unheard:
                if has_hooks(block):
                    with forward_as(block, functools.partial(compiled, forward)):
                        output = block._call_impl(*args, **kwargs)
                else:
                    output = compiled(forward, *args, **kwargs)
        except Exception as error:
            if _of_compiler(error):
                raise CannotCompile(index, str(error)) from error
            raise
        self.used.add(index)
        if self.watch.events != before:
            kept.versions += 1
            self.on_event(self._event(index, self.watch.events - before))
        return output

    def _event(self, index: int, pieces: int) -> Event:
        from torch._dynamo.utils import counters, get_compilation_metrics

        reasons = [m.recompile_reason for m in get_compilation_metrics()[-pieces:] if m.recompile_reason]
        new = [text for text in counters["graph_break"] if text not in self._breaks] if pieces > 1 else []
        self._breaks.update(new)
        breaks = tuple(" ".join(line.strip() for line in text.splitlines()[:2]) for text in new)
        return Event(index, pieces, _words(reasons[0]) if reasons else None, breaks)

    def given_up(self) -> GivenUp | None:
        """Return what the compiler has given up since the last call of this method."""
        from torch._dynamo.utils import counters, get_compilation_metrics

        count = sum(n for text, n in counters["unimplemented"].items() if _LIMIT in text.partition("\n")[0])
        before, self._limits = self._limits, count
        if count <= before:
            return None
        _KINDS.clear()  # later runs start with their own code
        metrics = get_compilation_metrics()[::-1]
        last = next((m for m in metrics if m.recompile_reason), None)
        if last is None:
            return GivenUp("the blocks", "torch does not say which")
        frame = str(last.compile_id).partition("/")[0]
        names = [m.co_name for m in metrics if m.co_name and str(m.compile_id).partition("/")[0] == frame]
        return GivenUp(names[0] if names else "the blocks", _words(str(last.recompile_reason)))

    def _compiled(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kept, int]:
        kind, shapes, learning = self._kind[index], None, torch.is_grad_enabled()
        if self.dynamic is not True:
            shapes = shapes_of(args, kwargs)
            if self.dynamic is None and self.first.setdefault((kind, learning), shapes) != shapes:
                shapes = None
        key = (kind, shapes, learning)
        found = self._calls.get(key)
        if found is None:
            made_for = (self._makes[kind], *key[1:], *sorted((name, repr(v)) for name, v in self.settings.items()))
            kept = _KINDS.get(made_for)
            if kept is None or kept.versions >= torch._dynamo.config.recompile_limit:
                settings = {**self.settings, "dynamic": shapes is None}
                kept = _KINDS[made_for] = Kept(compiled_call(type(self.blocks[index]).__name__, **settings))
                if len(_KINDS) > _KEPT:
                    del _KINDS[next(iter(_KINDS))]
            found = self._calls[key] = (kept, kept.versions)
        return found


@contextmanager
def _versions_beside(earlier: int) -> Iterator[None]:
    """Allow a run as many versions as torch's limit, in addition to those of earlier runs."""
    if not earlier:
        yield
        return
    config: Any = torch._dynamo.config
    limit = config.recompile_limit
    config.recompile_limit = limit + earlier
    try:
        yield
    finally:
        config.recompile_limit = limit


def _make(block: nn.Module) -> tuple[Any, ...]:
    return type(block), tuple(signature(block))


def without_empty_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a block's arguments without empty key-value caches of Hugging Face models.

    A block would add to the cache at its own place, which nothing reads in training, so code compiled for one block
    would not fit the next.
    """
    if not any(map(_is_empty_cache, (*args, *kwargs.values()))):
        return args, kwargs
    kwargs = {key: None if _is_empty_cache(value) else value for key, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return tuple(None if _is_empty_cache(value) else value for value in args), kwargs


def _is_empty_cache(value: Any) -> bool:
    return is_cache(value) and not value.get_seq_length()


def _words(reason: str) -> str:
    """Return the compiler's reason for another version, without its place in the compiler's code."""
    text = reason.partition("\n")[0].partition("  #")[0].strip()
    return text.partition(": ")[2].replace("forward.__self__", "block") or text


def _of_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


_LIMIT = "recompile limit exceeded"
