"""PatchDropout: kept patches carry their own positions through every block, class tokens stay, other heads are refused."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from examples.vit.module import EncoderBlock, ViT
from lightning_eff.data.tokens.patch_dropout import PatchDropout, kept_patches
from tests.cases import Case, classifier
from tests.data.tokens.images import (
    PATCHES,
    AttentionPool,
    B,
    D,
    MeanOfAll,
    MeanOfPatches,
    Net,
    Registers,
    gradients,
    hugging_face,
)
from tests.models import HuggingFace, make_batch, trainer
from tests.runs import differences, final_state, fit

_NO_IMAGES = "found no images in the batch"

CASES = {
    "PatchDropout": Case(
        active=lambda: PatchDropout(ratio=0.5),
        neutral=lambda: PatchDropout(ratio=0.0),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt"), _NO_IMAGES),
        lost=(classifier, "classifier", r"has the shape \(4, 8\); expected \(B, T, D\)"),
    )
}


class Noting(PatchDropout):
    """Remembers what it chose."""

    def attach(self, session: Any) -> None:
        super().attach(session)
        self.chosen: list[Tensor] = []

    def _choose(self, at: Any) -> Any:
        kept = super()._choose(at)
        assert kept is not None
        self.chosen.append(kept.index)
        return kept


# -- T: kept patches carry their own positions; class tokens are kept


def test_how_many_are_kept() -> None:
    assert [kept_patches(196, r) for r in (0.0, 0.25, 0.5, 0.75, 0.999)] == [196, 147, 98, 49, 1]
    assert kept_patches(100, 0.29) == 71 and kept_patches(1, 0.9) == 1


@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize("cls", [Net, MeanOfPatches, MeanOfAll, Registers, AttentionPool])
def test_gradients_are_those_of_the_kept_patches_alone(cls: type[Net], per_image: bool) -> None:
    """Against the module's own code on patches that were picked one by one, each with its position."""
    technique = Noting(ratio=0.5, per_image=per_image)
    net = cls()
    got = gradients(net, technique)
    before, after = cls.before, cls.after
    (index,) = technique.chosen
    index = index if per_image else index.expand(B, -1)
    total = PATCHES + before + after
    assert index.shape == (B, 8 + before + after)
    assert all(set(range(before)) | set(range(total - after, total)) <= set(row) for row in index.tolist())
    assert net.lengths[-3:] == [8 + before + after] * 3
    assert bool((index != index[0]).any()) == per_image
    other = cls()
    other.places = index[:, before : before + 8] - before
    expected = gradients(other)
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert not torch.allclose(got["patches.weight"], gradients(cls())["patches.weight"], rtol=1e-2)


@pytest.mark.parametrize(("name", "special"), [("vit", 1), ("deit", 2), ("dinov2", 1), ("dinov2_with_registers", 5)])
def test_hugging_face_models(name: str, special: int) -> None:
    """Against the model on all tokens, where attention is kept from those that were dropped, and the head from them, too."""
    technique = Noting(ratio=0.5)
    net = hugging_face(name)
    lengths: list[int] = []
    blocks = next(list(m) for m in net.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)

    def note(m: Any, args: Any, out: Any) -> None:
        lengths.append((out if isinstance(out, Tensor) else out[0]).shape[1])

    handles = [block.register_forward_hook(note) for block in blocks]
    got = gradients(net, technique)
    assert lengths[-3:] == [8 + special] * 3 and lengths[0] == 16 + special
    (index,) = technique.chosen
    assert all(row[:special] == [*range(special)] for row in index.tolist())
    for handle in handles:
        handle.remove()
    other = hugging_face(name)
    first = next(list(m) for m in other.modules() if isinstance(m, nn.ModuleList) and len(m) == 3)[0]

    def pick(m: Any, args: Any, kwargs: Any) -> Any:
        rows = torch.stack([row[at] for row, at in zip(args[0], index, strict=True)])
        return (rows, *args[1:]), kwargs

    first.register_forward_pre_hook(pick, with_kwargs=True)
    expected = gradients(other)
    for key, grad in expected.items():
        torch.testing.assert_close(got[key], grad, rtol=1e-4, atol=1e-6, msg=key)


def test_ratio_zero_is_the_plain_module_bit_for_bit() -> None:
    whole = final_state(*fit("vit", lambda: [PatchDropout(ratio=0.0)]))
    assert differences(whole, final_state(*fit("vit", list))) == []
    ends = final_state(*fit("vit", lambda: [PatchDropout(ratio=0.5, until=1e-9)], max_steps=1))
    assert differences(ends, final_state(*fit("vit", list, max_steps=1))) != []


def test_evaluation_sees_all_patches_and_so_does_the_end_of_the_run() -> None:
    net = Net()
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
    technique = PatchDropout(ratio=0.5, until=0.5)
    data = DataLoader([make_batch("vit", B)] * 4, batch_size=None)
    t = trainer(technique, max_steps=4, limit_val_batches=1, val_check_interval=4, num_sanity_val_steps=0)
    t.fit(net, data, DataLoader([make_batch("vit", B)], batch_size=None))
    assert net.lengths[-5 * 3 :] == [9] * 6 + [17] * 9
    plain = F.cross_entropy(net(make_batch("vit", B)["pixel_values"]), make_batch("vit", B)["labels"])
    assert t.callback_metrics["val_loss"].item() == plain.item()
    assert technique.report() == {"kept": 16, "share": 1.0}
    assert technique.summary() == (
        "'blocks' (3 x EncoderBlock) computed 75.0% of the patches on average, and 1 other token"
    )


# -- T: FLOPs fall as predicted


def test_flops_fall_by_those_of_the_blocks_on_fewer_tokens() -> None:
    def flops(run: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.counter = FlopCounterMode(display=False)
            self.counter.__enter__()

        def on_train_batch_end(self, *args: Any) -> None:
            self.counter.__exit__(None, None, None)
            self.last = self.counter.get_total_flops()

    def step(*techniques: pl.Callback) -> int:
        count = Counts()
        data = DataLoader([make_batch("vit", B)] * 2, batch_size=None)
        trainer(*techniques, count, max_steps=2).fit(ViT(dropout=0.0), data_of(data))
        return count.last

    def data_of(data: Any) -> Any:
        return DataLoader([(b["pixel_values"], b["labels"]) for b in data], batch_size=None)

    block = EncoderBlock(48, 3, 0.0)
    full, few = (
        flops(lambda n=n: block(torch.randn(B, n, 48, requires_grad=True)).sum().backward()) for n in (17, 1 + 4)
    )
    plain = step()
    assert step(PatchDropout(ratio=0.75)) == plain - 6 * (full - few)
    assert few < 0.3 * full and plain - 6 * (full - few) < 0.35 * plain


# -- beside others


@pytest.mark.parametrize(
    "other",
    [
        lambda: eff.Rematerialization(policy="full"),
        lambda: eff.Rematerialization(policy="sqrt"),
        lambda: eff.Rematerialization(policy="selective"),
    ],
)
def test_blocks_that_run_again_see_the_same_patches(other: Callable[[], pl.Callback]) -> None:
    whole = final_state(*fit("vit", lambda: [PatchDropout()]))
    again = final_state(*fit("vit", lambda: [PatchDropout(), other()]))  # pyright: ignore[reportArgumentType]
    assert differences(whole, again) == []


def test_with_techniques_that_change_which_blocks_run() -> None:
    for other in (
        eff.ProgressiveLayerDropping(theta_min=0.3, gamma=20.0),
        eff.ProgressiveStacking(stages=[(0.0, 2), (0.5, 4)]),
        eff.SharpnessAwareMinimization(rho=0.05),
        eff.SelectiveBackprop(keep=0.5),
    ):
        technique = PatchDropout()
        net, t = fit("vit", lambda technique=technique, other=other: [technique, other])
        assert t.global_step == 12 and all(p.isfinite().all() for p in net.parameters())
        assert technique.report()["kept"] == 8


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_blocks() -> None:
    got = []
    for compiled in (False, True):
        net = Net()
        for block in net.blocks:
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
        got.append(gradients(net, PatchDropout(layers="blocks")))
        torch.compiler.reset()
    for name, grad in got[0].items():
        torch.testing.assert_close(got[1][name], grad)


def test_images_of_another_size_later() -> None:
    """Class tokens and registers are where they were; ``ratio`` is of the patches that there are."""

    class AnySize(Registers):
        def embed(self, images: Tensor) -> Tensor:
            x = self.patches(images).flatten(2).transpose(1, 2)
            x = x + self.position[:, : x.shape[1]]
            special = self.special.expand(len(x), -1, -1)
            return torch.cat([special[:, :4], x, special[:, 4:]], dim=1)

    net, small = AnySize(), make_batch("vit", B)
    small = {**small, "pixel_values": small["pixel_values"][..., :4]}
    data = DataLoader([make_batch("vit", B), small], batch_size=None)
    trainer(PatchDropout(ratio=0.5), max_steps=2).fit(net, data)
    assert net.lengths[-6:] == [14] * 3 + [10] * 3


# -- what is refused


class Dense(Net):
    """A class for each patch, as in segmentation."""

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 1:])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"][:, None].expand(-1, PATCHES)
        return F.cross_entropy(self(batch["pixel_values"]).flatten(0, 1), labels.flatten())


class Flattened(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D * (PATCHES + 1), 5)

    def pool(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Sum(Net):
    def pool(self, x: Tensor) -> Tensor:
        return x.sum(dim=1) / PATCHES


class Grid(Net):
    """Pools the grid to a smaller one, of any number of patches; its head begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4 * D, 5)
        nn.init.zeros_(self.head.weight)

    def pool(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(x[:, 1:].transpose(1, 2), 4).flatten(1)


class FirstPatch(Net):
    """A class token that is made of the image, which the trial takes for a patch."""

    before = 0

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Among(Net):
    """A class token in the middle of the patches."""

    def embed(self, images: Tensor) -> Tensor:
        x = super().embed(images)
        return torch.cat([x[:, 1:9], x[:, :1], x[:, 9:]], dim=1)

    def pool(self, x: Tensor) -> Tensor:
        return x[:, 8]


class Blind(Net):
    def embed(self, images: Tensor) -> Tensor:
        return super().embed(torch.zeros_like(images))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Dense, "depends on the places or the number of the patches .*dense prediction"),
        (Flattened, "depends on the places or the number of the patches .training_step fails"),
        (Sum, "number of the patches .the loss is .* instead of"),
        (Grid, "depends on the places or the number of the patches .the loss is"),
        (FirstPatch, "depends on the places or the number of the patches"),
        (Among, r"the tokens at \[8\] of the 17 .* are between patches"),
        (Blind, r"none of the 17 tokens that 'blocks' \(3 x EncoderBlock\) gets depends on the images"),
    ],
)
def test_heads_and_tokens_that_are_refused(cls: type[Net], message: str) -> None:
    net = cls()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=f"PatchDropout: .*{message}"):
        gradients(net, PatchDropout())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_windows_grids_and_reconstruction_are_refused() -> None:
    """Swin's windows, BEiT's relative biases, DINOv3's tables of patches alone, MAE's decoder, a residual network."""
    from tests.families import batch
    from tests.families import module as family

    swin = hf.SwinForImageClassification(
        hf.SwinConfig(
            image_size=16, patch_size=2, num_channels=1, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
        )
    )
    images = {"pixel_values": torch.randn(4, 1, 16, 16), "labels": torch.tensor([0, 1, 0, 1])}
    with pytest.raises(ValueError, match=r"PatchDropout: block 0 of .* cannot be given fewer of its tokens"):
        gradients(HuggingFace(swin), PatchDropout(layers="model.swin.encoder.layers.0.blocks"), batch=images)
    with pytest.raises(ValueError, match=r"PatchDropout: block 0 of .* cannot be given fewer of its tokens"):
        gradients(family("resnet"), PatchDropout(), batch=batch("resnet", 4))
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    shape = {"image_size": 8, "patch_size": 2, "num_channels": 1}
    beit = hf.BeitConfig(**small, **shape, num_labels=5, use_relative_position_bias=True)
    with pytest.raises(ValueError, match=r"PatchDropout: block 0 of .* cannot be given fewer of its tokens"):
        gradients(HuggingFace(hf.BeitForImageClassification(beit)), PatchDropout(), batch=make_batch("vit"))
    decoder = {f"decoder_{key}": value for key, value in small.items()} | {"decoder_num_hidden_layers": 2}
    torch.manual_seed(0)
    mae = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**small, **decoder, **shape))
    with pytest.raises(ValueError, match=r"PatchDropout: .*depends on the places or the number of the patches"):
        gradients(HuggingFace(mae), PatchDropout(), batch={"pixel_values": torch.randn(4, 1, 8, 8)})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ratio": 1.0}, r"ratio=1.0.*\[0, 1\)"),
        ({"ratio": -0.1}, "ratio=-0.1"),
        ({"until": 2.0}, r"until=2.0.*\[0, 1\]"),
    ],
)
def test_arguments_out_of_their_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"PatchDropout.*{message}"):
        PatchDropout(**kwargs)


def test_nothing_to_drop_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio=0.05.*gets 16 patches per image, too few .*Set ratio=0\.063"):
        gradients(Net(), PatchDropout(ratio=0.05))
