"""DDP communication hooks that send fewer bytes, with state by parameter name, which survives a resume."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, _should_compress, powerSGD_hook
from torch.futures import Future
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a, like
from lightning_eff._core.rng import keyed_generator
from lightning_eff.strategies._communication.codecs import Codec
from lightning_eff.strategies._communication.exchange import (
    Residuals,
    Traffic,
    as_real,
    mean_of_matrices,
    plain_mean,
    redistribute,
    views_of,
)


def refuse_hook(strategy: Strategy, *, who: str) -> None:
    """Raise ``ValueError`` if a DDP strategy has a communication hook of its own."""
    if is_a(strategy, DDPStrategy) and (
        strategy._ddp_comm_hook is not None
        or type(strategy)._register_ddp_hooks is not like(strategy, DDPStrategy)._register_ddp_hooks
    ):
        raise ValueError(
            f"{who}: {type(strategy).__name__} has a communication hook already, and DDP takes only one. Use strategy='ddp',"
            f" or remove {who}."
        )


def run_hook(state: "GradientHook", bucket: GradBucket) -> Future[Tensor]:
    """The function that DDP registers; the hook object is its state."""
    return state.reduce(bucket)


class GradientHook(ABC):
    """A communication hook whose result does not depend on the buckets.

    DDP regroups its buckets after the first step of each process, so the hook stores its state by parameter name.

    Args:
        names: the name of each parameter.
        start_step: number of steps without compression at the start, >= 0.
        seed: random seed, the same on all ranks.

    Attributes:
        step: number of reduced steps.
        traffic: bytes sent in the current step.
        last: bytes sent in the last reduced step.
    """

    def __init__(self, names: dict[Tensor, str], *, start_step: int, seed: int) -> None:
        self.names = names
        self.start_step = start_step
        self.seed = seed
        self.step = 0
        self.traffic = Traffic()
        self.last = Traffic()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Average the bucket's gradients over ranks, in place."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self.begin()
        num_bytes = buffer.numel() * buffer.element_size()
        self.traffic.instead_of(num_bytes, self.world_size)
        if self.step < self.start_step:
            plain_mean([buffer], group=None, traffic=self.traffic)
            future = _done(buffer)
        else:
            future = self.compress(bucket)
        if bucket.is_last():
            self.step += 1
            self.last = self.traffic
        return future

    def begin(self) -> None:
        """Start a step, at its first bucket."""
        self.traffic = Traffic()

    @abstractmethod
    def compress(self, bucket: GradBucket) -> Future[Tensor]:
        """Average the bucket's gradients, sending fewer bytes, and count them."""

    def rewrapped(self, names: dict[Tensor, str]) -> None:
        """Note that DDP was rebuilt with other buckets."""
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state on the CPU in plain containers."""
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, ranks: list[dict[str, Any]]) -> None:
        """Load this rank's state from the states of all ranks of the saved run."""
        self.step, self.seed = ranks[0]["step"], ranks[0]["seed"]

    def _named(self, bucket: GradBucket) -> list[tuple[str, Tensor]]:
        return [(self.names[p], g) for p, g in views_of(bucket)]


class CodecHook(GradientHook):
    """Sends matrices as signs or few-bit codes by :func:`compressed_mean`, and vectors (norms, biases) unchanged.

    Args:
        codec: encodes the matrices.
        error_feedback: add the compression error to the next gradient.
    """

    def __init__(
        self, names: dict[Tensor, str], *, codec: Codec, error_feedback: bool, start_step: int, seed: int
    ) -> None:
        super().__init__(names, start_step=start_step, seed=seed)
        self.codec = codec
        self.residuals = Residuals() if error_feedback else None

    @override
    def compress(self, bucket: GradBucket) -> Future[Tensor]:
        mean_of_matrices(
            dict(self._named(bucket)),
            self.codec,
            residuals=self.residuals,
            seed=lambda key: keyed_generator(self.seed, key, self.step, self.rank).initial_seed(),
            traffic=self.traffic,
        )
        return _done(bucket.buffer())

    @override
    def state_dict(self) -> dict[str, Any]:
        kept = (self.residuals or Residuals()).to("cpu")
        return {**super().state_dict(), "worker": kept.worker, "server": kept.server}

    @override
    def load_state_dict(self, ranks: list[dict[str, Any]]) -> None:
        super().load_state_dict(ranks)
        if self.residuals is not None:
            saved = [Residuals(state["worker"], state["server"]) for state in ranks]
            device = next((p.device for p in self.names), torch.device("cpu"))
            self.residuals = redistribute(saved, self.rank, self.world_size).to(device)


class BF16Hook(GradientHook):
    """torch's ``bf16_compress_hook``, which rounds gradients to bfloat16 and averages them."""

    @override
    def compress(self, bucket: GradBucket) -> Future[Tensor]:
        self.traffic.all_reduce(2 * bucket.buffer().numel(), self.world_size)
        group = dist.group.WORLD
        assert group is not None
        return _in_order(bf16_compress_hook(group, bucket), bucket)


class _Views:
    """A bucket for torch's hooks with other views of its buffer as gradients."""

    def __init__(self, bucket: GradBucket, gradients: list[Tensor]) -> None:
        self._bucket, self._gradients = bucket, gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def gradients(self) -> list[Tensor]:
        """Return views that cover the buffer."""
        return self._gradients


class PowerSGDHook(GradientHook):
    """torch's ``powerSGD_hook``, whose memory by bucket is converted to memory by parameter when buckets change.

    Args:
        rank: rank of the approximation, >= 1.
        error_feedback: as in torch.
        min_compression_rate: as in torch; a matrix that does not shrink by this factor is sent unchanged.
    """

    def __init__(
        self,
        names: dict[Tensor, str],
        *,
        rank: int,
        error_feedback: bool,
        min_compression_rate: float,
        start_step: int,
        seed: int,
    ) -> None:
        super().__init__(names, start_step=start_step, seed=seed)
        self.approximation_rank = rank
        self.min_compression_rate = min_compression_rate
        self.inner = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,  # torch counts by itself, from `iter` below; plain steps are ours
            min_compression_rate=min_compression_rate,  # pyright: ignore[reportArgumentType]
            use_error_feedback=error_feedback,
            warm_start=True,
            orthogonalization_epsilon=1e-8,  # pyright: ignore[reportArgumentType]  # zeros would become NaN
        )
        self.inner.iter = 2
        self._settled = 0  # steps since DDP was built; its buckets stay what they are from the third on
        self._layout: dict[int, list[tuple[str, torch.Size]]] = {}  # of the buckets that torch's memory is of
        self._errors: dict[str, Tensor] = {}  # by name, while no bucket holds them
        self._qs: dict[str, Tensor] = {}

    @override
    def begin(self) -> None:
        super().begin()
        if self._settled < 3:
            self._take_apart()
            self._settled += 1

    @override
    def rewrapped(self, names: dict[Tensor, str]) -> None:
        super().rewrapped(names)
        self._settled = 0

    @override
    def compress(self, bucket: GradBucket) -> Future[Tensor]:
        gradients = self._named(bucket)
        if bucket.index() not in self._layout:
            self._put_together(bucket.index(), gradients, bucket.buffer())
        for _, g in gradients:
            n, m, r = self._sizes(g.shape)
            count = (n + m) * r if r else g.numel()
            self.traffic.all_reduce(count * g.element_size(), self.world_size)
        views: Any = _Views(bucket, [g if g.ndim else g.view(1) for _, g in gradients])
        return _in_order(powerSGD_hook(self.inner, views), bucket)

    def _sizes(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return rows, columns and rank of a gradient's approximation; rank 0 if torch sends it unchanged."""
        n, m = shape[0] if shape else 1, shape[1:].numel()
        r = min(n, m, self.approximation_rank)
        return n, m, r if _should_compress(n, m, r, self.min_compression_rate)[0] else 0

    def _compressed(self, layout: list[tuple[str, torch.Size]]) -> list[tuple[str, int, int, int]]:
        """Return (name, rows, columns, rank) in torch's order: by shape, then by occurrence."""
        by_shape: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
        for name, shape in layout:
            n, m, r = self._sizes(shape)
            if r:
                by_shape.setdefault((n, m), []).append((name, n, m, r))
        return [entry for entries in by_shape.values() for entry in entries]

    def _take_apart(self) -> None:
        """Convert torch's memory by bucket to memory by name."""
        errors, qs = self._by_name()
        self._errors.update(errors)
        self._qs.update(qs)
        for memory in (self.inner.error_dict, self.inner.p_memory_dict, self.inner.q_memory_dict, self._layout):
            memory.clear()

    def _by_name(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        errors, qs = dict(self._errors), dict(self._qs)
        for index, layout in self._layout.items():
            if index in self.inner.error_dict:
                parts = self.inner.error_dict[index].split([shape.numel() for _, shape in layout])
                errors.update({name: e.clone() for (name, _), e in zip(layout, parts, strict=True)})
            entries = self._compressed(layout)
            parts = self.inner.q_memory_dict[index].split([m * r for _, _, m, r in entries])
            qs.update({name: q.view(m, r).clone() for (name, _, m, r), q in zip(entries, parts, strict=True)})
        return errors, qs

    def _put_together(self, index: int, gradients: list[tuple[str, Tensor]], buffer: Tensor) -> None:
        """Convert memory by name to torch's memory of this bucket; a missing Q is drawn with a seed from its name."""
        layout = [(name, g.shape) for name, g in gradients]
        self._layout[index] = layout
        if self.inner.use_error_feedback and any(name in self._errors for name, _ in layout):
            parts = [
                self._errors.pop(name, torch.zeros(shape.numel())).to(buffer.device, buffer.dtype)
                for name, shape in layout
            ]
            self.inner.error_dict[index] = torch.cat(parts)
        qs, rows = [buffer.new_empty(0)], 0
        for name, n, m, r in self._compressed(layout):
            q = self._qs.pop(name, None)
            if q is None or q.shape != (m, r):
                q = torch.randn(m, r, generator=keyed_generator(self.seed, "Q", name))
            qs.append(q.reshape(-1).to(buffer.device, buffer.dtype))
            rows += n * r
        self.inner.q_memory_dict[index] = torch.cat(qs)
        self.inner.p_memory_dict[index] = buffer.new_empty(rows)

    @override
    def state_dict(self) -> dict[str, Any]:
        errors, qs = self._by_name()
        shapes = {name: as_real(p.detach()).shape for p, name in self.names.items()}
        return {
            **super().state_dict(),
            "errors": {name: e.view(shapes[name]).to("cpu", copy=True) for name, e in errors.items()},
            "qs": {name: q.to("cpu", copy=True) for name, q in qs.items()},
        }

    @override
    def load_state_dict(self, ranks: list[dict[str, Any]]) -> None:
        super().load_state_dict(ranks)
        saved = [Residuals({name: e.reshape(1, -1) for name, e in state["errors"].items()}) for state in ranks]
        own = redistribute(saved, self.rank, self.world_size).worker
        self._take_apart()
        self._errors = {name: e.reshape(-1) for name, e in own.items()}
        self._qs = dict(ranks[0]["qs"])  # the same on all ranks
        self._settled = 0


def _done(value: Tensor) -> Future[Tensor]:
    """Return a completed future; on a GPU the work is queued on the current stream, to which the result belongs."""
    future: Future[Tensor] = Future(devices=[value.device]) if value.is_cuda else Future()
    future.set_result(value)
    return future


def _in_order(future: Future[Tensor], bucket: GradBucket) -> Future[Tensor]:
    """Wait for the result on the CPU, because gloo runs callbacks in separate threads, in a different order on each rank."""
    return future if bucket.buffer().is_cuda else _done(future.wait())
