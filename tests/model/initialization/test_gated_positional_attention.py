"""GatedPositionalAttention: rows sum to 1, heads of high locality are shifts, and every way of attending is mixed alike."""

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import lightning_eff as eff
from lightning_eff import GatedPositionalAttention
from lightning_eff.model.initialization._gated.mixing import Grid, Mixing
from lightning_eff.model.initialization._gated.rule import centres, local_weights, mixed, position_scores, relative
from lightning_eff.model.initialization.gated_positional_attention import gated_layers
from tests.cases import Case, classifier
from tests.models import HuggingFace, hugging_face, loader, make_batch, module, trainer
from tests.runs import fit_yaml

NO_IMAGES = "does not attend to the patches of an image"
CASES = {
    "GatedPositionalAttention": Case(
        active=lambda: GatedPositionalAttention(),
        neutral=lambda: GatedPositionalAttention(gated=0),
        model="vit",
        architecture=True,
        stays="attention without gates computes something else",
        refuses=dict.fromkeys(
            ("tiny_gpt", "gpt2", "llama", "bert", "classifier", "translator", "padded", "t5"), NO_IMAGES
        ),
        lost=(classifier, "classifier", "ran without attention"),
    )
}


# -- the rule


def test_places_are_relative_row_by_row() -> None:
    r = relative(2, 3)
    assert r[0, 5].tolist() == [2, 1, 5] and r[4, 0].tolist() == [-1, -1, 2] and not r.diagonal().any()


@pytest.mark.parametrize(("heads", "side"), [(1, 1), (4, 2), (9, 3), (16, 4)])
def test_squares_of_heads_look_around_themselves(heads: int, side: int) -> None:
    at = {tuple(place) for place in centres(heads).tolist()}
    line = [k - (side - 1) / 2 for k in range(side)]
    assert at == {(x, y) for x in line for y in line}


def test_other_numbers_of_heads_look_next_to_themselves() -> None:
    assert {tuple(place) for place in centres(5).tolist()} == {(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)}
    assert len({tuple(place) for place in centres(12).tolist()}) == 12


def test_scores_fall_by_the_square_of_the_distance_from_the_centre() -> None:
    scores = position_scores(local_weights(9, 0.7), 4, 5)
    for head, (dx, dy) in enumerate(centres(9).tolist()):
        for i in range(20):
            distance = torch.tensor([(j % 5 - i % 5 - dx) ** 2 + (j // 5 - i // 5 - dy) ** 2 for j in range(20)])
            torch.testing.assert_close(scores[head, i].softmax(0), (-0.7 * distance).softmax(0))


def test_rows_sum_to_one() -> None:
    content = torch.randn(2, 4, 6, 6).softmax(-1)
    position = position_scores(torch.randn(4, 3), 2, 3).softmax(-1)
    whole = mixed(content, position, torch.randn(4))
    torch.testing.assert_close(whole.sum(-1), torch.ones(2, 4, 6))
    torch.testing.assert_close(mixed(content, position, torch.full((4,), -50.0)), content)


def test_local_heads_are_the_taps_of_a_convolution() -> None:
    """Against a convolution with one 1 in its kernel, on a grid that repeats its border."""
    height, width, heads = 4, 5, 9
    q, k, v = (torch.randn(2, heads, 1 + height * width, 8) for _ in range(3))
    mixing = Mixing(torch.full((heads,), 40.0), local_weights(heads, 50.0), Grid(height, width, 1, 0))
    out = mixing.fused(q, k, v)
    torch.testing.assert_close(out[:, :, 0], F.scaled_dot_product_attention(q, k, v)[:, :, 0])  # the class token
    for head, (dx, dy) in enumerate(centres(heads).tolist()):
        image = v[:, head, 1:].transpose(1, 2).unflatten(2, (height, width))
        kernel = torch.zeros(8, 1, 3, 3)
        kernel[:, 0, 1 + int(dy), 1 + int(dx)] = 1.0
        taps = F.conv2d(F.pad(image, (1, 1, 1, 1), mode="replicate"), kernel, groups=8)
        torch.testing.assert_close(out[:, head, 1:], taps.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_ten_of_twelve_layers() -> None:
    assert [gated_layers(n) for n in (1, 2, 4, 12, 24)] == [1, 1, 3, 10, 20]


# -- unchanged modules


def by_hand(q: Tensor, k: Tensor, v: Tensor, m: Any, others: int, mask: Tensor | None = None) -> Tensor:
    """Attention of a gated module by its equation, number by number where it counts: (B, H, N, d)."""
    n = q.shape[2]
    scores = q @ k.mT / q.shape[-1] ** 0.5 + (0 if mask is None else mask)
    content = scores.softmax(-1)
    side = round((n - others) ** 0.5)
    weights = content.clone()
    for h in range(q.shape[1]):
        s, vh = torch.sigmoid(m.locality_gate[h]), m.locality_weight[h]
        for i in range(n - others):
            at = [(j % side - i % side, j // side - i // side) for j in range(n - others)]
            r = torch.tensor([(x, y, x * x + y * y) for x, y in at], dtype=torch.float32)
            row = torch.cat([torch.zeros(others), (r @ vh).softmax(0)])
            weights[:, h, others + i] = (1 - s) * content[:, h, others + i] + s * row
    return weights @ v


@torch.no_grad()
def stirred(m: Any) -> Any:
    """With gates and places that are drawn."""
    for name, p in m.named_parameters():
        if "locality" in name:
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.5)
    return m


def vit(attention: str, heads: int = 2, dropout: float = 0.0) -> HuggingFace:
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=64,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=5,
        attention_probs_dropout_prob=dropout,
        hidden_dropout_prob=0.0,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return HuggingFace(ViTForImageClassification(config))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hugging_face_by_its_equation(attention: str) -> None:
    m = stirred(eff.apply(vit(attention), GatedPositionalAttention(gated=1))).eval()
    layer = m.model.vit.layers[0].attention
    x = torch.randn(2, 17, 32)
    q, k, v = (f(x).view(2, 17, 2, 16).transpose(1, 2) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = layer.o_proj(by_hand(q, k, v, layer, 1).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)
    assert not hasattr(m.model.vit.layers[1].attention, "locality_gate")


class Patches(pl.LightningModule):
    """PyTorch's encoder layers on patches of (B, 3, 8, 8), with registers behind them where ``others`` says so."""

    def __init__(self, others: int = 0, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 2, stride=2)
        self.registers = nn.Parameter(torch.randn(1, others, 32)) if others else None
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.batch_first = batch_first
        self.head = nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        if self.registers is not None:
            x = torch.cat([x, self.registers.expand(len(x), -1, -1)], dim=1)
        y = self.encoder(x if self.batch_first else x.transpose(0, 1))
        return self.head((y if self.batch_first else y.transpose(0, 1)).mean(dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_own_layers_in_training_and_evaluation(batch_first: bool) -> None:
    m = stirred(eff.apply(Patches(batch_first=batch_first), GatedPositionalAttention(gated=1)))
    attention = m.encoder.layers[0].self_attn
    x = torch.randn(2, 16, 32)
    q, k, v = (
        part.view(2, 16, 4, 8).transpose(1, 2)
        for part in F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
    )
    expected = attention.out_proj(by_hand(q, k, v, attention, 0).transpose(1, 2).flatten(2))
    given = x if batch_first else x.transpose(0, 1)
    for need in (True, False):
        out, weights = attention(given, given, given, need_weights=need)
        torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)
        assert (weights is not None) == need
        if need:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 16))
    images = torch.randn(2, 3, 8, 8)
    trained = m.train()(images)
    with torch.no_grad():  # torch's layers have a faster way, which reads weights and calls no module
        torch.testing.assert_close(m.eval()(images), trained.detach())


def test_tokens_behind_the_patches_have_no_place() -> None:
    m = stirred(eff.apply(Patches(others=3), GatedPositionalAttention()))
    assert m.encoder.layers[1].self_attn.grid[2:] == (0, 3)
    assert not hasattr(m.encoder.layers[2].self_attn, "locality_gate")
    assert m(torch.randn(2, 3, 16, 16)).shape == (2, 5)


def test_images_of_another_size() -> None:
    m = eff.apply(Patches(), GatedPositionalAttention())
    assert m(torch.randn(2, 3, 16, 16)).shape == (2, 5)
    with pytest.raises(ValueError, match=r"24 tokens.*proportion of 8 x 8.*batch="):
        m(torch.randn(2, 3, 8, 12))


def test_closed_gates_are_the_plain_module() -> None:
    for plain, batch in (
        (hugging_face("vit", 3), make_batch("vit")["pixel_values"]),
        (Patches(), torch.randn(2, 3, 8, 8)),
    ):
        m = eff.apply(copy.deepcopy(plain), GatedPositionalAttention())
        with torch.no_grad():
            for name, p in m.named_parameters():
                if name.endswith("locality_gate"):
                    p.fill_(-60.0)
        one, other = (getattr(net, "model", net).eval()(batch) for net in (plain, m))
        one, other = (getattr(y, "logits", y) for y in (one, other))
        torch.testing.assert_close(one, other)


def test_copies_and_pickles_are_gated_too() -> None:
    m = stirred(eff.apply(vit("sdpa"), GatedPositionalAttention())).eval()
    x = make_batch("vit")["pixel_values"]
    for other in (copy.deepcopy(m.model), pickle.loads(pickle.dumps(m.model))):
        torch.testing.assert_close(other(x).logits, m.model(x).logits)
    layer = m.model.vit.layers[0].attention
    layer.reset_parameters()
    assert (layer.locality_gate == 1).all() and torch.equal(layer.locality_weight, local_weights(2, 1.0))


def test_gates_learn_and_do_not_decay() -> None:
    m, ours = module("vit"), GatedPositionalAttention()
    m.configure_optimizers = lambda: torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.1)
    run = trainer(ours, max_steps=3)
    run.fit(m, loader("vit"))
    gates = [p for name, p in m.named_parameters() if name.endswith("locality_gate")]
    assert len(gates) == 3 and all(not torch.equal(p, torch.ones_like(p)) for p in gates)
    group = next(g for g in run.optimizers[0].param_groups if any(p is gates[0] for p in g["params"]))
    assert group["weight_decay"] == 0.0
    assert ours.report()["layers"] == 3 and 0.5 < float(ours.report()["gate"]) < 0.9


class Windows(Patches):
    """It attends within windows of 4 patches."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(x.reshape(-1, 4, 32)).reshape(len(images), -1, 32).mean(dim=1))


def test_windows_and_texts_are_refused_with_what_was_found() -> None:
    with pytest.raises(ValueError, match=r"encoder.layers.0.self_attn attends on 4 tokens .*convolutions returned"):
        eff.apply(Windows(), GatedPositionalAttention())
    with pytest.raises(ValueError, match=r"blocks.0 attends on 8 tokens, causally .*as for texts"):
        eff.apply(module("tiny_gpt"), GatedPositionalAttention())


def test_more_layers_than_there_are_and_pretrained_ones_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gated=5.: only 4 layers of HuggingFace attend"):
        eff.apply(hugging_face("vit", 4), GatedPositionalAttention(gated=5))
    m = vit("sdpa")
    m.model.config._name_or_path = "some/vit"
    with pytest.raises(ValueError, match="was loaded from"):
        eff.apply(m, GatedPositionalAttention())
    assert eff.apply(m, GatedPositionalAttention(force=True)) is m


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gated": -1}, "gated=-1.: expected an integer >= 0, or None"),
        ({"gated": True}, "gated=True.: expected an integer >= 0, or None"),
        ({"locality": 0.0}, "locality=0.0.: expected a finite number > 0"),
        ({"force": 1}, "force=1.: expected True or False"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedPositionalAttention(**settings)


class Images(pl.LightningDataModule):
    """Noise of (B, 3, 8, 8)."""

    def train_dataloader(self) -> DataLoader[Any]:
        g = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(8, 3, 8, 8, generator=g), torch.arange(8) % 5), 4)


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = "tests.model.initialization.test_gated_positional_attention"
    settings = {"gated": 2, "locality": 2.0}
    fit_yaml(
        tmp_path,
        "GatedPositionalAttention",
        settings,
        model=f"{here}.Patches",
        data=f"{here}.Images",
        keeps_state=False,
        max_steps=2,
    )
    assert "2 layers attend by position at" in capsys.readouterr().out
