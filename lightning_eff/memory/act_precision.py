"""Compressed activations as a precision plugin around another one (ActNN: Chen et al. 2021, arXiv:2104.14129)."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, needs_memory_bound
from lightning_eff._core.wrapping import WrappingPrecision
from lightning_eff.memory._compression.arguments import Method, check_arguments, check_not_compiled
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.ledger import Ledger
from lightning_eff.memory._compression.ranges import RunningRanges, of_rank
from lightning_eff.memory._compression.report import refuse_idle


class ACTPrecision(WrappingPrecision):
    """Train with another precision plugin, and hold what the forward pass saves in 8, 4 or 2 bits an element.

    ``Trainer(plugins=[ACTPrecision(bits=4, inner="bf16-mixed")])``. What is compressed and how is what
    :class:`lightning_eff.ActivationCompression` says of itself, apart from the batch, which a plugin does not see: its
    floating-point tensors are compressed where an operation saves them. The callback form can do more (``bits="auto"``,
    ``layers``, logging); this one works with trainers whose callbacks are not one's own to choose.

    Everything but the training step's forward pass is the inner plugin's: casts, autocast, loss scaling, clipping and
    its state in checkpoints. A checkpoint saved with the inner plugin alone can be resumed with this one.

    Attributes:
        inner: the plugin inside.
        ledger: the bytes that the last training step held between forward and backward, by category.

    Args:
        bits: 8, 4 or 2.
        inner: "32-true", "64-true", "16-true", "bf16-true" or "bf16-mixed", or a Precision plugin, such as
            ``MixedPrecision("16-mixed", "cuda")``. Tensors in float64 are not compressed.
        method: "group", or "mesa", which needs ``bits=8``; its running ranges are part of this plugin's state.
        group_size: elements that share scale and minimum, a power of two from 16 to 8192; "mesa" does not use it.
        stochastic_rounding: round up with the probability that makes the mean right; else to nearest, which is biased.

    Raises:
        ValueError: if an argument is out of range; at setup, if a submodule is compiled; in the first step, before any
            weight changes, if nothing that it saves can be compressed.
        TypeError: if ``inner`` is neither a name nor a Precision plugin, or is such a plugin as this one.
    """

    saves: ClassVar[str] = "activation memory: 4, 7 or 12 times less at 8, 4 or 2 bits, or more"
    paper: ClassVar[str] = "Chen et al. 2021, arXiv:2104.14129; Pan et al. 2021, arXiv:2111.11124"
    constraints: ClassVar[str] = "no compiled submodules; time for coding and decoding; noise in the gradient"
    survey: ClassVar[Survey | None] = Survey("activation compressed training", zhuang="3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"bits": Choice((2, 4, 8))}, needs_memory_bound)

    def __init__(
        self,
        bits: Literal[2, 4, 8] = 4,
        inner: str | Precision = "32-true",
        *,
        method: Method = "group",
        group_size: int = 256,
        stochastic_rounding: bool = True,
    ) -> None:
        check_arguments("ACTPrecision", bits=bits, method=method, group_size=group_size)
        if bits not in (2, 4, 8):
            raise ValueError(
                f"ACTPrecision({bits=}): expected 8, 4 or 2 bits. Sensitivities for 'auto' take passes of their own,"
                " which a precision plugin cannot run: use ActivationCompression(bits='auto')."
            )
        super().__init__(inner)
        self.compresses = bits
        self.method = method
        self.group_size = group_size
        self.stochastic_rounding = stochastic_rounding
        self._acts = False
        self._engine: Engine | None = None
        self._ranges: RunningRanges | None = None
        self._loaded: list[dict[str, Tensor]] | None = None  # the ranges of all ranks

    @property
    def ledger(self) -> Ledger:
        return Ledger() if self._engine is None else self._engine.ledger

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with super().train_step_context():
            if self._module is None:  # outside of a Trainer
                yield
                return
            if self._engine is None:
                self._engine = self._make_engine(self._module)
            learns = torch.is_grad_enabled()  # a pass that only scores samples has nothing to save
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
        """The running ranges of every rank, each of which has its own."""
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
        self._acts = self._passes > 0  # a resumed run may begin with a pass that scores samples
        self._loaded, self._ranges, self._engine = state_dict.get("ranges"), None, None

    @override
    def teardown(self) -> None:
        super().teardown()
        self._engine = None


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
