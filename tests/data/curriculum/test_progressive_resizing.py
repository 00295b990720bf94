"""ProgressiveResizing: sizes over the run, the pipeline of the last fifth, and which modules can do with smaller images."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_eff as eff
from examples.vit.module import ViT
from lightning_eff._core._images.images import resize
from lightning_eff.data.curriculum.progressive_resizing import ProgressiveResizing, share_at
from tests.cases import Case, classifier
from tests.models import HuggingFace, trainer

_NO_IMAGES = "found no images in the batch"

CASES = {
    "ProgressiveResizing": Case(
        active=lambda: ProgressiveResizing(scale=0.75, until=0.7, multiple_of=2),  # of 16 patches, 9
        neutral=lambda: ProgressiveResizing(scale=1.0),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt"), _NO_IMAGES),
        lost=(classifier, "classifier", _NO_IMAGES),
    )
}


class Net(pl.LightningModule):
    """A CNN with BatchNorm on (images, labels) that remembers the images it was given."""

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 if pooled else 4 * 16 * 16, 3)
        self.pooled = pooled
        self.given: list[Tensor] = []
        self.evaluated: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images)
        return self.head(x.mean((2, 3)) if self.pooled else x.flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch[0])
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append(batch[0].shape[-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(count: int = 20, side: int = 16, size: int = 3) -> list[Any]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 1, side, side, generator=g), torch.arange(size) % 3) for _ in range(count)]


def train(net: pl.LightningModule, *callbacks: pl.Callback, data: Any = None, **kwargs: Any) -> pl.LightningModule:
    data = batches() if data is None else data
    run = trainer(*callbacks, **{"max_steps": len(data), **kwargs})
    run.fit(net, DataLoader(data, batch_size=None), DataLoader(data[:1], batch_size=None))
    return net


# -- T: monotone sizes, and the plain pipeline in the last fifth


def test_the_share_is_composers() -> None:
    at = [share_at(u, scale=0.5, until=0.8, hold=0.625) for u in (0.0, 0.25, 0.5, 0.65, 0.7999999, 0.8, 1.0)]
    assert at == pytest.approx([0.5, 0.5, 0.5, 0.75, 1.0, 1.0, 1.0], abs=1e-6) and at[-2] == 1.0
    assert [share_at(u, scale=0.5, until=0.4, hold=1.0) for u in (0.0, 0.39, 0.4)] == [0.5, 0.5, 1.0]
    assert [share_at(u, scale=0.5, until=1.0, hold=0.0) for u in (0.0, 0.5)] == [0.5, 0.75]


@pytest.mark.parametrize("settings", [{}, {"scale": 0.3, "until": 0.5, "hold": 0.0}, {"hold": 1.0, "until": 0.6}])
def test_sizes_never_fall_and_the_last_batches_are_the_loaders_own(settings: dict[str, Any]) -> None:
    technique = ProgressiveResizing(**settings)
    data = batches(20)
    net: Any = train(Net(), technique, data=data)
    given = net.given
    sides = [t.shape[-1] for t in given]
    assert len(sides) == 20 and sides == sorted(sides) and sides[0] < 16 and not any(side % 4 for side in sides)
    for i, (images, (own, _)) in enumerate(zip(given, data, strict=True)):
        share = share_at(i / 20, scale=technique.scale, until=technique.until, hold=technique.hold)
        assert images.shape[-1] == min(16, round(16 * share / 4) * 4)
        if i / 20 >= technique.until:
            assert images.data_ptr() == own.data_ptr() and images.shape == own.shape
        else:
            assert torch.equal(images, own if images.shape == own.shape else resize(own, images.shape[-2:]))
    assert settings or sides == [8] * 12 + [12] * 3 + [16] * 5


def test_training_is_that_on_resized_images_and_the_trial_leaves_no_trace() -> None:
    """BatchNorm's statistics, momentum and weights are those of a loop written out."""
    data = batches(8)
    net = train(Net(), ProgressiveResizing(until=0.5), data=data)
    twin = Net()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for i, (images, labels) in enumerate(data):
        side = (8, 8, 8, 12, 16, 16, 16, 16)[i]
        loss = F.cross_entropy(twin(images if side == 16 else resize(images, (side, side))), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for (name, a), b in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_evaluation_sees_full_images() -> None:
    settings: Any = {"limit_val_batches": 1, "val_check_interval": 5}
    net: Any = train(Net(), ProgressiveResizing(until=1.0, hold=1.0), data=batches(10), **settings)
    assert net.evaluated == [16, 16] and [t.shape[-1] for t in net.given] == [8] * 10


def test_sizes_hold_within_an_accumulation_window() -> None:
    technique = ProgressiveResizing(until=1.0, hold=0.0)
    net: Any = train(Net(), technique, data=batches(12), max_steps=4, accumulate_grad_batches=3)
    assert [t.shape[-1] for t in net.given] == [8] * 3 + [8] * 3 + [12] * 3 + [16] * 3
    assert technique.summary() == "8 px for 2 steps, 12 px for 1, 16 px from step 3 on"
    assert technique.report() == {"side": 16, "share": 1.0}


# -- modules


class HandWritten(ViT):
    """The example's ViT, of 16 patches of 4 x 4 pixels, that notes its tokens."""

    def __init__(self, **kwargs: Any) -> None:
        torch.manual_seed(0)
        super().__init__(**{"image_size": 16, "patch_size": 4, "dim": 12, "num_layers": 1, "dropout": 0.0, **kwargs})
        self.tables: list[tuple[int, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tables.append((batch[0].shape[-1], self.position.detach().clone()))
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_table_is_interpolated_and_learns_at_all_sizes() -> None:
    net = HandWritten()
    first = net.position.detach().clone()
    evaluated: Any = {"limit_val_batches": 1, "val_check_interval": 1}  # at full size, between steps at others
    train(net, ProgressiveResizing(until=0.5), data=batches(8), **evaluated)
    assert [(side, table.shape[1]) for side, table in net.tables] == [(8, 5)] * 3 + [(12, 10)] + [(16, 17)] * 4
    assert net.position.shape == (1, 17, 12) and isinstance(net.position, nn.Parameter)
    trained = [table for _, table in net.tables]
    assert not torch.equal(trained[0], trained[1]) and not torch.equal(net.position, first)
    reference = F.interpolate(first[:, 1:].view(1, 4, 4, 12).permute(0, 3, 1, 2), (2, 2), mode="bicubic")
    torch.testing.assert_close(trained[0][:, 1:], reference.permute(0, 2, 3, 1).reshape(1, 4, 12))


def test_the_second_pass_of_sam_has_positions_at_its_own_weights() -> None:
    tables: list[tuple[int, Tensor]] = []  # of all passes: those that leave no trace take back what a module notes

    class Noting(HandWritten):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            tables.append((len(batch[0]), self.position.detach().clone()))
            return super().training_step(batch, batch_idx)

    train(Noting(), eff.SharpnessAwareMinimization(rho=0.5), ProgressiveResizing(until=0.5), data=batches(4))
    of_steps = [table for size, table in tables if size == 3]
    assert [table.shape[1] for table in of_steps] == [5] * 4 + [17] * 4
    assert not torch.equal(of_steps[0], of_steps[1]), "the pass at the worst nearby weights had the table of the first"


class Hf(HuggingFace):
    """Takes (images, labels), and notes the tokens of the encoder."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.lengths: list[int] = []
        model.get_submodule("vit.embeddings").register_forward_hook(
            lambda module, args, output: self.lengths.append(output.shape[1])
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(pixel_values=batch[0], labels=batch[1]).loss


def test_transformers_models_are_asked_to_interpolate() -> None:
    config = hf.ViTConfig(hidden_size=12, num_attention_heads=2, image_size=16, patch_size=4, num_hidden_layers=1)
    config.num_channels, config.num_labels, config.intermediate_size = 1, 3, 12
    model = hf.ViTForImageClassification(config)
    net, technique = Hf(model), ProgressiveResizing(until=0.5)
    forward = model.forward
    train(net, technique, data=batches(8))
    assert net.lengths[-8:] == [5, 5, 5, 10, 17, 17, 17, 17]
    assert "forward" not in vars(model) and model.forward == forward
    assert technique.summary().endswith("(positions interpolated by ViTForImageClassification)")


class Rows(HandWritten):
    """Positions from an ``nn.Embedding``, of as many patches as there are, or of all."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.places = nn.Embedding(16, 12)
        self.fixed = fixed
        del self.position
        self.position = torch.zeros(1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        places = self.places(torch.arange(16 if self.fixed else x.shape[1]))[: x.shape[1]]
        return self.head(self.norm(self.blocks(x + places)).mean(1))


def test_an_embedding_of_places_is_interpolated_where_ids_follow_the_patches() -> None:
    net = Rows(fixed=False)
    technique = ProgressiveResizing(until=0.5)
    train(net, technique, data=batches(6))
    assert technique.summary().endswith("(positions interpolated in places.weight)")
    with pytest.raises(
        ValueError, match=r"8 x 8 pixels instead of 16 x 16.*places\.weight was indexed at position 15 of 4"
    ):
        train(Rows(fixed=True), ProgressiveResizing(), data=batches(4))


class Cut(HandWritten):
    """Takes the first rows of a table that is longer than the patches are many."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 64, 12))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x + self.position[:, : x.shape[1]])).mean(1))


class Windowed(Net):
    """Fails at one size in the middle of the run's."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-1] == 12:
            raise RuntimeError("windows of 8 pixels do not fit")
        return super().forward(images)


@pytest.mark.parametrize(
    ("build", "data", "message"),
    [
        (
            lambda: Net(pooled=False),
            batches(4),
            r"fails with images of 8 x 8 pixels instead of 16 x 16.*global pooling",
        ),
        (Windowed, batches(4), r"12 x 12 pixels.*windows of 8 pixels do not fit.*Increase multiple_of"),
        (Cut, batches(4), r"position \(1, 64, 12\) may hold the positions of patches"),
        (Net, batches(4, side=4), r"images of 4 x 4 pixels would never be smaller, in multiples of 4 x 4"),
        (Net, [(torch.zeros(3, 16, 16, 1), torch.arange(3))], "has its channels last"),
        (Net, [{"image": torch.zeros(3, 1, 16, 16), "boxes": torch.full((3, 4), 9.0)}], "holds coordinates in pixels"),
    ],
    ids=["flattened", "in the middle", "cut", "too small", "channels last", "boxes"],
)
def test_what_cannot_be_smaller_is_refused_before_any_weight_changes(build: Any, data: Any, message: str) -> None:
    net = build()
    if isinstance(data[0], dict):
        net.training_step = lambda batch, batch_idx: net(batch["image"]).mean()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=message):
        train(net, ProgressiveResizing(), data=data, max_steps=4)
    after = net.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


class Dense(Net):
    """Labels each pixel."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["mask"].dtype == torch.long
        self.given.append(batch["mask"])
        return F.cross_entropy(self.body(batch["image"]), batch["mask"])


def test_dense_targets_go_along() -> None:
    data = [{"image": x, "mask": (x[:, 0] > 0).long()} for x, _ in batches(4)]
    net: Any = Dense()
    trainer(ProgressiveResizing(until=1.0, hold=1.0), max_steps=4).fit(net, DataLoader(data, batch_size=None))
    assert [tuple(t.shape) for t in net.given] == [(3, 8, 8)] * 4


# -- arguments, and what it tells


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0}, r"scale=0\): expected a number in \(0, 1\]: the fraction of the full height"),
        ({"scale": 1.5}, r"scale=1.5\): expected a number in \(0, 1\]"),
        ({"until": -0.1}, r"until=-0.1\): expected a number in \[0, 1\]"),
        ({"hold": 2}, r"hold=2\): expected a number in \[0, 1\]"),
        ({"multiple_of": 0}, r"multiple_of=0\): expected an integer >= 1"),
        ({"keys": "image"}, r"keys='image'\): expected a list"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^ProgressiveResizing\({message}"):
        ProgressiveResizing(**arguments)


def test_arms_are_small_images_throughout() -> None:
    technique = ProgressiveResizing(scale=0.75, multiple_of=8, keys=["x"])
    ((name, arm),) = technique.control.arms(technique).items()
    assert name == "0.75 of the side throughout" and isinstance(arm, ProgressiveResizing)
    assert [arm.share_of(u) for u in (0.0, 0.5, 0.999)] == [0.75] * 3 and not arm.changes_shapes
    assert (arm.multiple_of, arm.keys) == (8, ["x"]) and arm.control.arms(arm) == {}
    for neutral in (ProgressiveResizing(until=0.0), ProgressiveResizing(scale=1.0)):
        assert neutral.neutral and neutral.control.arms(neutral) == {}


def test_counters_go_on_after_a_resume(tmp_path: Path) -> None:
    def run(resume: Path | None = None) -> dict[str, Any]:
        technique = ProgressiveResizing(until=0.8)
        save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [technique] if resume else [technique, save]
        t = trainer(*callbacks, max_steps=10, enable_checkpointing=resume is None)
        t.fit(HandWritten(), DataLoader(batches(10), batch_size=None), ckpt_path=resume)
        return technique.state_dict()

    whole = run()
    assert whole["used"] == {"8 px": [0, 6], "12 px": [6, 2], "16 px": [8, 2]}
    for step in (4, 9):
        assert run(tmp_path / f"step={step}.ckpt") == whole


def test_the_names_of_composer_are_accepted() -> None:
    technique = ProgressiveResizing(initial_scale=0.75, size_increment=8)  # pyright: ignore[reportCallIssue]
    assert repr(technique) == "ProgressiveResizing(scale=0.75, multiple_of=8)"
