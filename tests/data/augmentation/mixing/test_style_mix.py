"""StyleMix: features have the style's statistics, mixtures are those written out, shares of one reconstruct."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff.data.augmentation.mixing.style_mix import ada_in, style_mix
from tests.cases import Case
from tests.data.augmentation.modules import (
    LOSSES,
    ON_IMAGES,
    Own,
    ResNet,
    Spied,
    batches,
    check_exact,
    conv_next,
    train,
    vit,
)
from tests.runs import fit_yaml


class Encoder(nn.Module):
    """Features that would draw, learn and remember, were they not looked at alone: (B, 6, 4, 4) of (B, 1, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm, self.drop = nn.Conv2d(1, 6, 2, stride=2), nn.BatchNorm2d(6), nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append(self.training or torch.is_grad_enabled())
        return self.drop(self.norm(self.conv(images)))


class Decoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__(nn.ConvTranspose2d(6, 1, 2, stride=2))


def encode(images: Tensor) -> Tensor:
    """Squares of 2 x 2 pixels as four channels each."""
    return F.pixel_unshuffle(images, 2)


def decode(features: Tensor) -> Tensor:
    return F.pixel_shuffle(features, 2)


CASES = {
    "StyleMix": Case(
        active=lambda: eff.StyleMix(encoder=encode, decoder=decode, prob=0.9),
        neutral=lambda: eff.StyleMix(encoder=nn.Identity(), decoder=nn.Identity(), prob=0.0),
        **ON_IMAGES,
    )
}


def technique(**kwargs: Any) -> Any:
    return eff.StyleMix(**{"encoder": Encoder(), "decoder": Decoder(), "prob": 1.0, "per_sample": True, **kwargs})


def test_features_have_the_means_and_deviations_of_the_style() -> None:
    g = torch.Generator().manual_seed(0)
    content, style = torch.randn(5, 6, 7, 4, generator=g), 3 * torch.randn(5, 6, 3, 9, generator=g) + 2
    made = ada_in(content, style)
    assert made.shape == content.shape
    for b in range(5):
        for k in range(6):
            mine, other = made[b, k].flatten(), style[b, k].flatten()
            assert float(mine.mean()) == pytest.approx(float(other.mean()), abs=1e-5)
            assert float(mine.std(correction=0)) == pytest.approx(float(other.std(correction=0)), rel=1e-4)
    torch.testing.assert_close(ada_in(content, content), content, rtol=1e-5, atol=1e-5)
    assert bool(ada_in(style[..., :1, :1], style).isfinite().all()), "of a single place, too"


def in_style(content: Tensor, style: Tensor) -> Tensor:
    """AdaIN of one image's features, channel by channel."""
    rows = []
    for c, s in zip(content.double(), style.double(), strict=True):
        spread = [((t - t.mean()).square().mean() + 1e-5).sqrt() for t in (c, s)]
        rows.append((c - c.mean()) * (spread[1] / spread[0]) + s.mean())
    return torch.stack(rows)


def by_hand(f: Tensor, partner: Tensor, content: Tensor, style: Tensor, both: Tensor) -> Tensor:
    made = []
    for i, j in enumerate(partner.tolist()):
        c, s, t = (float(share[i % len(share)]) for share in (content, style, both))
        mine, other = f[i].double(), f[j].double()
        mixed = t * mine + (c - t) * in_style(mine, other) + (s - t) * in_style(other, mine)
        made.append(mixed + (1 - c - s + t) * other)
    return torch.stack(made)


@pytest.mark.parametrize("count", [1, 5])
def test_mixtures_are_those_of_four_features(count: int) -> None:
    g = torch.Generator().manual_seed(0)
    f, partner = torch.randn(5, 3, 4, 4, generator=g), torch.tensor([1, 2, 0, 4, 3])
    content, style = torch.rand(2, count, generator=g)
    both = torch.minimum(content, style) * 0.9
    made = style_mix(f, partner, content, style, both)
    torch.testing.assert_close(made.double(), by_hand(f, partner, content, style, both), rtol=1e-4, atol=1e-5)
    one = torch.ones(count)
    torch.testing.assert_close(style_mix(f, partner, one, one, one), f, rtol=0, atol=1e-6)
    # the content of one in the style of the other
    wholly = style_mix(f, partner, one, 0 * one, 0 * one)
    torch.testing.assert_close(wholly, ada_in(f, f[partner]), rtol=1e-5, atol=1e-5)


def test_shares_of_one_are_the_codecs_reconstruction(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_eff.data.augmentation.mixing import style_mix as file

    monkeypatch.setattr(file, "draw_shares", lambda alpha, count, rng: torch.ones(count, dtype=torch.float64))
    x, y = batches()[0]
    one = technique()
    spied = Spied(one)
    net = train(Own(F.cross_entropy), one, data=[(x, y)])
    with torch.no_grad():
        expected = Decoder()(Encoder().eval()(x))
    torch.testing.assert_close(net.given[-1][0], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(spied.shares[0], torch.ones(len(x)))


@pytest.mark.parametrize("per_sample", [False, True])
def test_in_training_images_are_decoded_mixtures_and_labels_go_by_both_shares(
    per_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_eff.data.augmentation.mixing import style_mix as file

    drawn: list[Any] = []

    def spy(f: Tensor, *shares: Tensor) -> Tensor:
        drawn.append((f, *shares))
        return style_mix(f, *shares)

    monkeypatch.setattr(file, "style_mix", spy)
    one, data = technique(per_sample=per_sample, content_weight=0.6), batches(20)
    spied = Spied(one)
    net = train(Own(F.cross_entropy), one, data=data)
    encoder, decoder = Encoder().eval(), Decoder()
    assert len(drawn) == 20
    several = 0
    for k, (f, partner, content, style, both) in enumerate(drawn):
        x, _ = data[k]
        assert torch.equal(f, encoder(x)) and torch.equal(partner, spied.partners[k])
        expected = decoder(by_hand(f, partner, content, style, both).float())
        torch.testing.assert_close(net.given[k - 20][0], expected, rtol=1e-3, atol=1e-4)
        share = (0.6 * content + 0.4 * style).float().expand(len(x))
        torch.testing.assert_close(spied.shares[k], share)
        assert float(share.min()) >= 0.5 and len(content) == (6 if per_sample else 1)
        assert bool(
            ((both >= content + style - 1 - 1e-9) & (both >= 0) & (both <= torch.minimum(content, style))).all()
        )
        several += int((content < 0.5).any() | (style < 0.5).any())
    assert several > 3, "one of the two may be the smaller"
    report = one.report()
    assert report["content"] == pytest.approx(1 - float(content.mean()))
    assert report["style"] == pytest.approx(1 - float(style.mean()))


@pytest.mark.parametrize("build", [lambda: Own(F.cross_entropy), vit, conv_next], ids=["own", "vit", "convnext"])
def test_the_loss_is_that_on_mixed_targets(build: Any) -> None:
    check_exact(build(), technique(), LOSSES["cross-entropy"][1])


def test_a_codec_is_looked_at_alone() -> None:
    encoder, decoder = Encoder().train(), Decoder()
    before = {name: t.clone() for name, t in encoder.state_dict().items()}
    net = train(ResNet(), technique(encoder=encoder, decoder=decoder), data=batches(3))
    assert encoder.modes == [False] * 4 and encoder.training, "one look, and one of each step"
    assert all(torch.equal(before[name], t) for name, t in encoder.state_dict().items())
    assert all(p.grad is None for p in (*encoder.parameters(), *decoder.parameters()))
    assert set(net.state_dict()) == set(ResNet().state_dict())


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ({"encoder": lambda x: x.flatten(1)}, r"the encoder returned \(6, 64\) float32 for images \(6, 1, 8, 8\)"),
        ({"encoder": lambda x: [x]}, "the encoder returned a list"),
        (
            {"decoder": lambda f: f},
            r"the decoder returned \(6, 6, 4, 4\) float32 for features \(6, 6, 4, 4\) of images",
        ),
    ],
)
def test_what_is_no_codec_is_refused_before_any_weight_changes(codec: Any, message: str) -> None:
    net = ResNet()
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=f"StyleMix: {message}"):
        train(net, technique(**codec))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_arguments() -> None:
    with pytest.raises(
        ValueError,
        match=r"StyleMix\(encoder=None\): expected a module or function of images.*torch.nn.Identity\(\) for both",
    ):
        technique(encoder=None)
    with pytest.raises(ValueError, match=r"StyleMix\(decoder=None\): expected a module or function of features"):
        technique(decoder=None)
    with pytest.raises(ValueError, match=r"StyleMix\(alpha=0\): expected a finite number > 0"):
        technique(alpha=0)
    with pytest.raises(ValueError, match=r"StyleMix\(content_weight=2\): expected a number in \[0, 1\]"):
        technique(content_weight=2)


def test_yaml(tmp_path: Path) -> None:
    here = "tests.data.augmentation"
    names: Any = {"model": f"{here}.modules.ResNet", "data": f"{here}.modules.Pictures"}
    own = {"encoder": {"class_path": f"{here}.mixing.test_style_mix.Encoder"}}
    own["decoder"] = {"class_path": f"{here}.mixing.test_style_mix.Decoder"}
    plain = {name: {"class_path": "torch.nn.Identity"} for name in ("encoder", "decoder")}
    for codec in (own, plain):
        fit_yaml(tmp_path, "StyleMix", {**codec, "prob": 0.5}, max_steps=4, **names)
