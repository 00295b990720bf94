"""Store the outputs of matmuls and attention and recompute the rest: torch's selective checkpointing, block by block."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_eff.memory._recompute.execution_context import Buffers, rewound

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@functools.cache
def kept_operations() -> dict[Any, int | None]:
    """Map the operations whose output is stored to the position of their dropout probability, for attention."""
    found: dict[Any, int | None] = {getattr(torch.ops.aten, name).default: None for name in _MATMULS}
    for name in _ATTENTION:
        if hasattr(torch.ops.aten, name):
            operation = getattr(torch.ops.aten, name).default
            found[operation] = [argument.name for argument in operation._schema.arguments].index("dropout_p")
    if hasattr(torch.ops.higher_order, "flex_attention"):
        found[torch.ops.higher_order.flex_attention] = None
    return found


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return torch's policy for an operation's output.

    Attention with dropout is recomputed. If its output were stored, it would draw no random numbers, and later dropout would
    get other masks than in the forward pass.
    """
    kept = kept_operations()
    if operation not in kept:
        return CheckpointPolicy.PREFER_RECOMPUTE
    place = kept[operation]
    if place is not None and kwargs.get("dropout_p", args[place] if len(args) > place else 0.0) > 0.0:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def warn_on_cpu(device: torch.device) -> None:
    """Warn if blocks run on a CPU, where the policy is a bad bargain."""
    if device.type == "cpu":
        rank_zero_warn(
            "Rematerialization(policy='selective'): on a CPU it saves little memory for much time. It stores the outputs of all"
            " matrix products, which are about 11 of the 18 activations of a transformer block, and the other operations, which"
            " are cheap on a GPU, take long to compute again. Use policy='full', or policy='optimal' with a memory_budget."
        )


class Selective:
    """Runs blocks under torch's selective checkpointing, with buffers that the second run does not change.

    Attributes:
        reruns: the forward calls of blocks that backward passes have added so far.

    Args:
        blocks: the stack.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.reruns = 0
        self._buffers = [Buffers(list(block.modules())) for block in blocks]

    def call(self, index: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run block ``index`` as ``run(*args, **kwargs)``."""
        contexts = functools.partial(self._contexts, self._buffers[index])
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _contexts(self, buffers: Buffers) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the first and the second run. Buffers are handled outside torch's modes, which count."""
        keeping, giving = create_selective_checkpoint_contexts(policy)
        changed: list[Any] = []

        @contextmanager
        def first() -> Iterator[None]:
            before = buffers.before()
            with keeping:
                yield
            changed.extend(buffers.changed(before))

        @contextmanager
        def again() -> Iterator[None]:
            self.reruns += 1
            with rewound(changed), giving:
                yield

        return first(), again()
