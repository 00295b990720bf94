"""VisualPromptTuning against blocks that are run by hand on tokens and prompts; what trains, and what is refused."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_eff as eff
from lightning_eff import VisualPromptTuning
from tests import families
from tests.cases import Case, classifier
from tests.models import TinyGPT, hugging_face, loader, make_batch, trainer
from tests.runs import fit_yaml

NO_TOKENS = "did not each get tokens"
CASES = {
    "VisualPromptTuning": Case(
        active=lambda: VisualPromptTuning(3),
        neutral=lambda: VisualPromptTuning(0),
        model="vit",
        architecture=True,
        partial=True,
        stays="its prompts are tokens that no image has",
        refuses=dict.fromkeys(
            ("tiny_gpt", "short", "padded", "normed", "translator", "gpt2", "llama", "bert"), NO_TOKENS
        ),
        lost=(classifier, "classifier", "found no stack|did not each get tokens"),
    )
}


def prompts_of(net: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if name.endswith(".prompts")]


def by_hand(plain: Any, pixels: Tensor, prompts: list[Tensor], deep: bool) -> Tensor:
    """Logits of Hugging Face's ViT: class token, then prompts, then patches, as the paper writes them."""
    vit = plain.model.vit
    x = vit.embeddings(pixels)
    k = len(prompts[0])
    for i, block in enumerate(vit.layers):
        if i == 0 or deep:
            patches = x[:, 1:] if i == 0 else x[:, 1 + k :]
            x = torch.cat([x[:, :1], prompts[i if deep else 0].expand(len(x), -1, -1), patches], dim=1)
        x = block(x)
    return plain.model.classifier(vit.layernorm(x)[:, 0])


@pytest.mark.parametrize("deep", [True, False])
def test_it_is_the_papers_network_and_each_prompt_has_d_numbers(deep: bool) -> None:
    plain: Any = families.module("vit").eval()
    net = eff.apply(copy.deepcopy(plain), technique := VisualPromptTuning(k := 5, deep=deep))
    batch = families.batch("vit", 2)
    with torch.no_grad():
        expected = by_hand(plain, batch["pixel_values"], [*prompts_of(net)], deep)
        torch.testing.assert_close(net.eval().model(**batch).logits, expected, rtol=1e-5, atol=1e-6)
        assert (expected - plain.model(**batch).logits).abs().max() > 1e-4
    count = k * 32 * (4 if deep else 1)
    assert technique.report() == {
        "trained": count,
        "frozen": sum(p.numel() for p in plain.parameters()),
        "prompts": count // 32,
    }
    most = (6 / (1 * 2 * 2 + 32)) ** 0.5  # of a patch of 2 x 2, in one colour
    assert all(0.9 * most < p.abs().max() <= most for p in prompts_of(net))


@pytest.mark.parametrize("deep", [True, False])
def test_steps_are_those_of_prompts_written_by_hand(deep: bool) -> None:
    """torch's AdamW on prompts and head; every other weight is bit for bit what it was."""
    plain: Any = families.module("vit")
    settings: dict[str, Any] = {"deep": deep, "also": ["classifier"]}
    net = eff.apply(copy.deepcopy(plain), VisualPromptTuning(3, **settings))
    before = copy.deepcopy(plain.state_dict())
    mine = [nn.Parameter(p.detach().clone()) for p in prompts_of(net)]
    plain.requires_grad_(False)
    plain.model.classifier.requires_grad_(True)
    optimizer = torch.optim.AdamW([*mine, *plain.model.classifier.parameters()], lr=net.lr)
    for batch in loader("vit", shuffle=False):
        optimizer.zero_grad()
        F.cross_entropy(by_hand(plain, batch["pixel_values"], [*mine], deep), batch["labels"]).backward()
        optimizer.step()
    t = trainer(VisualPromptTuning(3, **settings), max_steps=5)
    t.fit(net, loader("vit", shuffle=False))
    for p, q in zip(prompts_of(net), mine, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(net.model.classifier.weight, plain.model.classifier.weight, rtol=1e-4, atol=1e-6)
    for name, p in net.named_parameters():
        assert "classifier" in name or name.endswith(".prompts") or torch.equal(p, before[name]), name
    held = {id(p) for group in t.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in (*prompts_of(net), *net.model.classifier.parameters())}


class Patches(nn.Module):
    """A vision transformer written by hand, of torch's own layers, which takes the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, 16, 2, 2)
        self.place = nn.Parameter(torch.randn(1, 16, 16))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("deep", [True, False])
def test_one_written_by_hand_and_what_comes_behind_sees_no_prompts(deep: bool) -> None:
    plain = Patches()
    net: Any = eff.apply(copy.deepcopy(plain), VisualPromptTuning(2, deep=deep))
    images = torch.randn(2, 1, 8, 8)
    x = plain.cut(images).flatten(2).mT + plain.place
    prompts = prompts_of(net)
    for i, block in enumerate(plain.blocks):
        if deep or i == 0:
            x = torch.cat([x[:, :16], prompts[i].expand(2, -1, -1)], dim=1)
        x = block(x)
    torch.testing.assert_close(net(images), plain.head(x[:, :16].mean(1)), rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # torch's kernel for evaluation, which reads the weights of the layer's parts
        torch.testing.assert_close(net.eval()(images), net.train()(images), rtol=1e-4, atol=1e-5)


class Towers(Patches):
    """More towers side by side than blocks that feed one another."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(4))

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(torch.cat([tower(x) for tower in self.towers], 1).mean(1))


@pytest.mark.parametrize("deep", [True, False])
def test_towers_side_by_side_are_no_stack(deep: bool) -> None:
    net: Any = eff.apply(Towers(), VisualPromptTuning(2, deep=deep))
    assert [name for name, _ in net.named_parameters() if "prompts" in name] == [
        f"blocks.{i}.prompts" for i in range(3 if deep else 1)
    ]
    with pytest.raises(ValueError, match=r"layers='towers'\): .* side by side.*Stacks: 'blocks' \(3 x Tr"):
        eff.apply(Towers(), VisualPromptTuning(2, deep=deep, layers="towers"))


@pytest.mark.parametrize("name", ["beit", "dinov2", "vit_msn"])
def test_on_models_of_others(name: str) -> None:
    net, losses, steps = families.train(name, VisualPromptTuning(3))
    assert steps == families.STEPS and torch.tensor(losses).isfinite().all()
    plain = families.module(name).state_dict()
    moved = {n for n, p in net.named_parameters() if n not in plain or not torch.equal(p, plain[n])}
    assert moved == {n for n, _ in net.named_parameters() if n.endswith(".prompts")} and len(moved) == 4


def test_a_copy_has_prompts_of_its_own_and_a_checkpoint_is_the_prompts(tmp_path: Path, caplog: Any) -> None:
    net = hugging_face("vit")
    plain = copy.deepcopy(net)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        t = trainer(VisualPromptTuning(3, deep=False), max_steps=2)
        t.fit(net, loader("vit"))
    assert "3 prompts of 32 numbers at the first of the blocks at 'model.vit.layers' (4 x ViTLayer)" in caplog.text
    t.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert [*saved] == ["model.vit.layers.0.prompts"]
    other = copy.deepcopy(eff.apply(plain, VisualPromptTuning(3, deep=False)))
    other.load_state_dict(saved, strict=False)
    batch = make_batch("vit")
    assert torch.equal(other.eval().model(**batch).logits, net.eval().model(**batch).logits)
    with torch.no_grad():
        prompts_of(other)[0].add_(1.0)
    assert not torch.equal(other.model(**batch).logits, net.model(**batch).logits)


def test_in_a_config(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "VisualPromptTuning", {"length": 3}, model="VideoMAE", data="Videos", max_steps=2)


# -- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": -1}, r"length=-1\): expected an integer >= 0: the number of prompts"),
        ({"deep": 1}, r"deep=1\): expected True or False: whether each block has prompts"),
        (
            {"layers": ""},
            r"layers=''\): expected a dotted path, a pattern or a list of dotted paths, or None: the blocks",
        ),
        ({"also": "head"}, r"also='head'\): expected a list of dotted paths"),
    ],
)
def test_other_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisualPromptTuning(**settings)


class Masked(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(src, mask)


class MaskedPatches(Patches):
    """Its blocks are handed a mask of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(16, 2, 32, 0.0, batch_first=True) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.cut(images).flatten(2).mT + self.place
        for block in self.blocks:
            x = block(x, torch.zeros(16, 16))
        return self.head(x.mean(1))


def test_what_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"blocks at .* did not each get tokens .* of an image"):
        eff.apply(TinyGPT(2), VisualPromptTuning(3))
    net = MaskedPatches()
    with pytest.raises(ValueError, match=r"gets 1 of shape \(16, 16\) with its 16 tokens"):
        eff.apply(net, VisualPromptTuning(3))
    assert all(type(m) is Masked for m in net.blocks) and all(p.requires_grad for p in net.parameters())
    with pytest.raises(ValueError, match="cannot run on 3 more tokens"):
        eff.apply(families.module("swin"), VisualPromptTuning(3, layers="model.swin.encoder.layers.0.blocks"))
    t = trainer(VisualPromptTuning(3, deep=False), eff.PatchDropout(), max_steps=1)
    with pytest.raises(ValueError, match="give deep=True"):
        t.fit(hugging_face("vit"), loader("vit"))
