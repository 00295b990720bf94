"""Check that a step's loss comes from the observed loss calls, and word the error if it does not."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_eff._core._targets.passing import Window
from lightning_eff._core.losses import LOSSES

_NAMES = ", ".join(f"F.{fn.__name__}" for fn in LOSSES)
_MEND = (
    "Compute it by one of these functions on the labels of the batch, outside of compiled modules and custom autograd"
    " functions, or remove the technique."
)


def none_seen(
    elsewhere: Sequence[str], still: Sequence[str], module: nn.Module, closed: Any = None, *, on_labels: bool = False
) -> str:
    """Word the error if no loss call was seen; with ``on_labels``, only those on labels could be."""
    if closed is not None:
        return (
            f"the batch holds an object of class {type(closed).__name__}, whose tensors cannot be followed to the loss."
            " Collate batches into tensors, dicts, lists or dataclasses, or remove the technique."
        )
    seen = "none was called on labels" if on_labels else "none was called"
    if elsewhere:
        seen = f"seen were {', '.join(f'F.{name}' for name in elsewhere)}, whose targets come from elsewhere"
    if still:
        seen = (
            f"seen were {', '.join(f'F.{name}' for name in still)} without a gradient, as in a metric, in an autograd"
            " function, or in a checkpoint with use_reentrant=True (use_reentrant=False can be seen)"
        )
    compiled = [name or "the module" for name, m in module.named_modules() if _is_compiled(m)]
    inside = f" Compiled here: {', '.join(compiled[:4])}." if compiled else ""
    return (
        f"no loss call of training_step was seen that has its target from the batch's labels; expected one of {_NAMES}"
        f" ({seen}).{inside} {_MEND}"
    )


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def not_of_them(window: Window, loss: Tensor) -> str | None:
    """Return what is wrong if the step's loss does not come from the changed calls, or labels enter it elsewhere; or None."""
    ours = {output.grad_fn for _, output in window.made} - {None}
    reached = _graph(loss)
    if not ours & reached:
        names = ", ".join(f"F.{call.fn.__name__}" for call, _ in window.made)
        return f"training_step called {names} on the labels, but the loss that it returned does not come of it. {_MEND}"
    for stray in window.follower.strays:
        if stray.output.grad_fn in reached and not ours & _graph(stray.output):
            return (
                f"in training_step the labels {stray.label or 'in the batch'} come into the loss by torch's"
                f" {stray.name!r} with the network's output, outside of an observed loss call; expected them only in"
                f" calls of {_NAMES}. {_MEND}"
            )
    return None


def _graph(tensor: Tensor) -> set[Any]:
    """Return the nodes of the autograd graph of ``tensor``."""
    seen: set[Any] = set()
    todo = deque([tensor.grad_fn])
    while todo:
        node = todo.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(following for following, _ in node.next_functions)
    return seen
