"""Runs an evaluation step on every pipeline rank at once: a block's owner runs it and sends its output to all ranks.

So every rank runs the whole step with the values of one process. All ranks have its results, logged values, lists and metrics.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.strategies._pipeline._everywhere.sending import broadcast
from lightning_eff.strategies._pipeline.shared_state import Ground
from lightning_eff.strategies._pipeline.streams import Stream
from lightning_eff.strategies._pipeline.view import Run

_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, nn.Module)
_FILLED = (list, dict, set)


class Lockstep(Run):
    """One step on this rank, together with the other ranks.

    Args:
        ground: the module and its layout.
        stream: the random numbers.
    """

    def __init__(self, ground: Ground, stream: Stream) -> None:
        self._ground, self._rank = ground, dist.get_rank(ground.group)
        self._calls = 0
        self._called: set[int] = set()
        super().__init__(ground.stack, stream)

    @override
    def runs(self, index: int) -> bool:
        return self._owner(index) == self._rank

    def _owner(self, index: int) -> int:
        where = self._ground.layout
        return where.ranks[where.stage_of(index)]

    @override
    def call(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the block's output from the rank that owns it; collective over the pipeline."""
        ground, number = self._ground, self._calls
        what = f"{ground.who}: block {index} of {ground.stack.path!r}"
        values = [*args, *kwargs.values()]
        self._check(what, index, values)
        self._calls += 1
        self._called.add(index)
        given = [value for value in values if isinstance(value, Tensor)]
        output, left = None, ()
        if self.runs(index):
            sizes = [len(value) for value in values if isinstance(value, _FILLED)]
            self.stream.enter(number)
            before = self.stack.beside.before(index)
            output = block(*args, **kwargs)
            left = self.stack.beside.left(index, before, ())
            if sizes != [len(value) for value in values if isinstance(value, _FILLED)]:
                raise ValueError(
                    f"{what} adds to a list or a dict of the step, but the other pipeline ranks do not run this block and would"
                    " miss the value. Return it from the block instead, or use pipeline_parallel_size=1."
                )
        place = (self.stream.number, number, index)
        told, output, left = broadcast((place, output, left), self._owner(index), ground.group, ground.device, given)
        if told != place:
            raise ValueError(
                f"{what} is call {number} of evaluation step {self.stream.number} on pipeline rank {self._rank}, but another"
                f" rank is at block {told[2]}, call {told[1]} of step {told[0]}. Let the step call the same blocks on every"
                " rank, independently of self.global_rank."
            )
        if not self.runs(index):
            self.stack.beside.put(index, left)
        self.stream.leave(number)
        return output

    def _check(self, what: str, index: int, values: list[Any]) -> None:
        """Raise ``ValueError`` for what ranks cannot share."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{what} is called with gradients enabled in an evaluation step, but no gradient is sent between pipeline"
                " ranks there. Remove torch.enable_grad() around it, or use pipeline_parallel_size=1."
            )
        kept = next((v for v in values if not isinstance(v, (*_PLAIN, tuple, *_FILLED))), None)
        if index in self._called and kept is not None:
            raise ValueError(
                f"{what} is called twice in a step with a {type(kept).__name__}, in which each block stores values only on"
                " its own pipeline rank. Turn the cache off (use_cache=False), or use pipeline_parallel_size=1."
            )
