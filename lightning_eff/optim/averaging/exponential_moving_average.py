"""An exponential moving average of the weights, of the whole run or of its tail (Polyak & Juditsky 1992)."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction, Names, Number
from lightning_eff._core._optim.chunks import chunks, local
from lightning_eff._core._optim.tensors import piece
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._buffers import is_statistic
from lightning_eff.optim.averaging._engine import AveragedWeights, BNBatches, rivals

TAIL_BLEND = 0.6  # the default of `blend` with `tail`, from the modded-nanogpt records


def decay(half_life: float) -> float:
    """``s = 2^(-1 / half_life)``: after ``half_life`` steps, the weights of a step count half as much."""
    # s = exp(−ln 2 / half-life)
    return math.exp(-math.log(2.0) / half_life) if half_life > 0 else 0.0


@torch.no_grad()
def move_average(average: list[Tensor], weights: list[Tensor], *, s: float) -> None:
    """``a <- s a + (1 - s) w`` in place, by the rule of torch's ``AveragedModel``.

    From ``a_0 = w_0`` on, ``a_n = s^n w_0 + (1 - s) sum_i s^(n - i) w_i`` with ``i`` from 1 to n.

    Args:
        average: ``a``, floating.
        weights: ``w``, of the shapes of ``average``, of any floating dtype.
        s: in [0, 1].
    """
    # a = s a + (1 − s) w
    move = get_ema_multi_avg_fn(s)
    if all(a.dtype == w.dtype for a, w in zip(average, weights, strict=True)):
        move(average, weights, 0)  # pyright: ignore[reportArgumentType]
        return
    for a, w in chunks(average, weights):  # so that few weights are converted at a time
        move(a, [y.to(x.dtype) for x, y in zip(a, w, strict=True)], 0)  # pyright: ignore[reportArgumentType]


def excluded(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    """The names of the parameters that ``patterns`` match: fnmatch patterns of names, or "embedding" for all tables.

    Raises:
        ValueError: for a pattern that matches none, with the nearest names.
    """
    tables = {
        id(p) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters(False)
    }
    named = dict(module.named_parameters())
    found: set[str] = set()
    for pattern in patterns:
        meant = {
            name
            for name, p in named.items()
            if fnmatchcase(name, pattern) or (pattern == "embedding" and id(p) in tables)
        }
        if not meant:
            parts = sorted({".".join(name.split(".")[:i]) for name in named for i in range(1, name.count(".") + 2)})
            near = difflib.get_close_matches(pattern.replace("*", "").strip("."), parts, n=4, cutoff=0.4)
            raise ValueError(
                f"ExponentialMovingAverage(exclude={pattern!r}): no parameter of {type(module).__name__} matches. Use a pattern"
                " such"
                " as 'head.*', or 'embedding' for all nn.Embedding tables. Nearest names:"
                f" {', '.join(near or list(named)[:4])}."
            )
        found |= meant
    return found


class ExponentialMovingAverage(AveragedWeights):
    """Validate, test and save a moving average of the weights, while training continues from the raw weights.

    After each optimizer step ``a <- s a + (1 - s) w`` with ``s = 2^(-1 / half_life)``. The average covers every parameter
    that requires gradients, and BatchNorm's running statistics. It starts from the first weights. Other buffers (counts,
    masks, codebooks, scales of quantisers) keep the values of training. With ``tail``, only the end of the run is averaged,
    and the result is a blend of the average and the current weights, because the average lags behind while the weights
    still move.

    Use it where the learning rate does not decay to zero. With a fully decayed learning rate there is little left to gain.
    It costs one more copy of the weights, in float32 at least.

    The module holds the average while the trainer validates, and from the end of fit on. Every checkpoint's ``state_dict``
    is the average; the raw weights are in this callback's state, from which a resumed fit continues. Checkpoints saved
    because of an exception hold raw weights. A parameter that is unfrozen later is averaged from then on. If another
    technique changes the network's blocks, the average starts anew.

    Under FSDP2 (``ModelParallelStrategy``, ``HybridParallelStrategy``) each process averages its own part of the weights.
    Resume such a run with the same number of processes and the same layout. Its checkpoints' weights load anywhere.

    It differs from Lightning's ``EMAWeightAveraging``, which copies the module in setup, before other techniques are in
    place, and has no blend. The update is the one of torch's ``AveragedModel``.

    Args:
        half_life: the number of optimizer steps after which a step's weights count half as much. 0 is plain training. For
            a decay ``s``, give ``log(0.5) / log(s)``: 693 for 0.999.
        tail: the fraction of the budget, at its end, that is averaged; None averages the whole run.
        blend: the weight of the average in the result; the current weights have the rest. None means 1, or 0.6 with
            ``tail``. 0 is plain training.
        exclude: patterns of the names of parameters that keep their raw weights, such as ``["head.*"]``, or
            ``["embedding"]`` for all embedding tables.
        batch_norm: what happens to BatchNorm statistics. "average" averages them; "recompute" computes them from training
            data for the averaged weights, whenever these are used.
        bn_batches: the number of training batches, on each rank, for "recompute"; None uses a whole epoch.

    Raises:
        ValueError: for a value out of range. At setup, with another weight average, with ``tail`` in a run without an end,
            if a pattern matches no parameter, under ``FSDPStrategy`` or DeepSpeed, or for "recompute" under a strategy
            that shards.

    Example:
        >>> ema = ExponentialMovingAverage(half_life=700, exclude=["head.*"])
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ema])

    References:
        Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging", SIAM J. Control Optim. 30(4).
        Izmailov et al. 2018, arXiv:1803.05407, on BatchNorm. The tail and its blend are from the modded-nanogpt records.
    """

    saves: ClassVar[str] = "epochs, as long as the learning rate is high; little once it has decayed"
    paper: ClassVar[str] = "Polyak & Juditsky 1992, doi:10.1137/0330046"
    constraints: ClassVar[str] = (
        "one more copy of the weights; batch_norm='recompute' needs automatic optimization and whole weights"
    )
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"half_life": Uniform(10.0, 1000.0, log=True), "tail": Choice((None, 0.25))},
        lambda profile: (
            "the learning rate ends at zero, where an average gains little" if profile.decayed_rate else None
        ),
    )
    control: ClassVar[Control] = Control(
        "the baseline for the same time with a learning rate that decays to zero, where the gain shrinks"
    )
    conflicts: ClassVar = rivals("LatestWeightAveraging")
    bn_setting: ClassVar[str] = "batch_norm='recompute'"
    neutral_at: ClassVar[Mapping[str, Any]] = {"half_life": 0.0, "blend": 0.0}

    def __init__(
        self,
        half_life: Annotated[float, Number(at_least=0)],
        *,
        tail: Annotated[float, Fraction(above=0)] | None = None,
        blend: Annotated[float, Fraction()] | None = None,
        exclude: Annotated[Sequence[str], Names("patterns of parameter names")] = (),
        batch_norm: Literal["average", "recompute"] = "average",
        bn_batches: BNBatches = 100,
    ) -> None:
        self.half_life = half_life
        self.tail = tail
        self.blend = blend if blend is not None else 1.0 if tail is None else TAIL_BLEND
        self.exclude = tuple(exclude)
        self.recomputes = batch_norm == "recompute"
        self.bn_batches = bn_batches

    @override
    def _reset(self) -> None:
        super()._reset()
        self._left_out: set[str] = set()
        self._kept: set[str] = set()  # names in a checkpoint

    # -- the run

    @override
    def check(self, session: Session) -> None:
        super().check(session)
        if self.tail is not None and self.tail < 1.0:
            self.check_budget(session, f"tail={self.tail}", "tail=None")

    @override
    def on_model(self, session: Session) -> None:
        super().on_model(session)
        if session.fitting:
            self._left_out = excluded(session.module, self.exclude)
            self._kept = set(session.module.state_dict())

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        if self.stepped(session) and (self.tail is None or session.progress.u >= 1.0 - self.tail):
            self._take(session)

    @torch.no_grad()
    def _take(self, session: Session) -> None:
        averages: list[Tensor] = []
        weights: list[Tensor] = []
        for name, w in self._followed(session):
            if name in self._held:
                averages.append(self._held[name])
                weights.append(w)
            else:
                w = piece(w)
                self._held[name] = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
        if averages:
            move_average(averages, local(weights, weights), s=decay(self.half_life))
        self.outdate(session)

    def _followed(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        tensors, held, out = self.tensors(session), self._held, self._left_out
        for name, p in tensors.parameters.items():
            if (name in held or p.requires_grad) and name not in out and p.is_floating_point():
                yield name, p
        for name, b in tensors.buffers():
            begins = not self._taken and name in self._kept and is_statistic(name) and b.is_floating_point()
            if begins or name in held:
                yield name, b

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        present = self.pieces(session)
        for name, a in self._held.items():
            w = present[name]
            # blend a + (1 − blend) w
            yield name, a if self.blend == 1.0 else torch.lerp(w.to(a.dtype), a, self.blend)

    # -- what it reports

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"averaged_steps": self._taken}

    @override
    def summary(self) -> str:
        if not self._held:
            return "nothing was averaged; the module holds the raw weights"
        what = (
            "the average"
            if self.blend == 1.0
            else f"{self.blend:g} of the average plus {1 - self.blend:g} of the last weights"
        )
        return f"{what}, over {self._taken:,} steps with a half-life of {self.half_life:g}"
