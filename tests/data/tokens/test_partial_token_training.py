"""PartialTokenTraining: loss and gradients of the kept tubes and of what a decoder paints; evaluation sees all; FLOPs fall."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import lightning_eff as eff
from examples.vit.module import EncoderBlock
from lightning_eff.data.tokens._decoder import Decoder, Painter, make_painter, reconstruction_loss
from lightning_eff.data.tokens._tubes import embeddings_of, tubes
from lightning_eff.data.tokens.partial_token_training import PartialTokenTraining, Pass, kept_tubes
from tests.cases import Case, classifier
from tests.data.tokens.images import gradients
from tests.ddp import launch
from tests.models import make_batch, module, trainer
from tests.runs import differences, final_state, fit, fit_yaml, resume_from_batches

_NO_TUBES = r"holds no nn\.Conv3d or nn\.Conv2d whose stride is its kernel"

CASES = {
    "PartialTokenTraining": Case(
        active=lambda: PartialTokenTraining(ratio=0.5),
        neutral=lambda: PartialTokenTraining(ratio=1.0),
        model="vit",
        refuses=dict.fromkeys(("gpt2", "llama", "bert", "tiny_gpt"), _NO_TUBES),
        lost=(classifier, "classifier", _NO_TUBES),
    )
}
B, D = 4, 24
FRAMES, SIDE = 4, 8  # tubes of (2, 2, 2): a grid of (2, 4, 4)


class Noting(PartialTokenTraining):
    """Remembers each pass."""

    def attach(self, session: Any) -> None:
        super().attach(session)
        self.passes: list[Pass] = []

    def _painting(self, made: Pass) -> Tensor:
        self.passes.append(made)
        return super()._painting(made)


class Videos(pl.LightningModule):
    """Videos (B, 1, 4, 8, 8) in 32 tubes, a class token before them; their order is for subclasses to say."""

    order = "t h w"

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv3d(1, D, (1, 1, 1))
        self.tubes = nn.Conv3d(D, D, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.position = nn.Parameter(torch.randn(D, 2, 4, 4))
        self.blocks = nn.ModuleList(EncoderBlock(D, 3, 0.0) for _ in range(num_layers))
        self.head = nn.Linear(D, 5)
        self.lengths: list[int] = []

    def arrange(self, x: Tensor) -> Tensor:
        axes = ["thw".index(axis) + 2 for axis in self.order.split()]
        return x.permute(0, *axes, 1).flatten(1, 3)

    def forward(self, videos: Tensor) -> Tensor:
        x = self.arrange(self.tubes(self.stem(videos)) + self.position)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
            self.lengths.append(x.shape[1])
        return self.head(x[:, 0] + x[:, 1:].mean(dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self(batch["video"]), batch["labels"])}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx)["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def videos() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {"video": torch.randn(B, 1, FRAMES, SIDE, SIDE, generator=g), "labels": torch.tensor([0, 1, 2, 3])}


def step(net: pl.LightningModule, *callbacks: pl.Callback, batch: Any = None) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    return gradients(net, *callbacks, batch=videos() if batch is None else batch)


# -- T: the loss and its gradients; ratio 1; evaluation


def test_how_many_are_kept() -> None:
    assert [kept_tubes(1568, r) for r in (1.0, 0.5, 0.25, 0.1, 1e-9)] == [1568, 784, 392, 157, 1]


def test_a_video_transformer_of_transformers_against_its_own_masks() -> None:
    """The encoder's ``bool_masked_pos``, its pre-training model's way to cut videos, and MAE's loss, by hand."""
    technique, batch, weight = (
        Noting(ratio=0.25, reconstruction_weight=0.7, decoder_lr=0.01),
        make_batch("videomae"),
        0.7,
    )
    net = module("videomae")
    plain: Any = copy.deepcopy(net)
    got = step(net, technique, batch=batch)
    (made,) = technique.passes
    ((places, count),) = made.kept
    assert (places.shape, count) == ((B, 8), 32) and bool((places != places[0]).any())
    dropped = torch.ones(B, 32, dtype=torch.bool).scatter(1, places, False)

    hidden = plain.model.videomae(batch["pixel_values"], bool_masked_pos=dropped)[0]
    logits = plain.model.classifier(plain.model.fc_norm(hidden.mean(1)))
    # as VideoMAEForPreTraining cuts: (B, t, 2, C, h, 2, w, 2)
    cut = batch["pixel_values"].view(B, 2, 2, 1, 4, 2, 4, 2).permute(0, 1, 4, 6, 3, 2, 5, 7).reshape(B, 32, 8)
    targets = (cut - cut.mean(-1, keepdim=True)) / (cut.var(-1, keepdim=True) + 1e-6) ** 0.5
    painter = make_painter(32, 8, width=None, depth=1, lr=0.01, seed=3, device=torch.device("cpu"))
    missing = dropped.nonzero()[:, 1].view(B, -1)
    painted = painter.decoder(hidden, places, missing)
    error = (painted - targets[dropped].view(B, -1, 8)).square().mean()
    (F.cross_entropy(logits, batch["labels"]) + weight * error).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert technique.report() == {"kept": 8, "share": 0.25, "reconstruction": pytest.approx(error.item(), rel=1e-5)}
    painter.optimizer.step()
    assert technique._painter is not None
    for name, value in technique._painter.decoder.state_dict().items():
        if "qkv.bias" in name:  # the gradient of a key's bias is rounding alone, of which Adam makes whole steps
            continue
        torch.testing.assert_close(value, painter.decoder.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_loss_is_on_what_was_dropped_alone() -> None:
    """Painted pixels of kept tubes do not exist, and what the decoder gets of the dropped is their place alone."""
    torch.manual_seed(0)
    decoder = Decoder(D, 8, 32, 1)
    hidden = torch.randn(2, 3, D, requires_grad=True)
    kept, missing = torch.tensor([[0, 2, 5]] * 2), torch.tensor([[1, 3, 4]] * 2)
    painted = decoder(hidden, kept, missing)
    assert painted.shape == (2, 3, 8)
    turned = decoder(hidden[:, [2, 0, 1]], kept[:, [2, 0, 1]], missing[:, [1, 2, 0]])
    torch.testing.assert_close(turned, painted[:, [1, 2, 0]])
    pixels = torch.randn(2, 3, 8)
    torch.testing.assert_close(reconstruction_loss(painted, pixels), reconstruction_loss(painted, 3 * pixels + 2))


def test_ratio_one_is_the_plain_module_bit_for_bit() -> None:
    whole = final_state(*fit("vit", lambda: [PartialTokenTraining(ratio=1.0)], max_steps=3))
    assert differences(whole, final_state(*fit("vit", list, max_steps=3))) == []


def test_weight_zero_makes_no_decoder_and_is_training_on_the_kept_alone() -> None:
    technique = PartialTokenTraining(ratio=0.5, reconstruction_weight=0.0)
    got = step(Videos(), technique)
    assert technique._painter is None and technique.state_dict()["decoder"] == {}
    assert technique.report().keys() == {"kept", "share"}
    for name, grad in step(Videos(), PartialTokenTraining(ratio=0.5, reconstruction_weight=1e-12)).items():
        torch.testing.assert_close(got[name], grad, msg=name)
    net = Videos()
    net.tubes = nn.Conv3d(D, D, 2, 2, padding=1)  # its tubes lie over the edge, and nothing needs them
    net.position = nn.Parameter(torch.randn(D, 3, 5, 5))
    assert embeddings_of(net) == {}
    step(net, PartialTokenTraining(ratio=0.5, reconstruction_weight=0.0))
    assert net.lengths[-1] == 1 + 38


def test_evaluation_sees_every_token_and_no_decoder() -> None:
    net, data = Videos(), DataLoader([videos()] * 2, batch_size=None)  # pyright: ignore[reportArgumentType]
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.0)  # type: ignore[method-assign]
    t = trainer(PartialTokenTraining(ratio=0.25), max_steps=2, limit_val_batches=1, val_check_interval=2)
    t.fit(net, data, data)
    assert net.lengths[-9:] == [9] * 6 + [33] * 3
    assert t.callback_metrics["val_loss"].item() == F.cross_entropy(net(videos()["video"]), videos()["labels"]).item()
    assert net.state_dict().keys() == Videos().state_dict().keys()


def test_resumes_within_a_window_and_a_checkpoint_is_the_plain_modules(tmp_path: Path) -> None:
    """The decoder's weights, AdamW's state and the gradients summed so far are in it."""
    build = lambda: [PartialTokenTraining(ratio=0.5)]  # noqa: E731
    assert resume_from_batches("videomae", build, tmp_path, (4, 6)) == {}
    saved = torch.load(tmp_path / "batch=4.ckpt", weights_only=True)
    module("videomae").load_state_dict(saved["state_dict"])
    decoder = next(v for k, v in saved["callbacks"].items() if "PartialToken" in k)["decoder"]
    assert decoder["gradients"][0] and len(decoder["optimizer"]["state"]) == len(decoder["weights"])
    with pytest.raises(
        ValueError,
        match=r"decoder_layers=2, .*other settings\. Resume with decoder_layers=1, decoder_width=None",
    ):
        fit("videomae", lambda: [PartialTokenTraining(decoder_layers=2)], resume=tmp_path / "batch=4.ckpt")


def test_it_learns_to_paint() -> None:
    errors: list[float] = []

    class Errors(PartialTokenTraining):
        def on_batch_end(self, session: Any, batch_idx: int) -> None:
            super().on_batch_end(session, batch_idx)
            errors.append(float(self.report()["reconstruction"]))

    technique = Errors(ratio=0.5, decoder_lr=0.01)
    trainer(technique, max_steps=15).fit(
        module("videomae", num_layers=2), DataLoader([make_batch("videomae")] * 15, batch_size=None)
    )
    assert errors[0] > 0.9 and errors[-1] < 0.8 * errors[0]
    assert f"the last reconstruction error was {errors[-1]:.3g}" in technique.summary()


# -- T: FLOPs fall by the share


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


def test_flops_fall_by_those_of_the_blocks_on_fewer_tokens_less_the_decoders() -> None:
    def of_step(*techniques: pl.Callback) -> int:
        count, data = Counts(), DataLoader([videos()] * 2, batch_size=None)  # pyright: ignore[reportArgumentType]
        trainer(*techniques, count, max_steps=2).fit(Videos(num_layers=6), data)
        return count.last

    block, decoder = EncoderBlock(D, 3, 0.0), Decoder(D, D * 8, 32, 1)
    full, few = (
        flops(lambda n=n: block(torch.randn(B, n, D, requires_grad=True)).sum().backward()) for n in (1 + 32, 1 + 8)
    )
    hidden, kept = torch.randn(B, 8, D, requires_grad=True), torch.arange(8).expand(B, -1)
    painting = flops(lambda: decoder(hidden, kept, torch.arange(8, 32).expand(B, -1)).sum().backward())
    plain, saved = of_step(), 6 * (full - few)
    assert of_step(PartialTokenTraining(ratio=0.25, reconstruction_weight=0.0)) == plain - saved
    assert of_step(PartialTokenTraining(ratio=0.25)) == plain - saved + painting
    assert few < 0.3 * full and painting < saved


# -- which token is which tube


@pytest.mark.parametrize(("kernel", "shape"), [((2, 4, 3), (2, 3, 5, 8, 7)), ((2, 3), (2, 3, 4, 7))])
def test_tubes_are_what_the_convolution_sees(kernel: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(6, 3, *kernel, dtype=torch.float64)
    conv: Any = F.conv3d if len(kernel) == 3 else F.conv2d
    expected = conv(x, weight, stride=kernel).flatten(2).transpose(1, 2)
    torch.testing.assert_close(tubes(x, kernel) @ weight.flatten(1).T, expected)


class Turned(Videos):
    order = "h w t"


class Mixed(Videos):
    """In an order of its own."""

    def arrange(self, x: Tensor) -> Tensor:
        x = super().arrange(x)
        return x[:, torch.randperm(32, generator=torch.Generator().manual_seed(5))]


class Averaged(Videos):
    """Tokens are each the mean of two tubes beside each other."""

    def arrange(self, x: Tensor) -> Tensor:
        x = super().arrange(x)
        return (x + x.roll(1, 1)) / 2


class TwoHalves(Videos):
    """Embeds each video by halves, and runs its blocks once."""

    def forward(self, videos: Tensor) -> Tensor:
        halves = [self.tubes(self.stem(half)) for half in videos.split(2, dim=2)]
        x = self.arrange(torch.cat(halves, dim=2) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


@pytest.mark.parametrize("cls", [Videos, Turned])
def test_what_is_painted_goes_by_tubes_in_whatever_order_tokens_are(cls: type[Videos]) -> None:
    """Against the module's own code on tokens that were picked one by one, and pixels cut out by their places."""
    technique = Noting(ratio=0.5)
    net = cls()
    plain = copy.deepcopy(net)
    got = step(net, technique)
    (made,) = technique.passes
    ((places, _),) = made.kept
    sizes = [(2, 4, 4)["thw".index(axis)] for axis in cls.order.split()]
    tokens = [
        dict(zip(cls.order.split(), at, strict=True)) for at in torch.cartesian_prod(*map(torch.arange, sizes)).tolist()
    ]
    number = torch.tensor([16 * at["t"] + 4 * at["h"] + at["w"] for at in tokens])
    video = plain.stem(videos()["video"])
    x = plain.arrange(plain.tubes(video) + plain.position)
    x = torch.cat(
        [plain.token.expand(B, 1, -1), torch.stack([row[at] for row, at in zip(x, places, strict=True)])], dim=1
    )
    for block in plain.blocks:
        x = block(x)
    missing = torch.tensor([[j for j in range(32) if j not in row] for row in places.tolist()])
    cut = [
        [
            video[i, :, 2 * at["t"] :][:, :2, 2 * at["h"] :][:, :, :2, 2 * at["w"] :][..., :2].flatten()
            for at in map(tokens.__getitem__, row)
        ]
        for i, row in enumerate(missing.tolist())
    ]
    pixels = torch.stack([torch.stack(row) for row in cut]).detach()
    painter = make_painter(D, 8 * D, width=None, depth=1, lr=1e-3, seed=3, device=torch.device("cpu"))
    painted = painter.decoder(x[:, 1:], number[places], number[missing])
    loss = F.cross_entropy(plain.head(x[:, 0] + x[:, 1:].mean(dim=1)), videos()["labels"])
    (loss + reconstruction_loss(painted, pixels)).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Mixed, "do not match the tubes of a convolution .'tubes': the order of tokens does not follow"),
        (Averaged, "'tubes': a token comes from several of its tubes, or from none"),
        (TwoHalves, r"'tubes': it was called with \(4, 24, 2, 8, 8\), \(4, 24, 2, 8, 8\) for 4 samples"),
    ],
)
def test_tokens_that_are_no_tubes_are_refused(cls: type[Videos], message: str) -> None:
    with pytest.raises(ValueError, match=f"PartialTokenTraining: .*{message}"):
        step(cls(), PartialTokenTraining())
    step(cls(), PartialTokenTraining(reconstruction_weight=0.0))


# -- the decoder's steps


def _painter() -> Painter:
    painter = make_painter(8, 4, width=32, depth=1, lr=0.1, seed=0, device=torch.device("cpu"))
    painter.optimizer = torch.optim.SGD(painter.decoder.parameters(), lr=0.1)  # pyright: ignore[reportAttributeAccessIssue]
    for i, p in enumerate(
        painter.decoder.parameters()
    ):  # Adam's first step is the same for every multiple of a gradient
        p.grad = torch.full_like(p, float(i + 1))
    return painter


def test_first_weights_follow_from_the_seed_alone_and_leave_the_global_one() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = _painter().decoder.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(torch.equal(value, a[name]) for name, value in _painter().decoder.state_dict().items())


def test_steps_are_along_the_mean_over_ranks_without_a_scalers_factor() -> None:
    """As with the mean in one process; where the other rank dropped nothing too; and no step where a scaler skips its own."""

    def trainer_of(other: float, scale: float | None = None) -> Any:
        plugin = SimpleNamespace(scaler=None if scale is None else SimpleNamespace(get_scale=lambda: scale))
        reduce = SimpleNamespace(reduce=lambda x, reduce_op: (x + other * x) / 2)
        return SimpleNamespace(world_size=2, strategy=reduce, precision_plugin=plugin)

    alone, expected = SimpleNamespace(world_size=1, precision_plugin=SimpleNamespace()), _painter()
    for p in expected.decoder.parameters():
        assert p.grad is not None
        p.grad *= 2.0
    expected.optimizer.step()
    for other, scale in ((3.0, None), (15.0, 4.0)):
        painter = _painter()
        painter.step(trainer_of(other, scale))
        for name, value in painter.decoder.state_dict().items():
            torch.testing.assert_close(value, expected.decoder.state_dict()[name])
        assert painter.gradients() == []
    first, skipped = _painter(), _painter()
    skipped.step(trainer_of(math.inf, 4.0))
    skipped.step(alone)  # nothing has been summed since
    for name, value in skipped.decoder.state_dict().items():
        assert torch.equal(value, first.decoder.state_dict()[name])


@pytest.mark.slow
def test_under_ddp_all_ranks_have_one_decoder() -> None:
    found = launch("painter", "PartialTokenTraining")["PartialTokenTraining"]
    assert found == {"alike": True, "moved": True, "own": True}


# -- beside others


@pytest.mark.parametrize(
    "other",
    [lambda: eff.Rematerialization(policy="full"), lambda: eff.Rematerialization(policy="sqrt")],
)
def test_blocks_that_run_again_see_the_same_tubes_and_are_painted_once(other: Callable[[], pl.Callback]) -> None:
    whole = final_state(*fit("videomae", lambda: [PartialTokenTraining()], max_steps=3))
    again = final_state(*fit("videomae", lambda: [PartialTokenTraining(), other()], max_steps=3))  # pyright: ignore[reportArgumentType]
    assert differences(whole, again) == []


def test_each_pass_of_sharpness_aware_minimization_is_painted() -> None:
    technique = Noting(ratio=0.5)
    step(Videos(), technique, eff.SharpnessAwareMinimization(rho=0.5))
    first, second = technique.passes
    assert torch.equal(first.kept[0][0], second.kept[0][0]) and not torch.equal(first.left[0], second.left[0])


def test_beside_a_teacher_only_the_pass_that_trains_is_painted() -> None:
    technique = Noting(ratio=0.5)
    fit("vit", lambda: [technique, eff.MESA(start=0.0)], max_steps=2)
    assert [len(made.left) for made in technique.passes] == [1, 1]
    assert all(made.left[0].requires_grad for made in technique.passes)


# -- what is refused


class Lbfgs(Videos):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class Twice(Videos):
    """Calls its blocks twice on what was embedded once."""

    def forward(self, videos: Tensor) -> Tensor:
        x = self.arrange(self.tubes(self.stem(videos)) + self.position)
        for block in (*self.blocks, *(self.blocks if self.training else ())):
            x = block(x)
        return self.head(x.mean(dim=1))


class Checkpointed(Videos):
    gradient_checkpointing = True
    _gradient_checkpointing_func = SimpleNamespace(keywords={"use_reentrant": True})


@pytest.mark.parametrize(
    ("cls", "kwargs", "message"),
    [
        (Lbfgs, {}, "the module's LBFGS evaluates the loss again"),
        (Checkpointed, {}, "blocks of Checkpointed are checkpointed reentrantly"),
        (Videos, {"ratio": 0.99}, "'blocks' .3 x EncoderBlock. gets 32 tubes per sample and would keep all"),
        (Twice, {}, "called the embedding 1 times, but the blocks 2 times on fewer tokens, with 2 outputs"),
        (
            Videos,
            {"embedding": "stem"},
            r"embedding='stem'\): this is not a convolution that embeds tubes. Use one of 'tubes'",
        ),
    ],
)
def test_what_cannot_train_is_refused(cls: type[Videos], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"PartialTokenTraining.*{message}"):
        step(cls(), PartialTokenTraining(**kwargs))


def test_blocks_of_space_and_time_apart_are_refused() -> None:
    """TimeSformer's take all tokens; VideoMAE's head without pooling is on its first tube."""
    import transformers as hf

    from tests.models import HuggingFace

    small: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_frames": 4, "hidden_size": 32}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 5}
    batch = make_batch("videomae")
    for build, message in (
        (
            lambda: hf.TimesformerForVideoClassification(hf.TimesformerConfig(**small)),
            "cannot be given fewer of its tokens",
        ),
        (
            lambda: hf.VideoMAEForVideoClassification(hf.VideoMAEConfig(**small, use_mean_pooling=False)),
            "depends on the places or the number of the patches",
        ),
    ):
        with pytest.raises(ValueError, match=f"PartialTokenTraining: .*{message}"):
            step(HuggingFace(build()), PartialTokenTraining(), batch=batch)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"ratio": 0.0}, "ratio=0.0"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"reconstruction_weight": -1.0}, "reconstruction_weight=-1.0"),
        ({"decoder_layers": 0}, "decoder_layers=0"),
        ({"decoder_width": 33}, "decoder_width=33"),
        ({"decoder_lr": 0.0}, "decoder_lr=0.0"),
    ],
)
def test_arguments_out_of_range(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"PartialTokenTraining\({message}\): (expected|the width must be even)"):
        PartialTokenTraining(**kwargs)


def test_the_command_line_runs_it(tmp_path: Path) -> None:
    fit_yaml(tmp_path, "PartialTokenTraining", {"ratio": 0.25}, model="VideoMAE", data="Videos", max_steps=2)
