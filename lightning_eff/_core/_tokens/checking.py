"""Check whether a block can run on fewer of its tokens, and which of its inputs must be shortened with them.

Many blocks compute a token from the others by the given masks, positions and rotary tables. A block that also uses token
positions in its input (relative biases, convolutions, windows, its own tables) computes something else on a subset.
Doubling distinguishes the two. If each token and all that belongs to it occurs twice, attention's mean over the tokens does
not change, causal or not, but anything position-dependent does. So for any tokens ``x``

    block(x1, x1, x2, x2, ..)[1::2] = block(x1, x2, ..)

is tested on a copy of the block in float64. Weights, inputs and masks are perturbed at random, so that a bias that is 0 at
the start is detected too.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from lightning_eff._core import rng
from lightning_eff._core._architecture.derived import Derived
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._tokens.inputs import BLIND, Call, Path, Plan, is_cache, leaves, mapped, tables_at, told
from lightning_eff._core.blocks import hidden_of, split_output

TRIES = 512
_SAMPLES = 3
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


class CannotTake(ValueError):
    """A block cannot run on fewer of its tokens."""


class TooFewTokens(CannotTake):
    """A block gets so few tokens that none can be left out."""


def find_plan(
    block: nn.Module, call: Call, size: int, *, per_sample: bool, generator: Generator, tables: bool = False
) -> Plan:
    """Return how fewer tokens are passed to ``block``, tested on a copy of it.

    Args:
        block: the block.
        call: a real call of it.
        size: the number of samples in the batch.
        per_sample: whether the samples' tokens will differ.
        generator: the source of random numbers.
        tables: whether the block's own buffers may be shortened, if the samples' tokens do not differ.

    Raises:
        CannotTake: with the reason, and all inputs.
    """
    inputs = ", ".join(told(path, value) for path, value in leaves(call) if value is not None)
    try:
        with torch.no_grad(), rng.fork(), torch.autocast(hidden_of(*call).device.type, enabled=False):
            return _find(block, call, size, per_sample, generator, tables and not per_sample)
    except CannotTake as error:
        raise type(error)(f"{error}. It is called with {inputs}") from None


def _find(block: nn.Module, call: Call, size: int, per_sample: bool, generator: Generator, tables: bool) -> Plan:
    hidden = hidden_of(*call)
    dim = token_dim(hidden, size)
    tokens = hidden.shape[dim]
    if tokens < 4:
        raise TooFewTokens(f"it has {tokens} tokens; expected 4 or more to take some of")
    for path, value in leaves(call):
        if type(value).__name__ == "BlockMask" or (isinstance(value, Tensor) and value.is_nested):
            raise CannotTake(
                f"{told(path, value)} cannot be cut to fewer tokens; expected a mask that is a tensor, or none"
            )
    at = next(path for path, value in leaves(call) if value is hidden)

    def tried(call: Call, dtype: torch.dtype) -> tuple[Plan | None, list[str]]:
        trial = Trial(block, call, dim, dtype, per_sample, generator)
        if hidden.shape[0] == hidden.shape[1] and trial.mixes_samples():
            trial = Trial(block, call, 1 - dim, dtype, per_sample, generator)
        bases = [Plan(at, trial.dim, dict(dims)) for dims in candidates(call, at, tokens)]
        if tables:
            held = _own_tables(block, tokens)
            bases += [Plan(at, trial.dim, plan.dims, own) for own in held for plan in bases[:TRIES]]
        reasons: list[str] = []
        for plan in bases:
            reason = trial.refuted(plan)
            if reason is None:
                return plan, []
            reasons.append(reason)
        return None, reasons

    # full attention scores in float64 may not fit into memory, and a few samples are enough
    some = [_first_samples(call, size)] if dim == 1 and tokens != size > _SAMPLES else []
    tries = [*((one, torch.float64) for one in some), (call, torch.float64), (call, torch.float32)]
    reasons: list[str] = []
    for given, dtype in tries:
        try:
            plan, reasons = tried(given, dtype)
        except Exception as error:  # a kernel does not support this dtype, or the block cannot be copied
            reasons = [f"a copy of it in {str(dtype)[6:]} does not run ({first_line(error)})"]
            continue
        if plan is not None:
            return plan
        if given is call:
            break
    told_best = (
        [r for r in reasons if not r.startswith("on some")] or [r for r in reasons if "no dimension" in r] or reasons
    )
    raise CannotTake(told_best[0])


def _first_samples(call: Call, size: int) -> Call:
    """Return the call on a few samples. Inputs whose first dimension is ``size`` by chance may not fit then."""

    def few(path: Path, value: Any) -> Any:
        by_sample = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size
        return value[:_SAMPLES] if by_sample else value

    return mapped(call, few)


def token_dim(hidden: Tensor, size: int) -> int:
    """Return the dimension along the tokens, 1 or 0, of a hidden state of ``size`` samples.

    Raises:
        CannotTake: if it is neither (B, T, D) nor (T, B, D).
    """
    if hidden.ndim == 3 and hidden.shape[0] == size:
        return 1
    if hidden.ndim == 3 and hidden.shape[1] == size:
        return 0
    raise CannotTake(
        f"its hidden state has the shape {tuple(hidden.shape)}; expected (B, T, D) or (T, B, D) with B = {size} samples"
    )


def candidates(call: Call, hidden: Path, tokens: int) -> Iterator[Mapping[Path, tuple[int, ...]]]:
    """Yield which input dimensions may run along the tokens, by their size, most likely first."""
    named: list[list[tuple[Path, tuple[int, ...]]]] = []
    for path, value in leaves(call):
        if path == hidden or not isinstance(value, Tensor):
            continue
        along = [d for d, n in enumerate(value.shape) if n == tokens]
        options = [c for count in (0, 1, 2) for c in itertools.combinations(along, count)]
        if any(part in str(path[0]) for part in ("mask", "position", "bias")) or value.dtype == torch.bool:
            options.sort(key=lambda dims: (-len(dims), [-d for d in dims]))
        if along:
            named.append([(path, dims) for dims in options])
    for chosen in itertools.islice(itertools.product(*named), TRIES):
        yield {path: dims for path, dims in chosen if dims}


def _own_tables(block: nn.Module, tokens: int) -> list[dict[str, tuple[int, ...]]]:
    """Return which buffers may have a row per position: with enough rows, in their first such dimension or in all."""
    along = {
        name: tuple(d for d, n in enumerate(value.shape) if n >= tokens)
        for name, value in getattr(block, "_orig_mod", block).named_buffers()
    }
    along = {name: dims for name, dims in along.items() if dims}
    options = [{name: dims[:1] for name, dims in along.items()}, along]
    return [] if not along else options[: 1 if options[0] == options[1] else 2]


@contextmanager
def as_in_training() -> Iterator[None]:
    """Disable torch's fused encoder layers of evaluation mode, which treat additive masks differently."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Trial:
    """A copy of a block with weights and inputs perturbed at random, run on all tokens, some, and some of them twice."""

    def __init__(
        self, block: nn.Module, call: Call, dim: int, dtype: torch.dtype, per_sample: bool, generator: Generator
    ) -> None:
        self.generator, self.dim, self.dtype = generator, dim, dtype
        self.block = moved(block, dtype, generator)
        hidden = hidden_of(*call)
        self.call = mapped(call, lambda _, value: moved_input(value, value is hidden, dtype, generator))
        self.hidden = hidden_of(*self.call)
        self.size, self.tokens = hidden.shape[1 - dim], hidden.shape[dim]
        self.per_sample = per_sample
        self.plain, self.rest = split_output(self.run(self.call))
        if self.plain.shape != self.hidden.shape:
            raise CannotTake(
                f"it returns a hidden state of shape {tuple(self.plain.shape)} for one of {tuple(self.hidden.shape)}"
            )

    def run(self, call: Call, tables: Mapping[str, tuple[int, ...]] | None = None, index: Tensor | None = None) -> Any:
        with tables_at(self.block, tables, index) if tables and index is not None else nullcontext():
            return called(self.block, call)

    def _some(self, count: int) -> Tensor:
        """Return positions of ``count`` tokens, ascending: (k,), or (B, k) with different ones per sample."""
        rows = [
            torch.randperm(self.tokens, generator=self.generator)[:count].sort().values
            for _ in range(self.size if self.per_sample else 1)
        ]
        return (torch.stack(rows) if self.per_sample else rows[0]).to(self.hidden.device)

    def mixes_samples(self) -> bool:
        """Return whether the assumed samples affect each other, in which case they are tokens (with T = B)."""
        turned, one = self.hidden.clone(), self.size // 2
        turned.select(1 - self.dim, one).neg_()
        call = mapped(self.call, lambda _, value: turned if value is self.hidden else value)
        moved = (split_output(self.run(call))[0] - self.plain).movedim(1 - self.dim, 0)
        others = torch.cat([moved[:one], moved[one + 1 :]])
        return bool(others.abs().max() > TOLERANCE[self.dtype] * moved[one].abs().max()) if len(others) else False

    def refuted(self, plan: Plan) -> str | None:
        """Return why fewer tokens cannot be passed in this way; None if they can."""
        try:
            whole, half = self._some(self.tokens), self._some(self.tokens // 2)
            every = split_output(self.run(plan.fewer(self.call, whole), plan.tables, whole))[0]
            fewer = plan.fewer(self.call, half)
            some, rest = split_output(self.run(fewer, plan.tables, half))
            pairs = half.repeat_interleave(2, dim=-1)
            with self._own_doubled():
                twice = split_output(self.run(_doubled(fewer, plan), plan.tables, pairs))[0]
        except Exception as error:
            caches = [told(path, value) for path, value in leaves(self.call) if is_cache(value)]
            without = f" and without {caches[0]}" if caches else ""
            return f"on some of its tokens{without} it fails ({first_line(error)})"
        if not self._close(every, self.plain, self.hidden):
            return "on all tokens, selected by index and without caches, it computes something else than plainly"
        hidden = hidden_of(*fewer)
        if some.shape != hidden.shape:
            return f"for an input of shape {tuple(hidden.shape)} it returns {tuple(some.shape)}"
        if not self._close(twice.narrow(self.dim, 1, twice.shape[self.dim] - 1)[_every_second(self.dim)], some, hidden):
            return (
                "its output depends on token positions in other ways than the given masks, positions and tables (such as"
                " relative biases, convolutions, windows and its own position tables)"
            )
        for full, part in zip(self.rest or (), rest or (), strict=True):
            if isinstance(part, Tensor) and part.shape != full.shape and not _is_bias(part, fewer):
                return f"it also returns {tuple(full.shape)}, which cannot be restored from some tokens"
        return None

    @contextmanager
    def _own_doubled(self) -> Iterator[None]:
        """Double the tokens that the block itself adds, such as prompts and prefixes."""
        with ExitStack() as scope:
            for m in self.block.modules():
                if isinstance(m, Derived) and hasattr(m, "twice"):
                    scope.enter_context(cast(Any, m).twice())
            yield

    def _close(self, got: Tensor, expected: Tensor, hidden: Tensor) -> bool:
        if got.shape != expected.shape:
            return False
        scale = (expected - hidden).abs().max() if expected.shape == hidden.shape else expected.abs().max()
        return bool((got - expected).abs().max() <= TOLERANCE[self.dtype] * scale + 1e-12)


def _is_bias(part: Tensor, call: Call) -> bool:
    """Return whether an output has the shape and value of an input, as position biases that blocks pass on have."""
    return any(isinstance(v, Tensor) and v.shape == part.shape and torch.equal(v, part) for _, v in leaves(call))


def _every_second(dim: int) -> tuple[slice, ...]:
    return (slice(None),) * dim + (slice(None, None, 2),)


def _doubled(call: Call, plan: Plan) -> Call:
    def double(path: Path, value: Any) -> Any:
        for dim in (plan.dim,) if path == plan.hidden else plan.dims.get(path, ()):
            value = value.repeat_interleave(2, dim=dim)
        return value

    return mapped(call, double)


def moved_input(value: Any, hidden: bool, dtype: torch.dtype, generator: Generator) -> Any:
    """Return an input of a trial: noise for the hidden state, other numbers perturbed a little unless they mask."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if not value.is_floating_point():
        return value.clone()
    noise = torch.randn(value.shape, generator=generator, dtype=dtype).to(value.device)
    if hidden:
        return noise
    return torch.where(value > BLIND, value.to(dtype) + 0.1 * noise, value.to(dtype))


def called(block: nn.Module, call: Call) -> Any:
    """Return a block's output in a trial; changes to its inputs do not affect the next one."""
    args, kwargs = mapped(call, lambda _, v: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v))
    with as_in_training():
        return block(*args, **kwargs)


def moved(block: nn.Module, dtype: torch.dtype, generator: Generator) -> nn.Module:
    """Return a copy of the block in ``dtype`` and evaluation mode, with each parameter perturbed by about its own size."""
    block = getattr(block, "_orig_mod", block)
    # leave out hooks that observe the block, which may hold objects that cannot be copied
    memo: dict[int, Any] = {
        id(hook): None
        for m in block.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks)
        for hook in hooks.values()
        if not type(hook).__module__.startswith("torch.nn.utils")
    }
    other = copy.deepcopy(block, memo).to(dtype).eval()
    other._compiled_call_impl = None
    for m in other.modules():
        for hooks in (m._forward_hooks, m._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is None]:
                del hooks[key]
    for p in other.parameters():
        fan = p.shape[-1] if p.ndim > 1 else 100
        step = torch.randn(p.shape, generator=generator, dtype=dtype) * 0.5 / fan**0.5
        p.data.add_(step.to(p.device))
    return other
