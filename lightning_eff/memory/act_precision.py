"""Compressed activations as a precision plugin around another one (ActNN: Chen et al. 2021, arXiv:2104.14129)."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import OneOf
from lightning_eff._core.search_space import Choice, SearchSpace, needs_memory_bound
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.memory._compression.arguments import GroupSize, Method, check_method, check_not_compiled
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.ledger import Ledger
from lightning_eff.memory._compression.ranges import RunningRanges, of_rank
from lightning_eff.memory._compression.report import refuse_idle


class ACTPrecision(WrappingPrecision):
    """Train with another precision plugin, and store activations in 8, 4 or 2 bits per element.

    It compresses the same tensors in the same way as :class:`lightning_eff.ActivationCompression`. One difference: a plugin
    does not see the batch, so floating-point tensors of the batch are compressed where an operation saves them.

    Use the callback where you can, because it has more features (``bits="auto"``, ``layers``, logging). Use this plugin where
    you cannot choose the Trainer's callbacks. It costs the same time and gradient noise.

    The inner plugin does everything else: casts, autocast, loss scaling, clipping and its state in checkpoints. A checkpoint of
    the inner plugin alone can be resumed with this one.

    Attributes:
        inner: the inner plugin.
        ledger: the bytes by category that the last training step held between forward and backward.

    Args:
        bits: the bits per element.
        inner: the precision of the computation. "32-true", "64-true", "16-true", "bf16-true", "bf16-mixed", or a Precision
            plugin, such as ``MixedPrecision("16-mixed", "cuda")``. Float64 tensors are not compressed.
        method: how ranges are found. "group" stores a minimum and scale per group; "mesa" uses running ranges, which are part
            of the plugin's state, and 8 bits.
        group_size: the number of elements that share a minimum and a scale. Not used by "mesa".
        stochastic_rounding: whether to round up or down at random, which is correct on average. Rounding to nearest is biased.

    Raises:
        ValueError: for a value out of range. At setup, if a submodule is compiled. In the first step, before any weight
            changes, if nothing can be compressed.
        TypeError: if ``inner`` is neither a name nor a Precision plugin, or is another ``ACTPrecision``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, plugins=[ACTPrecision(4, inner="bf16-mixed")])

    References:
        Chen et al. 2021, "ActNN", arXiv:2104.14129. Pan et al. 2021, "Mesa", arXiv:2111.11124.
    """

    saves: ClassVar[str] = "activation memory: at least 4, 7 or 12 times less at 8, 4 or 2 bits"
    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2104.14129; Pan et al. 2021, arXiv:2111.11124"
    constraints: ClassVar[str] = "no compiled submodules; costs time for encoding and decoding; adds gradient noise"
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"bits": Choice((2, 4, 8))}, needs_memory_bound)

    @declared
    def __init__(
        self,
        bits: Annotated[
            Literal[2, 4, 8], OneOf(2, 4, 8, hint="For 'auto', use ActivationCompression(bits='auto').")
        ] = 4,
        inner: str | Precision = "32-true",
        *,
        method: Method = "group",
        group_size: GroupSize = 256,
        stochastic_rounding: bool = True,
    ) -> None:
        check_method("ACTPrecision", bits=bits, method=method)
        super().__init__(inner)
        self.compresses = bits
        self.method = method
        self.group_size = group_size
        self.stochastic_rounding = stochastic_rounding
        self._acts = False
        self._engine: Engine | None = None
        self._ranges: RunningRanges | None = None
        self._loaded: list[dict[str, Tensor]] | None = None  # the running ranges of all ranks

    @property
    def ledger(self) -> Ledger:
        return Ledger() if self._engine is None else self._engine.ledger

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with super().train_step_context():
            if self._module is None:  # outside a Trainer
                yield
                return
            if self._engine is None:
                self._engine = self._make_engine(self._module)
            learns = torch.is_grad_enabled()  # a pass that only scores samples saves nothing
            with self._engine.forward(self.seed(), ()):
                yield
            if not self._acts and learns and self._engine.ledger.exact_bytes:
                refuse_idle("ACTPrecision", self._engine.ledger)
                self._acts = True

    def _make_engine(self, module: nn.Module) -> Engine:
        if self.method == "mesa" and self._ranges is None:
            rank = torch.distributed.get_rank() if _is_distributed() else 0
            self._ranges = RunningRanges(None if self._loaded is None else of_rank(self._loaded, rank))
        return Engine(
            module,
            bits=self.compresses,
            group_size=self.group_size,
            ranges=self._ranges,
            stochastic=self.stochastic_rounding,
        )

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        module = super().convert_module(module)
        check_not_compiled("ACTPrecision", module)
        self._engine = None
        return module

    @override
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.method == "mesa":
            state["ranges"] = self._gathered_ranges()
        return state

    def _gathered_ranges(self) -> list[dict[str, Tensor]] | None:
        """Gather the running ranges of all ranks."""
        if self._ranges is None:
            return self._loaded
        own = self._ranges.state_dict()
        if not _is_distributed():
            return [own]
        of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, own)
        return of_ranks

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._acts = self._passes > 0  # a resumed run may begin with a pass that only scores samples
        self._loaded, self._ranges, self._engine = state_dict.get("ranges"), None, None

    @override
    def teardown(self) -> None:
        super().teardown()
        self._engine = None


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
