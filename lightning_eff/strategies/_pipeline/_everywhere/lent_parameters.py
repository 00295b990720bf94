"""Lends parameters outside the blocks to all pipeline ranks during an evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff.strategies._pipeline._everywhere.sending import broadcast
from lightning_eff.strategies._pipeline.memory import Gone, registered
from lightning_eff.strategies._pipeline.shared_state import Ground


class Lent:
    """The parameters outside the blocks that this rank does not hold.

    The first step of an evaluation fetches the values, and :meth:`drop` frees them. Buffers outside the blocks get the values
    of the last stage, because only it runs all code that changes them in training.

    Args:
        ground: the module and its layout.
        sources: names of parameters outside the blocks that not all ranks hold, each with a rank that holds it.
        gone: parameters that this rank freed, by name.
    """

    def __init__(self, ground: Ground, sources: dict[str, int], gone: dict[str, Gone]) -> None:
        self._ground, self._sources, self._gone = ground, sources, gone
        self._values: dict[str, Tensor] = {}
        self._here = False

    def drop(self) -> None:
        """Free the values; the next evaluation fetches new ones."""
        self._values.clear()
        self._here = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Register the parameters until the context ends; collective over the pipeline if they are not here yet."""
        if not self._here:
            with torch.inference_mode(False), torch.no_grad():
                self._fetch()
            self._here = True
        instead: list[tuple[nn.Module, str, Tensor]] = []
        for name, value in self._values.items():
            gone = self._gone[name]
            if isinstance(value, DTensor):
                parameter = nn.Parameter(value, requires_grad=False)
            else:
                parameter, gone.parameter.data = gone.parameter, value  # other objects can refer to it, as in an LSTM
            for m, key in gone.places:
                instead.append((m, key, m.__dict__.pop(key)))
                m._parameters[key] = parameter
        try:
            yield
        finally:
            for m, key, placeholder in instead:
                del m._parameters[key]
                m.__dict__[key] = placeholder
            for name, value in self._values.items():
                if not isinstance(value, DTensor):
                    self._gone[name].parameter.data = self._gone[name].like

    def _fetch(self) -> None:
        ground, me = self._ground, dist.get_rank(self._ground.group)
        for name, source in self._sources.items():
            gone = self._gone.get(name)
            like = registered(ground.module, name) if gone is None else gone.like
            local = like.to_local() if isinstance(like, DTensor) else like
            sent = (
                local.detach().contiguous()
                if me == source
                else torch.empty(local.shape, dtype=local.dtype, device=local.device)
            )
            dist.broadcast(sent, group_src=source, group=ground.group)
            if gone is not None and isinstance(like, DTensor):
                mesh, places = like.device_mesh, like.placements
                sent = DTensor.from_local(sent, mesh, places, run_check=False, shape=like.shape, stride=like.stride())
            if gone is not None:
                self._values[name] = sent
        inside = {id(m) for block in ground.stack.blocks for m in block.modules()}
        outside = [m for m in ground.module.modules() if id(m) not in inside]
        buffers = [b for m in outside for b in m._buffers.values() if b is not None and not b.is_meta]
        if buffers:
            last = ground.layout.last_rank
            for mine, theirs in zip(buffers, broadcast(buffers, last, ground.group, ground.device), strict=True):
                if me != last:
                    mine.copy_(theirs)
