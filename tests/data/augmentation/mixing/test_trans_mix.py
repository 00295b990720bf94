"""TransMix: shares are what the class token attends to, written out; even attention is CutMix; no gradient goes through it."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff.data.augmentation.mixing._reading import grid_of
from lightning_eff.data.augmentation.mixing.trans_mix import attended_share
from lightning_eff.model.growth import _dropping
from tests.cases import Case
from tests.data.augmentation.modules import CLASSES, LOSSES, ON_IMAGES, SIZE, ResNet, Spied, batches, codes, train, vit
from tests.runs import fit_yaml

CASES = {
    "TransMix": Case(
        active=lambda: eff.TransMix(),
        neutral=lambda: eff.TransMix(prob=0.0),
        **ON_IMAGES,
    )
}


class Own(ResNet):
    """A transformer written by hand, of one block on patches of 2 x 2 pixels, whose attention is of a kind."""

    def __init__(self, kind: str = "fused", beside: int = 1, even: bool = False, scale: float = 4.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.kind = nn.Conv2d(1, 8, 2, stride=2), kind
        self.token = nn.Parameter(torch.randn(1, beside, 8))
        self.places = nn.Parameter(torch.randn(1, 16 + beside, 8))
        self.qkv = nn.MultiheadAttention(8, 2, batch_first=True)
        with torch.no_grad():
            self.qkv.in_proj_weight[:16].mul_(0.0 if even else scale)
        self.weights: list[Tensor] = []
        self.scores: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        h = self.body(images).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.places
        projected = F.linear(h, self.qkv.in_proj_weight, self.qkv.in_proj_bias)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in projected.chunk(3, dim=-1))
        a = (q @ k.transpose(-1, -2) / 2).softmax(-1) if self.kind == "by hand" else None
        self.weights.append(torch.exp(q @ k.transpose(-1, -2) / 2).detach())
        if self.kind == "module":
            return self.head(self.qkv(h, h, h, need_weights=False)[0][:, 0])
        made = F.scaled_dot_product_attention(q, k, v) if a is None else a @ v
        return self.head(self.qkv.out_proj(made.transpose(1, 2).flatten(2))[:, 0])

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        self.scores.append(z)
        return F.cross_entropy(z, y)


def shares_by_hand(own: Tensor, weights: Tensor, beside: int) -> Tensor:
    """``A . down(M)`` by loops: ``weights`` (B, heads, T, T), of any sum, ``own`` (B, 8, 8)."""
    found = []
    for b in range(len(own)):
        a = (weights[b] / weights[b].sum(-1, keepdim=True))[:, 0].mean(0)[beside:]
        total = sum(
            float(a[4 * i + j]) * float(own[b, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].float().mean())
            for i in range(4)
            for j in range(4)
        )
        found.append(total / float(a.sum()))
    return torch.tensor(found)


class Shown(Spied):
    """What was mixed, and which pixels were an image's own."""

    def __init__(self, technique: Any) -> None:
        super().__init__(technique)
        self.own: list[Tensor] = []
        mix = technique.mix

        def spy(inputs: Any, partner: Any, generator: Any) -> Any:
            made = mix(inputs, partner, generator)
            self.own.append(technique._own.expand(len(partner), -1, -1))
            return made

        technique.mix = spy


@pytest.mark.parametrize("attention", [1.0, 0.5])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize(("kind", "beside"), [("fused", 1), ("fused", 5), ("by hand", 2), ("module", 1)])
def test_shares_are_the_class_tokens_attention_to_an_images_own_pixels(
    kind: str, beside: int, per_sample: bool, attention: float
) -> None:
    technique = eff.TransMix(per_sample=per_sample, attention=attention)
    shown, data = Shown(technique), batches(2)
    net = train(Own(kind, beside), technique, data=data)
    for k, (_, y) in enumerate(data):
        share = attention * shares_by_hand(shown.own[k], net.weights[k - 2], beside) + (1 - attention) * shown.shares[k]
        assert (share - shown.shares[k]).abs().max() > 0.02, "attention says something else than areas"
        partner = shown.partners[k]
        soft = share[:, None] * codes(y) + (1 - share[:, None]) * codes(y[partner])
        expected = LOSSES["cross-entropy"][1](net.scores[k - 2], soft)
        assert net.losses[k - 2] == pytest.approx(expected.item(), rel=1e-5)
    assert float(technique.report()["attended"]) == pytest.approx(1 - float(share.mean()), rel=1e-4)


def test_even_attention_is_cut_mix() -> None:
    """Of whatever boxes, also those whose borders cut patches: the areas' shares, and so CutMix's run."""
    own = torch.rand(40, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.7
    even = torch.full((40, 16), 0.3)
    torch.testing.assert_close(attended_share(even, own, (4, 4)), own.float().mean((1, 2)), rtol=1e-6, atol=0)
    runs = []
    for technique in (eff.TransMix(), eff.CutMix(), eff.TransMix(attention=0.0)):
        pl.seed_everything(0, verbose=False)
        net = train(Own(even=True), technique, data=batches(4))
        runs.append(net)
    for other in runs[::2]:
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(other.given, runs[1].given, strict=True))
    # in the first step alone: afterwards queries and keys have gradients, and attention is not even
    assert runs[0].losses[0] == pytest.approx(runs[1].losses[0], rel=1e-6)
    assert runs[2].losses == runs[1].losses


def test_no_gradient_goes_through_the_shares() -> None:
    """Gradients are those of the loss with the shares as numbers, also in queries and keys."""
    x, y = batches()[0]
    technique, found = eff.TransMix(per_sample=True), []

    class Gradient(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            found.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})

    net, shown = Own(), Shown(technique)
    twin = copy.deepcopy(net)
    train(net, technique, Gradient(), data=[(x, y)])
    z = twin(net.given[-1][0])
    share = shares_by_hand(shown.own[0], twin.weights[-1], 1)[:, None]
    soft = share * codes(y) + (1 - share) * codes(y[shown.partners[0]])
    LOSSES["cross-entropy"][1](z, soft).backward()
    for name, p in twin.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[0][name], p.grad, rtol=1e-4, atol=1e-6)
    assert found[0]["qkv.in_proj_weight"][:16].abs().max() > 0


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_faces_vit(implementation: str, again: bool) -> None:
    x, y = batches()[0]
    net = vit()
    for m in net.modules():
        m.p = 0.0 if isinstance(m, nn.Dropout) else getattr(m, "p", None)
    net.model.set_attn_implementation(implementation)
    twin = copy.deepcopy(net)
    if again:
        net.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    technique = eff.TransMix(per_sample=True)
    shown = Shown(technique)
    train(net, technique, data=[(x, y)])
    twin.model.set_attn_implementation("eager")
    output = twin.model(pixel_values=net.given[-1][0], output_attentions=True)
    share = shares_by_hand(shown.own[0], output.attentions[-1].detach(), 1)[:, None]
    soft = share * codes(y) + (1 - share) * codes(y[shown.partners[0]])
    assert net.losses[-1] == pytest.approx(LOSSES["cross-entropy"][1](output.logits, soft).item(), rel=1e-5)


def test_what_chooses_samples_scores_and_trains_by_these_shares() -> None:
    """All of a batch, in another order or with others left out: each keeps its own share."""
    x, y = batches()[0]
    alone, both = Own(), Own()
    pl.seed_everything(0, verbose=False)
    technique = eff.TransMix(per_sample=True)
    shown = Shown(technique)
    train(alone, technique, data=[(x, y)])
    pl.seed_everything(0, verbose=False)
    train(both, eff.TransMix(per_sample=True), eff.OrderedSGD(keep=[(0.0, 0.5)]), data=[(x, y)])
    share = shares_by_hand(shown.own[0], alone.weights[-1], 1)[:, None]
    soft = share * codes(y) + (1 - share) * codes(y[shown.partners[0]])
    rows = -(soft * alone.scores[-1].log_softmax(-1)).sum(-1)
    assert both.losses[-1] == pytest.approx(rows.topk(SIZE // 2).values.mean().item(), rel=1e-5)


def test_of_versions_of_an_image_the_plain_one_says_its_share() -> None:
    """SideOutputs AugMix's consistency, whose loss on labels is that of the plain images."""
    pytest.importorskip("kornia")
    x, y = batches()[0]
    technique, other, net = eff.TransMix(per_sample=True), eff.AugMix(consistency=2.0, mean=0.5, std=0.1), Own()
    shown = Shown(technique)
    train(net, technique, other, data=[(x, y)])
    assert len(net.given[-1][0]) == 3 * SIZE
    share = shares_by_hand(shown.own[0], net.weights[-1][:SIZE], 1)[:, None]
    soft = share * codes(y) + (1 - share) * codes(y[shown.partners[0]])
    plain = LOSSES["cross-entropy"][1](net.scores[-1][:SIZE], soft).item()
    assert float(technique.report()["attended"]) == pytest.approx(1 - float(share.mean()), rel=1e-4)
    assert net.losses[-1] == pytest.approx(plain + 2.0 * float(other.report()["divergence"]), rel=1e-5)


def test_where_others_pass_over_all_blocks_shares_go_by_area(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several stacks, the block that runs in every step may be one without attention."""
    monkeypatch.setattr(_dropping, "at_least_one", lambda keep, dropped: (keep, dropped))
    technique, rests, found = eff.TransMix(), eff.StochasticDepth(drop=0.99), []

    class Note(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append((rests.report()["layers_dropped"], float(technique.report()["attended"])))

    spied = Spied(technique)
    train(vit(), technique, rests, Note(), data=batches(12))
    areas = [1 - float(share.mean()) for share in spied.shares]
    same = [attended == pytest.approx(area, abs=1e-6) for (_, attended), area in zip(found, areas, strict=True)]
    assert same == [dropped == 2 for dropped, _ in found] and 0 < sum(same) < 12


@pytest.mark.parametrize(
    ("patches", "side", "expected"),
    [
        (16, (8, 8), (4, 4)),
        (196, (224, 224), (14, 14)),
        (98, (224, 112), (14, 7)),
        (15, (8, 8), None),
        (0, (8, 8), None),
        (-3, (8, 8), None),
    ],
)
def test_grids(patches: int, side: tuple[int, int], expected: Any) -> None:
    assert grid_of(patches, side) == expected


class Mean(Own):
    """Has no class token."""

    def __init__(self) -> None:
        super().__init__(beside=0)

    def forward(self, images: Tensor) -> Tensor:
        h = self.body(images).flatten(2).transpose(1, 2)[:, None]
        return self.head(F.scaled_dot_product_attention(h, h, h).mean((1, 2)))


class Windows(Own):
    def forward(self, images: Tensor) -> Tensor:
        h = self.body(images).flatten(2).transpose(1, 2).reshape(-1, 1, 8, 8)
        return self.head(F.scaled_dot_product_attention(h, h, h).reshape(len(images), 16, 8).mean(1))


class Asks(Own):
    def forward(self, images: Tensor) -> Tensor:
        h = self.body(images).flatten(2).transpose(1, 2)
        return self.head(self.qkv(h, h, h)[0].mean(1))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (ResNet, "saw no attention in training_step"),
        (Mean, "is to 16 tokens, which are no grid of square patches of images of 8 x 8 pixels"),
        (Windows, "is of 12 sequences for 6 images, as in windows"),
        (Asks, "it returns attention weights"),
    ],
    ids=["none", "mean", "windows", "weights"],
)
def test_what_has_no_class_token_to_read_is_refused_before_any_weight_changes(net: Any, message: str) -> None:
    built = net()
    before = [p.clone() for p in built.parameters()]
    with pytest.raises(ValueError, match=f"TransMix: .*{message}"):
        train(built, eff.TransMix())
    assert all(torch.equal(p, q) for p, q in zip(built.parameters(), before, strict=True))


def test_fewer_tokens_in_the_last_block_are_an_error() -> None:
    class Drops(Own):
        def forward(self, images: Tensor) -> Tensor:
            if self.global_step:
                h = self.body(images).flatten(2).transpose(1, 2)[:, None, :7]
                return self.head(F.scaled_dot_product_attention(h, h, h).mean((1, 2)))
            return super().forward(images)

    with pytest.raises(
        ValueError, match="the last attention was one of 6 sequences to 7 tokens, unlike in the first batch"
    ):
        train(Drops(), eff.TransMix(), data=batches(2))


def test_arguments_and_control() -> None:
    with pytest.raises(ValueError, match=r"TransMix\(attention=2\): expected a number in \[0, 1\]"):
        eff.TransMix(attention=2)
    with pytest.raises(ValueError, match=r"TransMix\(alpha=0\): expected a finite number > 0"):
        eff.TransMix(alpha=0)
    technique = eff.TransMix(alpha=0.7, prob=0.4)
    (arm,) = technique.control.arms(technique).values()
    assert isinstance(arm, eff.TransMix) and (arm.attention, arm.alpha, arm.prob) == (0.0, 0.7, 0.4)
    assert technique.control.arms(arm) == {} and CLASSES > 1


class HandWritten(Own):
    """For the command line."""

    def __init__(self) -> None:
        super().__init__("module")


def test_yaml(tmp_path: Path) -> None:
    here = "tests.data.augmentation"
    names: Any = {"model": f"{here}.mixing.test_trans_mix.HandWritten", "data": f"{here}.modules.Pictures"}
    fit_yaml(tmp_path, "TransMix", {"attention": 0.5}, max_steps=4, **names)
