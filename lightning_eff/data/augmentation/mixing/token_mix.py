"""TokenMix: another image's tokens in several blocks, and labels by a teacher's activation in either's (Liu et al. 2022)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._samples.functions import TensorFunction
from lightning_eff._core.search_space import Choice, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number, no_mixing
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._mixing import Mixing, draw_shares
from lightning_eff.data.augmentation.mixing._given import Given
from lightning_eff.data.augmentation.mixing._pasting import pasted

WHO = "TokenMix"
_STEEPEST = 0.3  # the least ratio of a block's sides
_TRIES = 200  # for one mask: an end for grids that the last tokens hardly fit into

Teacher = nn.Module | TensorFunction | Literal["uniform"]


def token_blocks(share: float, grid: tuple[int, int], block: int, numbers: np.random.Generator) -> Tensor:
    """Which tokens are an image's own: all but about ``(1 - lambda) h w`` of them, in several blocks that lie anywhere. (h, w).

    Each block has at least ``block`` tokens, or as many as are left to take, and sides of a ratio of 0.3 to 1 / 0.3.

    Args:
        share: ``lambda``, in [0, 1].
        grid: h and w.
        block: tokens of a block, at least.
        numbers: of the draws.
    """
    height, width = grid
    other = torch.zeros(grid, dtype=torch.bool)
    left = int((1 - share) * height * width)
    for _ in range(_TRIES):
        if left <= 0:
            break
        area = numbers.uniform(min(block, left), left)
        ratio = np.exp(numbers.uniform(np.log(_STEEPEST), -np.log(_STEEPEST)))
        rows, columns = max(round((area * ratio) ** 0.5), 1), max(round((area / ratio) ** 0.5), 1)
        if rows > height or columns > width:
            continue
        top, start = numbers.integers(0, height - rows + 1), numbers.integers(0, width - columns + 1)
        place = other[top : top + rows, start : start + columns]
        new = place.numel() - int(place.sum())
        if 0 < new <= left:
            place.fill_(True)
            left -= new
    return ~other


def activation_share(own: Tensor, mine: Tensor, others: Tensor) -> Tensor:
    """``lambda = a / (a + b)`` with ``a = sum(M A_i)`` and ``b = sum((1 - M) A_j)``, each map ``A`` made to sum to 1: (B,).

    Where neither region has any activation, ``lambda`` is the share of tokens.

    Args:
        own: ``M``, (B, h, w) or (1, h, w), true where tokens are an image's own.
        mine: ``A_i``, (B, h, w), not negative; one of zeros is even.
        others: ``A_j``, of the images that are mixed in.
    """
    mask = own.to(mine.device, torch.float32)
    a, b = ((m * _to_one(x)).sum(dim=(1, 2)) for m, x in ((mask, mine), (1 - mask, others)))
    share = mask.mean(dim=(1, 2)).expand(a.shape)
    return torch.where(a + b > 0, a / (a + b).clamp(min=torch.finfo(torch.float32).tiny), share)


def _to_one(maps: Tensor) -> Tensor:
    maps = maps.float()
    total = maps.sum(dim=(1, 2), keepdim=True)
    return torch.where(total > 0, maps / total.clamp(min=torch.finfo(torch.float32).tiny), 1 / maps[0].numel())


def patch_of(module: nn.Module, channels: int) -> int:
    """The side of the square patches that become tokens: the kernel of a convolution of images whose stride is its kernel.

    Raises:
        ValueError: if there is none, or they are of several sizes; with those that there are.
    """
    stems = [m for m in module.modules() if isinstance(m, nn.Conv2d) and m.in_channels == channels]
    found = {m.kernel_size for m in stems if m.kernel_size == m.stride and m.kernel_size[0] == m.kernel_size[1] > 1}
    if len(found) != 1:
        told = (
            f"has convolutions of patches of several sizes, {sorted(found)}"
            if found
            else (
                f"holds no nn.Conv2d of {channels} channels whose stride is its kernel, which would say how large patches are"
            )
        )
        raise ValueError(
            f"{WHO}: {type(module).__name__} {told}. Give patch=, the pixels of a patch's side, such as patch=16."
        )
    return found.pop()[0]


def _by_tokens(technique: "TokenMix") -> Mapping[str, Callback]:
    names = ("alpha", "block", "patch", "prob", "until", "per_sample", "keys", "labels")
    settings = {name: getattr(technique, name) for name in names}
    even = technique.neutral or technique.teacher == "uniform"
    return {} if even else {"labels by tokens": TokenMix(teacher="uniform", **settings)}


class TokenMix(Mixing):
    """Train on images with blocks of another image's tokens in them, and on both labels by what a teacher sees in either's.

    Each image of a micro-batch gets patches of another one of it (a random permutation says which), from the same places: about
    ``(1 - lambda)`` of all, with ``lambda ~ Beta(alpha, alpha)``, in several blocks, so that no patch is cut. A teacher, which
    the user gives, says where in each image its content lies: a map ``A`` that sums to 1. With ``M`` the tokens that are an
    image's own, ``a = sum(M A_i)`` and ``b = sum((1 - M) A_j)``, the loss is ``(a L(y_i) + b L(y_j)) / (a + b)``: for
    cross-entropy and binary cross-entropy that is the loss on the mixed target, exactly, in the same forward pass, and
    ``training_step`` goes on to take integer labels. With ``teacher="uniform"`` labels go by the share of tokens, without a
    teacher's pass; the paper's gain over that is what the teacher knows.

    A teacher is a function, or a module, of images (B, C, H, W) as the batch has them that returns maps (B, h, w) of any size,
    not negative: a sum of a trained network's last features over channels, or its activation of the right class. It runs in
    evaluation mode, without a gradient, on the images' device; it is no part of the trained module, nor of checkpoints.

    Roles are not exchanged where the other image has the larger share; a metric that ``training_step`` computes of its labels
    reads each image's own label, and is told once. Labels are one of each image. What chooses samples by their loss scores the
    mixtures. Where several techniques mix, each batch is mixed by one of them.

    It regularises: it costs the teacher's forward pass at each step, makes training fit more slowly, and pays over many epochs.

    Logged: ``share``, the mean weight of the other images' labels in the last micro-batch, ``tokens``, the mean share of their
    tokens (0 where nothing was mixed), and ``milliseconds``, what it took of the host to make the mixtures.

    Args:
        teacher: of images (B, C, H, W), maps (B, h, w); or "uniform". It must be given.
        alpha: of the Beta distribution, > 0; 1 draws ``lambda`` evenly.
        block: the least tokens of a block, >= 1: 14 of 196 in the paper. What is left to take ends in a smaller one.
        patch: the pixels of a patch's side, >= 1; None takes the kernel of the module's convolution into patches.
        prob: the chance of a micro-batch to be mixed, in [0, 1]; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw blocks for each image instead of once for the micro-batch.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors. Of several, the
            first ones are what the teacher sees.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range, or there is no teacher; at setup, for ``until`` below 1 in a run without
            an end; at the first batch, before any weight has changed, if it holds no images of floating point, or labels that
            are no classes, and one of each image, if patches are unknown or do not fill an image, if the teacher returns no
            maps or such as are negative or not finite, or if the step's loss on labels cannot be seen. Later images of which
            it returns such maps count by their tokens alone; it warns once.

    Sources:
        Liu et al. 2022, arXiv:2207.08409.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = "Liu et al. 2022, arXiv:2207.08409"
    constraints: ClassVar[str] = (
        "a teacher that is given; automatic optimization; images (B, C, H, W) of floating point in whole patches; one class"
        " label of each; a loss of torch.nn.functional"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (TokenMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"teacher": Choice(("uniform",)), "until": Choice((0.8, 1.0))}, no_mixing
    )
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and teacher='uniform', whose labels go by tokens",
        _by_tokens,
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }
    larger_first: ClassVar[bool] = False

    def __init__(
        self,
        teacher: Teacher,
        *,
        alpha: float = 1.0,
        block: int = 14,
        patch: int | None = None,
        prob: float = 1.0,
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        if teacher != "uniform" and not callable(teacher):
            raise ValueError(
                f"{WHO}({teacher=}): expected a teacher, a trained network or a function of images (B, C, H, W) that returns"
                " maps (B, h, w) of where their content lies, because labels go by it; or teacher='uniform', by tokens alone."
            )
        check_number(alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha), above 0")
        if alpha == 0:
            raise ValueError(
                f"{WHO}({alpha=}): expected a number above 0; 1 draws shares evenly. prob=0 is plain training."
            )
        for name, value in (("block", block), ("patch", 1 if patch is None else patch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{WHO}({name}={value!r}): expected an integer >= 1.")
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.teacher = teacher
        self.alpha = alpha
        self.block = block
        self.patch = patch
        self.per_sample = per_sample

    @override
    def _reset(self) -> None:
        super()._reset()
        self._patch = 0
        self._tokens = 0.0
        self._given: Given | None = None  # the teacher
        self._warned = False

    # -- the teacher

    @override
    def look(self, step: Step, batch: Any) -> None:
        images = self.inputs(batch, self._targets.labels(step, batch))[0]
        self._patch = patch_of(step.module, images.shape[1]) if self.patch is None else self.patch
        self._grid(images)
        self._maps(images, first=True)

    def _grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the images' patches."""
        height, width = images.shape[-2:]
        if height % self._patch or width % self._patch or max(height, width) == self._patch:
            raise ValueError(
                f"{WHO}: images of {height} x {width} pixels are not made of several whole patches of {self._patch} x"
                f" {self._patch}; expected sides that are multiples of a patch's. Give patch=, or resize in the data set."
            )
        return height // self._patch, width // self._patch

    def _maps(self, images: Tensor, *, first: bool = False) -> Tensor:
        """What the teacher sees in each patch, (B, h, w), float32; even where it returns what is no activation."""
        grid = self._grid(images)
        if self.teacher == "uniform":
            return images.new_ones(len(images), *grid, dtype=torch.float32)
        assert callable(self.teacher)
        self._given = self._given or Given(self.teacher)
        start = time.perf_counter()
        maps = self._given(images)
        self.session.chain.cost.seconds += time.perf_counter() - start
        if not isinstance(maps, Tensor) or maps.ndim != 3 or len(maps) != len(images) or maps.is_complex():
            got = tuple(maps.shape) if isinstance(maps, Tensor) else f"a {type(maps).__name__}"
            raise ValueError(
                f"{WHO}: the teacher returned {got} for {len(images)} images; expected maps ({len(images)}, h, w), not"
                " negative. Let it return features summed over channels, or the activation of the class that matters."
            )
        maps = F.adaptive_avg_pool2d(maps.to(images.device, torch.float32)[:, None], grid)[:, 0]
        usable = (maps.isfinite() & (maps >= 0)).all(dim=2).all(dim=1)
        if not bool(usable.all()):
            got = (
                f"{WHO}: the teacher returned maps with entries that are negative or not finite, from {float(maps.min()):.4g}"
                f" to {float(maps.max()):.4g}; expected activations >= 0. Take their ReLU, or their square."
            )
            if first:
                raise ValueError(got)
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"{got} The images that have them count by their tokens alone.")
            maps = torch.where(usable[:, None, None], maps, 1.0)
        return maps

    @override
    def detach(self, session: Session) -> None:
        if self._given is not None:
            self._given.put_back()

    # -- the mixtures

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        images, size, draws = inputs[0], len(partner), numbers(generator)
        grid, maps = self._grid(images), self._maps(images)
        shares = draw_shares(self.alpha, size if self.per_sample else 1, draws)
        own = torch.stack([token_blocks(float(share), grid, self.block, draws) for share in shares])
        self._tokens = 1.0 - float(own.float().mean())
        pixels = own.repeat_interleave(self._patch, dim=1).repeat_interleave(self._patch, dim=2).to(images.device)
        share = activation_share(own, maps, maps.index_select(0, partner.to(maps.device)))
        return [pasted(x, partner, pixels) for x in inputs], share

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._tokens = 0.0

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "tokens": self._tokens}
