"""An exponential moving average of the weights, of the whole run or of its tail (Polyak & Juditsky 1992)."""

import difflib
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.optim.averaging._buffers import is_statistic
from lightning_eff.optim.averaging._engine import AveragedWeights, check_bn_batches, pieces, rivals

TAIL_BLEND = 0.6  # the average's share at the end of a run of which the tail is averaged: modded-nanogpt's


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
    move(average, [w.to(a.dtype) for a, w in zip(average, weights, strict=True)], 0)  # pyright: ignore[reportArgumentType]


def excluded(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    """The names of the parameters that ``patterns`` mean: of names, as in fnmatch, or "embedding" for all tables.

    Raises:
        ValueError: for a pattern that means none, with the nearest names.
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
                f"ExponentialMovingAverage(exclude={pattern!r}): it matches no parameter of {type(module).__name__}; expected"
                " a pattern of names with *, as in 'head.*', or 'embedding' for all tables of nn.Embedding. Nearest:"
                f" {', '.join(near or list(named)[:4])}."
            )
        found |= meant
    return found


class ExponentialMovingAverage(AveragedWeights):
    """Validate, test and keep a moving average of the weights, while training goes on from the raw ones.

    After each optimizer step ``a <- s a + (1 - s) w`` with ``s = 2^(-1 / half_life)``, of every parameter that takes
    gradients, and of BatchNorm's running statistics; it starts from the first weights that it sees. Other buffers, such as
    counts, masks, codebooks and scales of quantisers, are shown as training left them, and the vectors of spectral
    normalisation are computed at the averaged weights. With ``tail`` only the last share of the run is averaged, and what is
    shown is a blend of the average and the present weights: the average lags behind, the more so the faster the weights still
    move. With a rate that is wholly decayed little is left to gain.

    While the trainer validates, and from the end of fit on, the module holds the average, and so does every checkpoint's
    ``state_dict``; the raw weights are in this callback's state, and a resumed fit goes on from them. A checkpoint that is
    saved because of an exception holds raw weights. Averages are held in single precision at least. Parameters that are
    unfrozen later are averaged from then on; where another technique changes which blocks the network has, the average
    starts anew.

    Under FSDP2 (``ModelParallelStrategy``, ``HybridParallelStrategy`` in any layout) each process averages its own pieces of
    the weights. Such a run is resumed by as many processes in the same layout; its checkpoints' weights load anywhere.

    Lightning's ``EMAWeightAveraging`` does not serve: it keeps a deep copy of the module that it makes in setup, which holds
    what techniques have wrapped around the original, and has no blend. The update is that of torch's ``AveragedModel``.

    Args:
        half_life: optimizer steps after which weights count half as much, >= 0; 0 is plain training. Divide a time constant
            by 1.44 for it.
        tail: average only over this last share of the budget, in (0, 1]; None for all of it.
        blend: the share of the average in what is shown, in [0, 1]; the rest is the present weights. None for 1, and with
            ``tail`` for 0.6.
        exclude: parameters that keep their raw weights: patterns of their names, such as ``"head.*"``, or ``"embedding"``.
        batch_norm: "average" takes BatchNorm's statistics along as other buffers; "recompute" finds those of the averaged
            weights from training data, whenever they are used.
        bn_batches: of "recompute": training batches on each rank; None takes a whole epoch.

    Raises:
        ValueError: for other values; at setup, beside another weight averaging, with a ``tail`` in a run without an end, or
            where a pattern matches no parameter; under ``FSDPStrategy`` and DeepSpeed, and for "recompute" under any strategy
            that shards.

    Sources:
        Polyak & Juditsky 1992, SIAM J. Control Optim. 30(4); Izmailov et al. 2018, arXiv:1803.05407, on BatchNorm; the tail
        and its blend are of the modded-nanogpt records.
    """

    saves: ClassVar[str] = "epochs while the learning rate is high; little once it is fully decayed"
    paper: ClassVar[str] = "Polyak & Juditsky 1992, doi:10.1137/0330046"
    constraints: ClassVar[str] = (
        "one more copy of the weights; batch_norm='recompute' needs automatic optimization and whole weights"
    )
    survey: ClassVar[Survey | None] = Survey("exponential moving average", zhuang="2.1", shen="5.4")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"half_life": Uniform(10.0, 1000.0, log=True), "tail": Choice((None, 0.25))},
        lambda profile: (
            "the learning rate ends at zero, where the last weights are as good" if profile.decayed_rate else None
        ),
    )
    control: ClassVar[Control] = Control(
        "the baseline for as many seconds with its learning rate decayed to zero, where the gain shrinks"
    )
    conflicts: ClassVar = rivals("LatestWeightAveraging")
    bn_setting: ClassVar[str] = "batch_norm='recompute'"

    def __init__(
        self,
        half_life: float,
        *,
        tail: float | None = None,
        blend: float | None = None,
        exclude: Sequence[str] = (),
        batch_norm: Literal["average", "recompute"] = "average",
        bn_batches: int | None = 100,
    ) -> None:
        if isinstance(half_life, bool) or not 0.0 <= half_life < math.inf:
            raise ValueError(
                f"ExponentialMovingAverage({half_life=}): expected a finite number of optimizer steps >= 0; 0 is plain"
                " training."
            )
        if tail is not None and not 0.0 < tail <= 1.0:
            raise ValueError(
                f"ExponentialMovingAverage({tail=}): expected a share of the budget in (0, 1], or None for all of it."
            )
        if blend is not None and not 0.0 <= blend <= 1.0:
            raise ValueError(
                f"ExponentialMovingAverage({blend=}): expected the average's share in [0, 1], or None; 0 is plain training."
            )
        if isinstance(exclude, str):
            raise ValueError(f"ExponentialMovingAverage({exclude=}): expected a list of patterns. Write [{exclude!r}].")
        if batch_norm not in ("average", "recompute"):
            raise ValueError(f"ExponentialMovingAverage({batch_norm=}): expected 'average' or 'recompute'.")
        check_bn_batches("ExponentialMovingAverage", bn_batches)
        self.half_life = half_life
        self.tail = tail
        self.blend = blend if blend is not None else 1.0 if tail is None else TAIL_BLEND
        self.exclude = tuple(exclude)
        self.recomputes = batch_norm == "recompute"
        self.bn_batches = bn_batches
        self._reset()

    @override
    def _reset(self) -> None:
        super()._reset()
        self._left_out: set[str] = set()
        self._kept: set[str] = set()  # names in a checkpoint

    # -- the run

    @property
    @override
    def neutral(self) -> bool:
        return self.half_life == 0.0 or self.blend == 0.0

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
                self._held[name] = w.to(torch.promote_types(w.dtype, torch.float32), copy=True)
        if averages:
            move_average(averages, weights, s=decay(self.half_life))
        self.outdate(session)

    def _followed(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        held = pieces(session)
        for name, p in session.module.named_parameters():
            if (p.requires_grad or name in self._held) and name not in self._left_out and p.is_floating_point():
                yield name, held[name]
        for name, b in session.module.named_buffers():
            begins = not self._taken and name in self._kept and is_statistic(name) and b.is_floating_point()
            if name in self._held or begins:
                yield name, held[name]

    @override
    def average(self, session: Session) -> Iterator[tuple[str, Tensor]]:
        present = pieces(session)
        for name, a in self._held.items():
            w = present[name]
            # blend a + (1 − blend) w
            yield name, a if self.blend == 1.0 else torch.lerp(w.to(a.dtype), a, self.blend)

    # -- what it tells

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"averaged_steps": self._taken}

    @override
    def summary(self) -> str:
        if not self._held:
            return "nothing was averaged: the weights are the raw ones"
        what = "the average" if self.blend == 1.0 else f"{self.blend:g} of the average and the rest of the last weights"
        return f"{what}, over {self._taken:,} steps with a half-life of {self.half_life:g}"
