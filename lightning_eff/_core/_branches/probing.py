"""Find the structure of a module that has not run yet, by one pass over generated inputs without a trace.

Values do not matter, and shapes hardly do; only which tensor is added to which. So a Trainer before its first batch and
``lightning_eff.apply`` without a Trainer find the same.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_eff._core import rng
from lightning_eff._core._branches.example_inputs import Call, calls_of, hidden_states, step_batches
from lightning_eff._core._branches.finding import branches, heads, outputs
from lightning_eff._core._branches.graph import Graph, Node, TooLarge, kind
from lightning_eff._core._lightning.names import is_a, is_overridden
from lightning_eff._core._stack.compiled import uncompiled
from lightning_eff._core._stack.finding import candidates, listed, repeated
from lightning_eff._core.patches import hook_before
from lightning_eff._core.steps import in_evaluation, looking_on, silent, takes_index

WAYS_OUT = (
    "Give a batch, lightning_eff.apply(module, technique, batch=batch); or an example_input_array to the LightningModule; or"
    " the names of the layers in which branches end, branches=[...]"
)


class Divided(ValueError):
    """The module's parameters are sharded, so it cannot run a pass alone."""


class Probe(NamedTuple):
    """The result of one pass.

    Attributes:
        graph: the graph.
        of: a description of what was run on which input.
        heads: names of the weights of layers that compute its outputs, or inputs of its losses; often empty.
    """

    graph: Graph
    of: str
    heads: list[str]


def probed(module: nn.Module, *, who: str, batch: Any = None) -> Probe:
    """Run one forward pass of ``module``, or of its largest callable part, in which residual branches are found.

    The attempts are, in this order: the given batch, in the module's own ``training_step`` or as arguments; a LightningModule's
    ``example_input_array``; the module, then the part in it with most parameters, on inputs generated from its config,
    embeddings, convolutions and linear layers; its stack of blocks on hidden states; its ``training_step`` on batches of such
    inputs. Each pass is in evaluation mode, and leaves no trace.

    It returns the first pass in which every block of every stack takes part, otherwise the one with most blocks.

    Args:
        module: the module. Parameters may be on the meta device if no code depends on values.
        who: the technique's name, for messages.
        batch: a batch of the module's data.

    Raises:
        Divided: if parameters are already sharded.
        ValueError: if nothing ran, or nothing that ran has a residual branch, with the attempts and the fixes.
    """
    tried: list[str] = []
    best: Probe | None = None
    most, blocks = -1, _blocks(module)
    for of, call in attempts(module, batch):
        try:
            with aside(module), looking_on(), _followed(module):
                graph, made = _graph(call(), module)
        except TooLarge as e:
            raise ValueError(f"{who}: {of} has {e}. {WAYS_OUT}, so that it is not looked through.") from e
        except Exception as e:  # the module may not accept this input, but the next one
            tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:120] if str(e) else ''})")
            if batch is not None:
                raise ValueError(f"{who}: {tried[0]}. Give a batch as the module's train loader does.") from e
            continue
        if graph is not None and branches(graph):
            met = _met(graph, blocks)
            if met > most:
                best, most = Probe(graph, of, _heads(graph, made)), met
            if met == len(blocks):
                break
        else:
            tried.append(f"{of} ran, and {_nothing(graph)}")
        if batch is not None:
            break
    if best is not None:
        return best
    divided = next((name for name, p in module.named_parameters() if isinstance(p, DTensor)), None)
    if divided is not None:
        raise Divided(
            f"{who}: {divided} is already sharded (DTensor), so {type(module).__name__} cannot run alone to show what it"
            f" computes. Call lightning_eff.apply(self, {who}(...)) in configure_model before it shards the module."
        )
    stacks = listed(repeated(module))
    ran = [one for one in tried if " ran, " in one]
    name = type(module).__name__
    if tried and not ran:
        trouble = f"could not look for residual branches, because {name} does not run on made-up inputs: {tried[0]}"
    else:
        trouble = f"found no residual branch, x + f(x), in {name}: {'; '.join(ran[:3]) or 'there was nothing to run'}"
    raise ValueError(
        f"{who}: {trouble}. Stacks of blocks: {stacks}. Weights of layers: {_maps(module)}. {WAYS_OUT}. Or remove {who}."
    )


def graph_of(module: nn.Module, *, who: str) -> Graph:
    """Return the graph of one forward pass over generated inputs, with or without residual branches, without a trace.

    The attempts are those of :func:`probed` that run the module's own code. It returns the first pass in which every parameter
    takes part, otherwise the one with most parameters.

    Raises:
        ValueError: if nothing ran, with the attempts.
    """
    tried: list[str] = []
    best: Graph | None = None
    count = sum(1 for _ in module.parameters())
    for of, call in attempts(module, None, blocks=False):
        try:
            with aside(module), looking_on():
                graph, _ = _graph(call(), module)
        except Exception as e:  # the module may not accept this input, but the next one
            tried.append(f"{of} raised {type(e).__name__} ({str(e).splitlines()[0][:120] if str(e) else ''})")
            continue
        if graph is not None and (best is None or len(graph.leaves) > len(best.leaves)):
            best = graph
            if len(graph.leaves) == count:
                break
    if best is None:
        raise ValueError(
            f"{who}: {type(module).__name__} does not run on made-up inputs ({'; '.join(tried[:2]) or 'nothing to run'}). Give"
            " it an example_input_array that its forward accepts."
        )
    return best


def _nothing(graph: Graph | None) -> str:
    """Return why a pass shows no residual sum."""
    if graph is not None and any(kind(node) == "CopySlices" and len(ins) > 1 for node, ins in graph.inputs.items()):
        return "changes a view in place, which hides what is added to it (write y = y + x instead of y += x)"
    return "adds no tensor to one computed from it by a linear layer"


def _blocks(module: nn.Module) -> list[str]:
    """Return the path prefixes of the outermost blocks of all stacks."""
    found = [prefix for stack in repeated(module) if stack.composite for prefix in stack.prefixes]
    return [path for path in found if not any(path != other and path.startswith(other) for other in found)]


def _met(graph: Graph, blocks: list[str]) -> int:
    seen = [name for name, _ in graph.leaves.values()]
    return sum(any(name.startswith(path) for name in seen) for path in blocks)


def _maps(module: nn.Module) -> str:
    names = [name for name, p in module.named_parameters() if p.ndim > 1]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") if names else "none"


def attempts(module: nn.Module, batch: Any, *, blocks: bool = True) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield passes that ``module`` may run, most likely first, each with a description; run them inside :func:`aside`.

    Args:
        module: the module.
        batch: a batch of its data; None generates some.
        blocks: also run the blocks of its stack one after another, independent of the module's own code.
    """
    if batch is not None:
        yield "the batch that was given", lambda: _on_batch(module, batch)
        return
    example = getattr(module, "example_input_array", None)
    if is_a(module, LightningModule) and example is not None:
        yield "forward on example_input_array", lambda: _handed(module, example)
    for path, part in _parts(module):
        for what, call in calls_of(part):
            yield (
                f"{path or 'the module'} ({type(part).__name__}) on {what}",
                lambda part=part, call=call: _made(part, call),
            )
    for stack in repeated(module)[:2] if blocks else ():
        chain = stack.blocks
        for what, hidden in hidden_states(chain[0]):
            yield f"the blocks at {stack} on {what}", lambda chain=chain, hidden=hidden: _through(chain, hidden)
    if is_a(module, LightningModule) and is_overridden("training_step", module) and module.automatic_optimization:
        for what, made in step_batches(module):
            yield f"training_step on {what}", lambda made=made: _on_batch(module, made)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module``, then its part with most parameters, and so on, as far as they can be called."""
    path, part = "", module
    while True:
        own = type(part).forward is not nn.Module.forward
        if own and not (is_a(part, LightningModule) and not is_overridden("forward", part)):
            yield path, part
        inner = max(part.named_children(), key=lambda child: _size(child[1]), default=None)
        if inner is None or 2 * _size(inner[1]) < _size(part) or isinstance(inner[1], nn.ModuleList | nn.ModuleDict):
            return
        path, part = (f"{path}.{inner[0]}" if path else inner[0]), inner[1]
        if any(stack.container is part for stack in candidates(nn.ModuleDict({"part": part}))) and path:
            return  # the blocks themselves


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _made(part: nn.Module, call: Call) -> Any:
    return part(*call.args, **call.kwargs)


def _handed(module: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return module(**example)
    return module(*example) if isinstance(example, tuple) else module(example)


def _on_batch(module: nn.Module, batch: Any) -> Any:
    if is_a(module, LightningModule) and is_overridden("training_step", module):
        step = module.training_step
        return step(batch, *((0,) if takes_index(step) else ()))
    return _handed(
        module, tuple(batch) if isinstance(batch, list) else dict(batch) if hasattr(batch, "keys") else batch
    )


def _through(blocks: list[nn.Module], hidden: Tensor) -> Tensor:
    for block in blocks:
        output = block(hidden)
        hidden = output[0] if isinstance(output, tuple | list) else output
    return hidden


def _graph(output: Any, module: nn.Module) -> tuple[Graph | None, list[Node]]:
    """Return the graph of all outputs of a pass, and the outputs' nodes."""
    if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None]
    if not found:
        return None, []
    loss = found[0].sum()
    for t in found[1:]:
        loss = loss + t.sum()
    return Graph(loss, module), [t.grad_fn for t in found]


def _heads(graph: Graph, made: list[Node]) -> list[str]:
    """Return the heads of losses, or of the first output, without layers of residual branches, with which hidden states end."""
    every = branches(graph)
    inside = {end.weight for branch in every for end in branch.last} | {
        name for branch in every for name in branch.inner
    }
    return [name for name in heads(graph) or outputs(graph, made[0]) if name not in inside]


@contextmanager
def _followed(module: nn.Module) -> Iterator[None]:
    """Give blocks whose input is the batch an input with gradients, because autograd would not show their sums otherwise."""

    def give(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [*args, *kwargs.values()]
        at = next((i for i, t in enumerate(given) if isinstance(t, Tensor) and t.is_floating_point()), None)
        if at is not None and not given[at].requires_grad:
            given[at] = given[at].detach().requires_grad_().clone()  # a leaf could not be changed in place
        return tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True))

    with ExitStack() as scope:
        for stack in repeated(module):
            for block in stack.blocks:
                scope.callback(hook_before(block, give, with_kwargs=True).remove)
        yield


@contextmanager
def aside(module: nn.Module) -> Iterator[None]:
    """Give all parameters gradients, disable compilation, and restore all state that a pass draws, counts or logs."""
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point() and p.is_leaf]
    with ExitStack() as scope:
        scope.enter_context(torch.enable_grad())
        scope.enter_context(rng.fork())
        scope.enter_context(in_evaluation(module.modules()))
        scope.enter_context(silent(cast(LightningModule, module)))
        scope.enter_context(uncompiled())
        for p in frozen:
            scope.callback(p.requires_grad_, False)
            p.requires_grad_(True)
        yield
