"""StyleMix: mix the content and the style of two images with separate weights (Hong, Choi & Kim 2021)."""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Fraction
from lightning_eff._core._samples.functions import TensorFunction
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Step
from lightning_eff._core.technique import Control
from lightning_eff.data.augmentation._arguments import Alpha, Keys, NetworkOrFunction, Probability, Until
from lightning_eff.data.augmentation._boxes import numbers
from lightning_eff.data.augmentation._mixing import Mixing, draw_shares
from lightning_eff.data.augmentation.mixing._given import Given

WHO = "StyleMix"
_EPSILON = 1e-5  # added to variances
_PIXELS = "torch.nn.Identity() for both uses the mean and standard deviation of each colour channel as style."
_ENCODER = NetworkOrFunction("images (B, C, H, W) that returns features (B, F, h, w)", _PIXELS)
_DECODER = NetworkOrFunction("features (B, F, h, w) that returns images (B, C, H, W)", _PIXELS)

Codec = nn.Module | TensorFunction


def statistics(f: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``mu(f)`` and ``sigma(f) = sqrt(var(f) + 1e-5)`` of each channel of each sample, (B, F, 1, 1) each."""
    return f.mean(dim=(2, 3), keepdim=True), (f.var(dim=(2, 3), correction=0, keepdim=True) + _EPSILON).sqrt()


def ada_in(content: Tensor, style: Tensor) -> Tensor:
    """Return ``sigma(s) (c - mu(c)) / sigma(c) + mu(s)``: the content's features with the style's statistics.

    Args:
        content: ``c``, (B, F, h, w).
        style: ``s``, (B, F, h', w').
    """
    mean, deviation = statistics(content)
    other_mean, other_deviation = statistics(style)
    return other_deviation * (content - mean) / deviation + other_mean


def style_mix(f: Tensor, partner: Tensor, content: Tensor, style: Tensor, both: Tensor) -> Tensor:
    """Return ``t f_ii + (r_c - t) f_ij + (r_s - t) f_ji + (1 - r_c - r_s + t) f_jj``, (B, F, h, w).

    ``f_ij`` are the features of content ``i`` in the style of ``j``, by :func:`ada_in`. ``f_ii`` are the features of ``i``. So
    the total weight of content ``i`` is ``r_c``, and that of style ``i`` is ``r_s``.

    Args:
        f: features, (B, F, h, w).
        partner: ``j``, (B,), integers.
        content: ``r_c``, (B,) or (1,), in [0, 1].
        style: ``r_s``.
        both: ``t``, from ``max(0, r_c + r_s - 1)`` to ``min(r_c, r_s)``.
    """
    other = f.index_select(0, partner.to(f.device))
    t, c, s = (share.to(f.device, f.dtype).reshape(-1, 1, 1, 1) for share in (both, content, style))
    return t * f + (c - t) * ada_in(f, other) + (s - t) * ada_in(other, f) + (1 - c - s + t) * other


def _of_pixels(cls: Callable[..., Any], values: Mapping[str, Any], profile: RunProfile) -> Any:
    """Build the technique with a codec that changes nothing, so that styles are those of the pixels."""
    return cls(encoder=nn.Identity(), decoder=nn.Identity(), **values)


def _pointless(profile: RunProfile) -> str | None:
    return "the search has no codec"


class StyleMix(Mixing):
    """Mix the content and the style of two images with separate weights, and their labels accordingly.

    You give an encoder that turns images into features, and a decoder that turns features back into images. Each image of a
    micro-batch is mixed with another one, given by a random permutation. ``f_ij`` are the features of image ``i`` with the
    channel means and standard deviations of image ``j`` (adaptive instance normalisation). The mixture is decoded from
    ``t f_ii + (r_c - t) f_ij + (r_s - t) f_ji + (1 - r_c - r_s + t) f_jj``. The content weight ``r_c`` and the style weight
    ``r_s`` are drawn from ``Beta(alpha, alpha)``, and ``t`` uniformly from its possible values. The loss is
    ``lambda L(y_i) + (1 - lambda) L(y_j)`` with ``lambda = r r_c + (1 - r) r_s``, computed in the same forward pass. For
    cross-entropy and binary cross-entropy this equals the loss on the mixed target. ``training_step`` still receives integer
    labels, those with the larger weight.

    Use it for image classification when you have a codec trained for style transfer and train for many epochs. Each mixed step
    costs a pass of the encoder and of the decoder, and the training loss falls more slowly.

    The codec gets images as they are in the batch, normalised. The paper's is VGG-19 up to relu4_1, with a matching decoder. It
    runs in evaluation mode without gradients on the images' device, and is not part of checkpoints. With
    ``torch.nn.Identity()`` for both, the style is the mean and standard deviation of each colour channel, at no cost. The
    paper's variant with CutMix boxes and its choice of styles by distance are not implemented.

    There must be one label per image. Metrics that ``training_step`` computes from the labels are too low, and a warning says
    so. Techniques that choose samples by their loss see the mixtures. If several techniques mix, they take turns, one per
    batch.

    It logs ``share``, the mean weight of the other images' labels in the last micro-batch. ``content`` and ``style`` are the
    mean weights of their content and style, and ``milliseconds`` is the host time of the mixing.

    Args:
        encoder: the first half of the codec, from images (B, C, H, W) to features (B, F, h, w).
        decoder: the second half of the codec, from such features to images.
        alpha: the parameter of the Beta distribution of the two weights. 1 draws them uniformly.
        content_weight: the weight of the content in the label weights (``r`` above). The rest is that of the style.
        prob: the probability that a micro-batch is mixed. The paper uses 0.2. 0 is plain training.
        until: the fraction of the budget after which batches are left unchanged. 0 is plain training.
        per_sample: whether each image has its own weights. By default there is one draw per micro-batch.
        keys: the names or positions of the images in the batch, floating point, shape (B, C, H, W). None takes all such
            tensors.
        labels: the names or positions of the labels in the batch. None takes the tensors that are targets of the step's losses.

    Raises:
        ValueError: for a value out of range or a missing codec. At setup, if ``until`` is below 1 and the run has no end. At
            the first batch, before any weight changes, if images are not floating point, or labels are not one class per image.
            Also if no loss call on the labels is visible, or if the codec returns other shapes.

    Example:
        >>> style_mix = StyleMix(encoder=nn.Identity(), decoder=nn.Identity(), prob=0.5)
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[style_mix])

    References:
        Hong et al. 2021, "StyleMix: Separating Content and Style for Enhanced Data Augmentation", CVPR. Huang & Belongie 2017,
        "Arbitrary Style Transfer in Real-time with Adaptive Instance Normalization", arXiv:1703.06868.
    """

    paper = "Hong et al. 2021, CVPR, StyleMix: Separating Content and Style for Enhanced Data Augmentation"
    constraints = f"{Mixing.constraints}, and an encoder with its decoder"
    search_space = SearchSpace({"prob": Choice((0.2, 0.5)), "until": Choice((0.8, 1.0))}, _pointless, _of_pixels)
    control = Control("the baseline without augmentation, trained for the same time, and Mixup, which has no codec")
    logged = ("content", "style")

    def __init__(
        self,
        encoder: Annotated[Codec, _ENCODER],
        *,
        decoder: Annotated[Codec, _DECODER],
        alpha: Alpha = 1.0,
        content_weight: Annotated[float, Fraction()] = 0.7,
        prob: Probability = 0.2,
        until: Until = 1.0,
        per_sample: bool = False,
        keys: Keys = None,
        labels: Keys = None,
    ) -> None:
        super().__init__(alpha=alpha, prob=prob, until=until, per_sample=per_sample, keys=keys, labels=labels)
        self.encoder, self.decoder = encoder, decoder
        self.content_weight = content_weight

    @override
    def _reset(self) -> None:
        super()._reset()
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
        """Encode ``x``, apply ``change`` to the features and decode them, in the shape and dtype of ``x``."""
        start = time.perf_counter()
        encoder, decoder = self._codec
        f = encoder(x)
        if not (isinstance(f, Tensor) and f.ndim == 4 and len(f) == len(x) and f.is_floating_point()):
            raise ValueError(
                f"{WHO}: the encoder returned {_told(f)} for images {tuple(x.shape)}. Let it return the features of one layer,"
                f" ({len(x)}, F, h, w), floating point."
            )
        with torch.no_grad():
            f = change(f)
        made = decoder(f)
        if not (isinstance(made, Tensor) and made.shape == x.shape and made.is_floating_point()):
            raise ValueError(
                f"{WHO}: the decoder returned {_told(made)} for features {tuple(f.shape)} of images {tuple(x.shape)}. Resize"
                " images in the data set to sides that the codec preserves."
            )
        self.session.chain.cost.seconds += time.perf_counter() - start
        return made.to(x.dtype)

    # -- the mixtures

    @override
    def mix(self, inputs: list[Tensor], partner: Tensor, generator: Generator) -> tuple[list[Tensor], Tensor]:
        size, draws = len(partner), numbers(generator)
        count = size if self.per_sample else 1
        content, style = draw_shares(self.alpha, count, draws), draw_shares(self.alpha, count, draws)
        # lambda = r r_c + (1 - r) r_s, at least one half
        share = self.content_weight * content + (1 - self.content_weight) * style
        turned = share < 0.5
        content, style, share = (torch.where(turned, 1 - s, s) for s in (content, style, share))
        low, high = (content + style - 1).clamp(min=0), torch.minimum(content, style)
        both = low + torch.from_numpy(draws.uniform(size=count)) * (high - low)
        self._figures = {"content": 1.0 - float(content.mean()), "style": 1.0 - float(style.mean())}
        made = [self._through(x, lambda f: style_mix(f, partner, content, style, both)) for x in inputs]
        return made, share.float().expand(size)


def _told(value: Any) -> str:
    return f"{tuple(value.shape)} {str(value.dtype)[6:]}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
