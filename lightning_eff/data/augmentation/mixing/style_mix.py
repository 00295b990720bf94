"""StyleMix: mixtures of two images' content and of their style, each by a share of its own (Hong, Choi & Kim 2021)."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._samples.functions import TensorFunction
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import check_number
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._mixing import Mixing, draw_shares
from lightning_eff.data.augmentation.mixing._given import Given

WHO = "StyleMix"
_EPSILON = 1e-5  # of variances

Codec = nn.Module | TensorFunction


def statistics(f: Tensor) -> tuple[Tensor, Tensor]:
    """``mu(f)`` and ``sigma(f) = sqrt(var(f) + 1e-5)`` of each sample's channels, (B, F, 1, 1) each."""
    return f.mean(dim=(2, 3), keepdim=True), (f.var(dim=(2, 3), correction=0, keepdim=True) + _EPSILON).sqrt()


def ada_in(content: Tensor, style: Tensor) -> Tensor:
    """``sigma(s) (c - mu(c)) / sigma(c) + mu(s)``: the content's features with the means and deviations of the style's.

    Args:
        content: ``c``, (B, F, h, w).
        style: ``s``, (B, F, h', w').
    """
    mean, deviation = statistics(content)
    other_mean, other_deviation = statistics(style)
    return other_deviation * (content - mean) / deviation + other_mean


def style_mix(f: Tensor, partner: Tensor, content: Tensor, style: Tensor, both: Tensor) -> Tensor:
    """``t f_ii + (r_c - t) f_ij + (r_s - t) f_ji + (1 - r_c - r_s + t) f_jj``, (B, F, h, w).

    ``f_ij`` are the features of content ``i`` in the style of ``j``, by :func:`ada_in`; ``f_ii`` are those of ``i`` alone. So
    content ``i`` counts ``r_c`` in all, and style ``i`` counts ``r_s``.

    Args:
        f: features, (B, F, h, w).
        partner: ``j``, (B,), of integers.
        content: ``r_c``, (B,) or (1,), in [0, 1].
        style: ``r_s``.
        both: ``t``, from ``max(0, r_c + r_s - 1)`` to ``min(r_c, r_s)``.
    """
    other = f.index_select(0, partner.to(f.device))
    t, c, s = (share.to(f.device, f.dtype).reshape(-1, 1, 1, 1) for share in (both, content, style))
    return t * f + (c - t) * ada_in(f, other) + (s - t) * ada_in(other, f) + (1 - c - s + t) * other


def _of_pixels(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    """With a codec that leaves images as they are, whose styles are those of the pixels: a search passes over it."""
    return cls(encoder=nn.Identity(), decoder=nn.Identity(), **values)


def _pointless(profile: RunProfile) -> str | None:
    return "a search has no codec to give"


class StyleMix(Mixing):
    """Train on images that mix the content and the style of two, and on both labels by the shares of either.

    A codec that the user gives, an encoder and its decoder, makes features of images and images of features. Each image of a
    micro-batch is mixed with another one of it (a random permutation says which): with ``f_ij`` the features of content ``i``
    in the style of ``j`` (adaptive instance normalisation: the channels' means and deviations are those of ``j``), decoded is
    ``t f_ii + (r_c - t) f_ij + (r_s - t) f_ji + (1 - r_c - r_s + t) f_jj``. ``r_c`` and ``r_s`` come of
    ``Beta(alpha, alpha)``, and ``t`` evenly of what they allow. The loss is ``lambda L(y_i) + (1 - lambda) L(y_j)`` with
    ``lambda = r r_c + (1 - r) r_s``: for cross-entropy and binary cross-entropy that is the loss on the mixed target, exactly,
    in the same forward pass, and ``training_step`` goes on to take integer labels. Roles are exchanged where ``lambda`` is
    below one half, which changes no distribution; a metric that ``training_step`` computes of its labels is told once.

    The codec takes images as the batch has them, normalised as they are; the paper's is VGG-19 up to relu4_1 and a decoder that
    was trained for style transfer. It runs in evaluation mode, without a gradient, on the images' device, and is no part of the
    trained module, nor of checkpoints. ``torch.nn.Identity()`` for both is the mixture of pixels whose style is the colours'
    means and deviations, at no cost. The paper's variant with CutMix's boxes, and its choice of styles by distance, are left
    out. Labels are one of each image. What chooses samples by their loss scores the mixtures. Where several techniques mix,
    each batch is mixed by one of them.

    It regularises: it costs the codec's passes at each step that is mixed, makes training fit more slowly, and pays over many
    epochs.

    Logged: ``share``, the mean weight of the other images' labels in the last micro-batch, ``content`` and ``style``, the mean
    shares of their content and style (0 where nothing was mixed), and ``milliseconds``, what it took of the host.

    Args:
        encoder: of images (B, C, H, W), features (B, F, h, w). It must be given.
        decoder: of such features, images (B, C, H, W). It must be given.
        alpha: of the Beta distribution, > 0; 1 draws ``r_c`` and ``r_s`` evenly.
        content_weight: ``r``, how much of ``lambda`` the content says, in [0, 1]; the rest is the style's.
        prob: the chance of a micro-batch to be mixed, in [0, 1]: 0.2 in the paper; 0 is plain training.
        until: the share of the budget in [0, 1] from which on batches are left alone; 0 is plain training.
        per_sample: draw shares for each image instead of once for the micro-batch.
        keys: names or positions of the images (B, C, H, W) of floating point; None takes all such tensors.
        labels: names or positions of the labels in the batch; None looks for what the step's losses have as targets.

    Raises:
        ValueError: if an argument is out of its range, or there is no codec; at setup, for ``until`` below 1 in a run without
            an end; at the first batch, before any weight has changed, if it holds no images of floating point, or labels that
            are no classes, and one of each image, if the codec makes no features of images and no images of these again, or
            if the step's loss on labels cannot be seen.

    Sources:
        Hong et al. 2021, StyleMix: Separating Content and Style for Enhanced Data Augmentation, CVPR; Huang & Belongie 2017,
        arXiv:1703.06868.
    """

    saves: ClassVar[str] = "nothing of a step: it regularises, for a better end of long training"
    paper: ClassVar[str] = (
        "Hong et al. 2021, CVPR, StyleMix: Separating Content and Style for Enhanced Data Augmentation"
    )
    constraints: ClassVar[str] = (
        "a codec that is given; automatic optimization; images (B, C, H, W) of floating point; one class label of each; a loss"
        " of torch.nn.functional"
    )
    survey: ClassVar[Survey | None] = Survey("data augmentation (StyleMix)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"prob": Choice((0.2, 0.5)), "until": Choice((0.8, 1.0))}, _pointless, _of_pixels
    )
    control: ClassVar[Control] = Control(
        "no augmentation: the baseline for as many seconds; and Mixup, which has no codec"
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "SAF": "a mixture's scores would be held to those of another mixture some epochs before"
    }

    def __init__(
        self,
        encoder: Codec,
        *,
        decoder: Codec,
        alpha: float = 1.0,
        content_weight: float = 0.7,
        prob: float = 0.2,
        until: float = 1.0,
        per_sample: bool = False,
        keys: Sequence[str | int] | None = None,
        labels: Sequence[str | int] | None = None,
    ) -> None:
        for name, value in (("encoder", encoder), ("decoder", decoder)):
            if not callable(value):
                raise ValueError(
                    f"{WHO}({name}={value!r}): expected a codec, of an encoder of images (B, C, H, W) into features (B, F, h,"
                    " w) and a decoder of these into images, because styles are mixed as features. Give a trained one, or"
                    " torch.nn.Identity() for both, whose styles are the colours' means and deviations."
                )
        check_number(alpha, who=WHO, name="alpha", low=0, high=float("inf"), what="of Beta(alpha, alpha), above 0")
        if alpha == 0:
            raise ValueError(
                f"{WHO}({alpha=}): expected a number above 0; 1 draws shares evenly. prob=0 is plain training."
            )
        check_number(
            content_weight, who=WHO, name="content_weight", low=0, high=1, what="how much of lambda the content says"
        )
        super().__init__(prob=prob, until=until, keys=keys, labels=labels)
        self.encoder, self.decoder = encoder, decoder
        self.alpha = alpha
        self.content_weight = content_weight
        self.per_sample = per_sample

    @override
    def _reset(self) -> None:
        super()._reset()
        self._content, self._style = 0.0, 0.0
        self._codec: list[Given] = []

    # -- the codec

    @override
    def attach(self, session: Session) -> None:
        super().attach(session)
        self._codec = [Given(self.encoder), Given(self.decoder)]

    @override
    def detach(self, session: Session) -> None:
        for network in self._codec:
            network.put_back()
        self._codec = []

    @override
    def look(self, step: Step, batch: Any) -> None:
        for x in self.inputs(batch, self._targets.labels(step, batch)):
            self._through(x, lambda f: f)

    def _through(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Images decoded from features of ``x`` that ``change`` has changed, of the shape and type of ``x``."""
        start = time.perf_counter()
        encoder, decoder = self._codec
        f = encoder(x)
        if not (isinstance(f, Tensor) and f.ndim == 4 and len(f) == len(x) and f.is_floating_point()):
            raise ValueError(
                f"{WHO}: the encoder returned {_told(f)} for images {tuple(x.shape)}; expected features"
                f" ({len(x)}, F, h, w) of floating point. Let it return one layer's features."
            )
        with torch.no_grad():
            f = change(f)
        made = decoder(f)
        if not (isinstance(made, Tensor) and made.shape == x.shape and made.is_floating_point()):
            raise ValueError(
                f"{WHO}: the decoder returned {_told(made)} for features {tuple(f.shape)} of images {tuple(x.shape)}; expected"
                " images of that shape. Resize images in the data set to sides that the codec keeps."
            )
        self.session.chain.cost.seconds += time.perf_counter() - start
        return made.to(x.dtype)

    # -- the mixtures

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        size, draws = len(partner), numbers(generator)
        count = size if self.per_sample else 1
        content, style = draw_shares(self.alpha, count, draws), draw_shares(self.alpha, count, draws)
        # lambda = r r_c + (1 - r) r_s, with the larger share first
        share = self.content_weight * content + (1 - self.content_weight) * style
        turned = share < 0.5
        content, style, share = (torch.where(turned, 1 - s, s) for s in (content, style, share))
        low, high = (content + style - 1).clamp(min=0), torch.minimum(content, style)
        both = low + torch.from_numpy(draws.uniform(size=count)) * (high - low)
        self._content, self._style = (1.0 - float(s.mean()) for s in (content, style))
        made = [self._through(x, lambda f: style_mix(f, partner, content, style, both)) for x in inputs]
        return made, share.float().expand(size)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        super().on_batch_start(session, batch, batch_idx)
        self._content, self._style = 0.0, 0.0

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "content": self._content, "style": self._style}


def _told(value: Any) -> str:
    return f"{tuple(value.shape)} {str(value.dtype)[6:]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
