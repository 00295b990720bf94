"""The feed-forward networks that can have experts, whose tokens they route, and whether a block sees later tokens.

Two passes over a batch, or over made-up inputs, show this, without a trace.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.linear_maps import LinearMap, linear_maps, unfit
from lightning_eff._core._branches.ffns import FFN, find_ffns
from lightning_eff._core._branches.probing import aside, attempts, probed
from lightning_eff._core._branches.side_by_side import as_it_was
from lightning_eff._core._run.error_text import first_line
from lightning_eff._core._stack.calls import hidden_of, split_output
from lightning_eff._core._stack.finding import Candidate, repeated
from lightning_eff._core._stack.walking import parameters_of
from lightning_eff._core.passes import restoring
from lightning_eff._core.patches import hook_behind
from lightning_eff._core.steps import looking_on


class Sight(NamedTuple):
    """What a block's outputs depend on.

    Attributes:
        axis: the dimension of the samples.
        samples: their number.
        causal: whether no output depends on a later token.
    """

    axis: int
    samples: int
    causal: bool


@dataclass(frozen=True)
class Network:
    """A feed-forward network that can have experts.

    Attributes:
        layers: its linear layers in the order of their calls, the one back to the stream last.
        block: the path of its block.
        index: the block's index in its stack.
        length: the number of the stack's blocks.
        sight: what the block's outputs depend on.
    """

    layers: tuple[LinearMap, ...]
    block: str
    index: int
    length: int
    sight: Sight

    def __str__(self) -> str:
        return " + ".join(m.path for m in self.layers)


class Found(NamedTuple):
    """The networks, and what the pass in which they were found gave.

    Attributes:
        networks: the networks, in the module's order.
        left: why other networks cannot have experts, by their last layers.
        others: why other residual branches are none, by their last layers.
        layers: the paths of all layers that ran in networks, chosen or not.
        of: a description of the pass.
        outputs: the outputs of the networks' last layers, by path.
    """

    networks: list[Network]
    left: dict[str, str]
    others: dict[str, str]
    layers: list[str]
    of: str
    outputs: dict[str, list[Tensor]]


def sight(given: Tensor, made: Tensor) -> Sight | None:
    """Return what a block's output depends on by gradients; None if they do not show which tokens influence each other.

    Args:
        given: the block's hidden state, with a graph.
        made: its output, of the same shape.
    """
    if given.ndim < 3 or given.shape != made.shape or not (given.requires_grad and made.requires_grad):
        return None

    def seen_from(at: Sequence[int]) -> Tensor:
        one = made[tuple(at)]
        weights = torch.rand(one.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(one)
        (g,) = torch.autograd.grad((one * weights).sum(), given, allow_unused=True, retain_graph=True)
        return torch.zeros_like(given[..., 0]) if g is None else g.abs().amax(-1)

    last = [n - 1 for n in given.shape[:-1]]
    tokens = seen_from(last).nonzero()
    alone = [a for a in range(given.ndim - 1) if bool((tokens[:, a] == last[a]).all())]
    if len(tokens) < 2 or len(alone) != 1:
        return None
    first, *_, later = tokens[:-1].tolist() if len(tokens) > 2 else tokens.tolist()  # the last one may be padding
    return Sight(alone[0], given.shape[alone[0]], causal=not bool(seen_from(first)[tuple(later)] != 0))


class Looked:
    """The calls of blocks in a pass.

    Args:
        blocks: the blocks by their paths.

    Attributes:
        sights: what the outputs of each block depend on, after :meth:`look`.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.sights: dict[str, Sight | None] = {}
        self._blocks = blocks
        self._calls: dict[str, tuple[Tensor, Tensor]] = {}

    def hooked(self) -> AbstractContextManager[None]:
        """Note the calls; the last call of a block counts."""
        return _hooked(self._blocks, self._note)

    def look(self) -> None:
        """Take gradients, while the module is as it was in the pass, because it may be recomputed."""
        self.sights = {path: sight(*call) for path, call in self._calls.items()}
        self._calls.clear()

    def _note(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        try:
            self._calls[path] = hidden_of(args, kwargs), split_output(output)[0]
        except TypeError:  # its hidden state is not among them
            self._calls.pop(path, None)


class Watch:
    """Notes calls of blocks whose arguments are of other kinds than in earlier calls.

    A block can become causal when it gets a mask. The values of masks are not compared, because that would wait for the device.

    Args:
        blocks: the blocks by their paths.

    Attributes:
        on: whether a training step runs now.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.on = False
        self._known: set[tuple[str, Any]] = set()
        self._calls: dict[str, tuple[Tensor, Tensor]] = {}
        self._scope = ExitStack()
        self._scope.enter_context(_hooked(blocks, self._note))

    def close(self) -> None:
        """Remove the hooks."""
        self._scope.close()
        self._calls.clear()

    def sights(self) -> dict[str, Sight | None]:
        """Return the dependencies of each block that was called with new kinds of arguments since the last time."""
        calls, self._calls = self._calls, {}
        return {path: sight(*call) for path, call in calls.items()}

    def _note(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.on:
            return
        key = path, _kinds((args, kwargs))
        if key not in self._known:
            self._known.add(key)
            try:
                self._calls[path] = hidden_of(args, kwargs), split_output(output)[0]
            except TypeError:  # its hidden state is not among them
                self._calls.pop(path, None)


def _kinds(value: Any) -> Any:
    """Return what distinguishes two calls of a block: types and dimensions of tensors, and flags."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, dict):
        return tuple((key, _kinds(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_kinds, value))
    return value if isinstance(value, bool | str | None) else type(value)


def networks_of(root: nn.Module, batch: Any, *, who: str) -> Found:
    """Return the feed-forward networks in the blocks of all stacks.

    Args:
        root: the module.
        batch: a batch of its data; None makes inputs up.
        who: the technique's name.

    Raises:
        ValueError: if no pass shows a feed-forward network, or the blocks' code did not run in it.
    """
    if any(p.is_meta for p in parameters_of(root)):
        raise ValueError(
            f"{who}: weights of {type(root).__name__} are on the meta device, so its blocks cannot run. Apply {who} before the"
            " module is moved there."
        )
    stacks = [stack for stack in repeated(root) if stack.composite]
    probe = probed(root, who=who, batch=batch)
    ffns, others = find_ffns(probe.graph)
    maps = {f"{m.path}.weight": m for m in linear_maps(root)}
    fit: list[list[LinearMap]] = []
    left: dict[str, str] = {}
    for ffn in ffns:
        why = _unfit(ffn, maps)
        if why is None:
            fit.append([maps[part.name] for part in ffn.parts if part.name in maps])
        else:
            left[ffn.parts[-1].name] = why
    order: list[str] = []
    shapes: dict[str, Sequence[int]] = {}
    outputs: dict[str, list[Tensor]] = {}

    def ran(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        order.append(path)
        shapes[path] = hidden_of(args, kwargs).shape
        outputs.setdefault(path, []).append(output.detach())

    layers = {m.path: m.module for found in fit for m in found}
    blocks = {path: block for stack in stacks for path, block in stack.named_blocks.items()}
    looked = Looked(blocks)

    @contextmanager
    def noting() -> Iterator[None]:
        order.clear()
        outputs.clear()
        with _hooked(layers, ran), looked.hooked():
            yield
            looked.look()

    if fit:
        with _alive(root, layers.values()):
            _run_again(root, batch, probe.of, noting, who=who)
    networks: list[Network] = []
    for found in fit:
        made = _network(found, order, shapes, stacks, looked.sights)
        if isinstance(made, str):
            left[f"{found[-1].path}.weight"] = made
        else:
            networks.append(made)
    places = [path for path, _ in root.named_modules()]
    networks.sort(key=lambda one: places.index(one.layers[-1].path))
    lasts = {one.layers[-1].path for one in networks}
    return Found(
        networks, left, others, [*layers], probe.of, {path: seen for path, seen in outputs.items() if path in lasts}
    )


def _unfit(ffn: FFN, maps: dict[str, LinearMap]) -> str | None:
    """Return why a network cannot have experts, or None."""
    weights = [part.name for part in ffn.parts if part.name in maps]
    own = {*weights, *(f"{name.removesuffix('.weight')}.bias" for name in weights)}
    for part in ffn.parts:
        if part.name not in own:
            return f"{part.name} is not a parameter of an nn.Linear or Conv1D, so experts would share it"
    return next((why for name in weights if (why := unfit(maps[name])) is not None), None)


def _network(
    found: list[LinearMap],
    order: list[str],
    shapes: Mapping[str, Sequence[int]],
    stacks: list[Candidate],
    sights: Mapping[str, Sight | None],
) -> Network | str:
    last = found[-1].path
    place = next(
        (
            (block, i, stack)
            for stack in stacks
            for i, block in enumerate(stack.named_blocks)
            if last.startswith(f"{block}.")
        ),
        None,
    )
    if place is None:
        return "it is in none of the repeated blocks"
    block, index, stack = place
    calls = [path for path in order if path in {m.path for m in found}]
    by_call = sorted(found, key=lambda m: calls.index(m.path) if m.path in calls else len(calls))
    if calls != [m.path for m in by_call] * calls.count(last) or by_call[-1].path != last:
        return "its layers were not seen to be called as modules, one after the other"
    seen = sights.get(block) or next((s for path in stack.named_blocks if (s := sights.get(path)) is not None), None)
    if seen is None:
        return (
            f"no pass showed which tokens of {block} influence each other, and which of its dimensions has the samples"
        )
    shape = shapes[by_call[0].path]
    if len(shape) > 2 and (seen.axis > len(shape) - 2 or shape[seen.axis] != seen.samples):
        return f"its input {tuple(shape)} has the {seen.samples} samples of {block} in another dimension"
    return Network(tuple(by_call), block, index, stack.length, seen)


def check_same(root: nn.Module, batch: Any, found: Found, networks: Sequence[Network], *, who: str) -> None:
    """Raise ``ValueError`` if networks whose equal experts compute all tokens compute something else than dense ones did.

    Args:
        root: the changed module, whose experts compute all tokens.
        batch: as in :func:`networks_of`.
        found: what that returned.
        networks: those that have experts.
        who: the technique's name.
    """
    outputs: dict[str, list[Tensor]] = {}

    def ran(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs.setdefault(path, []).append(output.detach())

    layers = {one.layers[-1].path: root.get_submodule(one.layers[-1].path) for one in networks}

    @contextmanager
    def noting() -> Iterator[None]:
        outputs.clear()
        with _hooked(layers, ran):
            yield

    parts = [root.get_submodule(path) for path in found.layers]
    hint = f"Leave its block out of blocks=, or remove {who}."
    try:
        with _alive(root, parts):
            _run_again(root, batch, found.of, noting, who=who)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{who}: {type(root).__name__} does not compute with experts in its feed-forward networks, such as {networks[0]}:"
            f" {first_line(error)}. Its code must take hidden units of any number of tokens. {hint}"
        ) from error
    for path in layers:
        if not _close(outputs.get(path, []), found.outputs[path]):
            raise ValueError(
                f"{who}: {path} returns other values with equal experts than alone, in {found.of}, so the code before it"
                f" does not treat each token separately. {hint}"
            )


def _close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        coarse = 3e-2 if b.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if a.shape != b.shape or float((a.double() - b.double()).norm()) > coarse * float(b.double().norm()) + 1e-12:
            return False
    return True


@contextmanager
def _hooked(modules: Mapping[str, nn.Module], note: Callable[..., None]) -> Iterator[None]:
    """Call ``note`` with the path, arguments and output of each call of these modules."""
    with ExitStack() as scope:
        for path, m in modules.items():

            def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                if torch._C._current_graph_task_id() == -1:  # otherwise a backward pass recomputes it
                    note(path, args, kwargs, output)

            scope.callback(hook_behind(m, hook, with_kwargs=True).remove)
        yield


def _run_again(
    root: nn.Module, batch: Any, of: str, noting: Callable[[], AbstractContextManager[None]], *, who: str
) -> None:
    """Run the pass with this description inside ``noting``, as :func:`probed` did."""
    error: Exception | None = None
    for what, call in attempts(root, batch, blocks=False):
        if what != of:
            continue
        try:
            with as_it_was(root), aside(root), looking_on(), noting():
                call()
            return
        except Exception as e:  # another pass has the same description
            error = e
    if error is not None:
        raise error
    raise ValueError(
        f"{who}: {type(root).__name__} ran only in parts on made-up inputs ({of}), which does not show whether its blocks see"
        f" later tokens. Give a batch, lightning_eff.apply(module, {who}(...), batch=batch), or an example_input_array to the"
        " LightningModule."
    )


@contextmanager
def _alive(root: nn.Module, without: Iterable[nn.Module]) -> Iterator[None]:
    """Give parameters that are zero throughout small values, because gradients would not show what lies behind them.

    Args:
        root: the module.
        without: parts whose parameters stay, because they are compared before and after they change.
    """
    stay = {id(p) for m in without for p in m.parameters()}
    found = [p for p in parameters_of(root) if p.is_floating_point() and p.numel() and id(p) not in stay]
    dead = [p for p in found if not bool(p.detach().any())]
    with restoring(dead):
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in dead:
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) * 0.02)
        yield
