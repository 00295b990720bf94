"""Records the inputs of layers and the gradients at their outputs, in one forward and backward pass of an unchanged step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core.patches import hook_behind

Take = Callable[[nn.Module, Tensor, Tensor], None]

REENTRANT = (
    "KFAC: a part of the network is checkpointed with use_reentrant=True, which hides the gradients at its layers. Set"
    " use_reentrant=False (in transformers gradient_checkpointing_kwargs={'use_reentrant': False}), or use"
    " fisher='empirical', which needs no separate pass."
)


class _Hold(torch.autograd.Function):
    """Saves a tensor through autograd, so that checkpointing, offloading and compression handle it."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return anchor.clone()

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


class Taps:
    """Passes each call of some modules to ``take``, once a backward pass computes the gradient at its output.

    A recomputed call counts once, in both kinds of checkpointing. A call without a graph has no gradient, and neither has the
    graph of a second run for saved tensors. The hooks must stay until the end of the backward pass, because a second run must
    save as many tensors as the first.

    Args:
        weights: the modules with their weights. Calls while a weight is frozen are skipped.
        take: function of the module, its input and the gradient.

    Attributes:
        armed: whether gradients are passed to ``take``.
        edges: graph edges of the outputs of calls until :meth:`close`.
    """

    def __init__(self, weights: Mapping[nn.Module, nn.Parameter], take: Take) -> None:
        self.armed = False
        self.edges: list[GradientEdge] = []
        self._weights, self._take = weights, take
        self._open = True
        self._handles: list[RemovableHandle] = [hook_behind(m, self._see, with_kwargs=True) for m in weights]

    def close(self) -> None:
        """Note the end of the forward pass."""
        self._open = False

    def remove(self) -> None:
        """Remove the hooks; further calls do nothing."""
        self.armed = self._open = False
        while self._handles:
            self._handles.pop().remove()
        self.edges = []

    def _see(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (torch.is_grad_enabled() and isinstance(output, Tensor) and output.requires_grad):
            return
        given = args[0] if args else next(iter(kwargs.values()), None)
        if not self._weights[owner].requires_grad or not isinstance(given, Tensor):
            return
        anchor = torch.empty(0, device=given.device, requires_grad=True)
        held: list[Tensor] = [_Hold.apply(anchor, as_computed(given.detach()))]  # pyright: ignore[reportAssignmentType]

        def take(gradient: Tensor) -> None:
            if self.armed and held:
                kept = held.pop()  # the node goes with its tensor, and what it saved with it
                (value,) = kept.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
                with torch.no_grad():
                    self._take(owner, value, gradient)

        output.register_hook(take)
        if self._open:
            self.edges.append(get_gradient_edge(output))


def as_computed(given: Tensor) -> Tensor:
    """Return a copy of a layer's input in autocast's type, which is valid after the input is overwritten."""
    kind = given.device.type
    if torch.is_autocast_enabled(kind) and given.is_floating_point() and given.dtype is not torch.float64:
        return given.to(torch.get_autocast_dtype(kind))
    return given


def last_reached(roots: Iterable[Tensor], edges: Sequence[GradientEdge]) -> list[GradientEdge]:
    """Return the ``edges`` after which a backward pass reaches no other edge. A pass up to them visits all edges.

    Args:
        roots: the tensors at which the backward pass begins.
        edges: edges of the graph. Those that ``roots`` do not reach are skipped.

    Raises:
        ValueError: if a part of the graph is only created in the backward pass.
    """
    wanted = {edge.node for edge in edges}
    reaches: dict[Any, bool] = {}  # whether it is an edge, or reaches one
    last: set[Any] = set()
    for root in roots:
        stack: list[tuple[Any, list[Any]]] = []
        node = root.grad_fn
        if node is not None and node not in reaches:
            stack = [(node, _following(node))]
            reaches[node] = False
        while stack:
            node, left = stack[-1]
            if left:
                child = left.pop()
                if child not in reaches:
                    reaches[child] = False
                    stack.append((child, _following(child)))
                    continue
                reaches[node] |= reaches[child]
                continue
            stack.pop()
            if node in wanted:
                if not reaches[node]:
                    last.add(node)
                reaches[node] = True
            if stack:
                reaches[stack[-1][0]] |= reaches[node]
    return [edge for edge in edges if edge.node in last]


def _following(node: Any) -> list[Any]:
    if node.name() == "CheckpointFunctionBackward":
        raise ValueError(REENTRANT)
    return [following for following, _ in node.next_functions if following is not None]
