"""Channels last: plain training's numbers and draws, no conversion between convolutions, and nothing of it in checkpoints."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import ConvNextConfig, ConvNextForImageClassification

from lightning_eff import SOAP, ChannelsLast, ExactResume, Rematerialization
from lightning_eff.model.execution._plain_order import PlainOrder, lies_last
from lightning_eff.model.execution.channels_last import channels_last, in_plain_order, laid, strides_last
from tests.cases import Case, classifier
from tests.models import flat, hugging_face, loader, trainer
from tests.runs import NUM_STEPS, SaveBatches, checkpoints, differences, final_state, fit_yaml

CASES = {
    "ChannelsLast": Case(
        active=lambda: ChannelsLast(),
        neutral=lambda: ChannelsLast(dims=[]),
        model="vit",
        exact=True,
        rounds=True,
        figure="images",
        refuses=dict.fromkeys(("tiny_gpt", "gpt2", "llama", "bert", "classifier"), "has no nn.Conv2d or nn.Conv3d"),
        lost=(
            classifier,
            "classifier",
            r"TinyClassifier has no nn.Conv2d or nn.Conv3d, .* parameters are in 4 Linear, 1 BatchNorm1d",
        ),
    )
}


class Residual(nn.Module):
    """Two convolutions with BatchNorm, with a dropout of single elements between."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, conv: Any = nn.Conv2d) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if conv is nn.Conv2d else nn.BatchNorm3d
        self.conv1 = conv(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = conv(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)
        self.drop = nn.Dropout(0.2)
        self.short = nn.Identity() if (inputs, stride) == (outputs, 1) else conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(F.relu(self.norm1(self.conv1(x))))
        return F.relu(self.norm2(self.conv2(hidden)) + self.short(x))


class ResNet(pl.LightningModule):
    """Images (N, 3, 8, 8), or volumes (N, 3, 2, 8, 8); it flattens them by ``view``, as tutorials do."""

    def __init__(self, *, channels: int = 3, conv: Any = nn.Conv2d) -> None:
        super().__init__()
        self.stem: nn.Module = conv(channels, 8, 3, 1, 1)
        blocks = (Residual(8, 8, conv=conv), Residual(8, 16, 2, conv=conv), Residual(16, 16, conv=conv))
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.stem(x))
        return self.head(x.view(x.size(0), -1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def images(*shape: int, samples: int = 20) -> DataLoader[Any]:
    x = torch.randn(samples, *(shape or (3, 8, 8)), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x.flatten(1).mean(1) * 60).long().clamp(0, 4)), 4, shuffle=True)


def run(
    *techniques: pl.Callback,
    build: Callable[[], pl.LightningModule] = ResNet,
    shape: tuple[int, ...] = (),
    **settings: Any,
) -> tuple[pl.LightningModule, pl.Trainer]:
    pl.seed_everything(1, verbose=False)
    net, path = build(), settings.pop("resume", None)
    if path is not None:
        pl.seed_everything(99, verbose=False)
    t = trainer(*techniques, **{"max_steps": NUM_STEPS, **settings})
    validate = images(*shape) if settings.get("limit_val_batches") else None
    t.fit(net, images(*shape), validate, ckpt_path=path)
    return net, t


@contextmanager
def conv_inputs(net: nn.Module) -> Iterator[list[Tensor]]:
    """The tensors that convolutions read and give, in their order."""
    seen: list[Tensor] = []
    kinds = (nn.Conv2d, nn.Conv3d)
    hooks = [
        m.register_forward_hook(lambda m, args, out: seen.extend((args[0].detach(), out.detach())))
        for m in net.modules()
        if isinstance(m, kinds)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


# -- the rule


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (6, 8, 1, 1), (1, 1, 3, 3), (2, 1, 4, 5), (2, 3, 4, 5, 6), (4, 1, 2, 3, 3)]
)
def test_it_is_pytorchs_layout_also_where_one_channel_leaves_it_open(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    got = channels_last(x)
    assert torch.equal(got, x) and got.stride() == strides_last(shape)
    if 1 not in shape:  # where torch itself tells the two apart
        last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        assert got.stride() == x.to(memory_format=last).stride()
        assert lies_last(got) and not lies_last(x)
    assert laid(got, x.stride()).stride() == x.stride() and torch.equal(laid(got, x.stride()), x)
    assert channels_last(got) is not x and channels_last(torch.ones(3, 4)).stride() == (4, 1)


# -- T: plain training's numbers, and every convolution reads and writes channels last


BUILDS: dict[str, tuple[Callable[[], pl.LightningModule], tuple[int, ...]]] = {
    "images": (ResNet, (3, 8, 8)),
    "gray images": (lambda: ResNet(channels=1), (1, 8, 8)),
    "volumes": (lambda: ResNet(conv=nn.Conv3d), (3, 2, 8, 8)),
}


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_numbers_are_those_of_plain_training_and_nothing_is_converted_between_convolutions(name: str) -> None:
    build, shape = BUILDS[name]
    plain, _ = run(build=build, shape=shape, max_steps=4)
    technique, strides = ChannelsLast(), []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            self.scope = conv_inputs(pl_module)
            self.seen = self.scope.__enter__()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.scope.__exit__(None, None, None)
            kernels = [m.weight for m in pl_module.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
            assert len(self.seen) == 2 * len(kernels) == 16
            strides.extend((t.shape, t.stride()) for w in kernels for t in (w, w.grad))
            strides.extend((t.shape, t.stride()) for t in self.seen if t.numel() > t.shape[0])

    net, _ = run(technique, Watch(), build=build, shape=shape, max_steps=4)
    assert strides and all(stride == strides_last(size) for size, stride in strides)
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-5)  # with the same elements dropped
    told = technique.report()
    assert told == {"convolutions": 8, "images": 1, "copies": 4}, "three dropouts and one view"


def test_transformers_models_train_as_plainly() -> None:
    """ConvNeXt, whose norms permute, and a ViT of coloured images, whose only convolution is that of its patches."""

    class Classes(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"num_stages": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_size": 2, "num_labels": 5}
            self.model = ConvNextForImageClassification(ConvNextConfig(**sizes, drop_path_rate=0.1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(pixel_values=batch[0], labels=batch[1]).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.05)

    ends, seen = [], []
    for techniques in ([], [ChannelsLast()]):
        net, _ = run(*techniques, build=Classes, max_steps=3)
        ends.append(flat(net))
        assert {p.stride() for p in net.parameters() if p.ndim == 4} == {
            torch.empty(p.shape).stride() for p in net.parameters() if p.ndim == 4
        }
        seen += [technique.report()["convolutions"] for technique in techniques]
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)
    assert seen == [4], "of two stages, a patch and a depthwise one each"


# -- what sees the order of memory


def test_views_and_draws_are_those_of_the_plain_order() -> None:
    x = torch.randn(2, 3, 4, 5)
    last = channels_last(x)
    draws: list[Callable[[Tensor], Tensor]] = [
        lambda t: F.dropout(t, 0.4),
        lambda t: F.dropout(t.clone(), 0.4, inplace=True),
        nn.AlphaDropout(0.4),
        torch.rand_like,
        lambda t: torch.bernoulli(t.sigmoid()),
        lambda t: torch.empty_like(t).uniform_(),
        lambda t: torch.empty_like(t).normal_(2.0, 0.5),
        lambda t: torch.randn_like(t, dtype=torch.float64),
    ]
    others = 0
    for draw in draws:
        torch.manual_seed(1)
        plain = draw(x)
        torch.manual_seed(1)
        others += not torch.equal(draw(last), plain)
        torch.manual_seed(1)
        with PlainOrder("Me") as order:
            assert torch.equal(drawn := draw(last), plain)
        assert lies_last(drawn) and order.copies == 1
    assert others >= len(draws) - 1, "there was something to be mended"
    with pytest.raises(RuntimeError, match="view size"):
        last.view(2, -1)
    with PlainOrder("Me") as order:
        assert torch.equal(last.view(2, -1), x.view(2, -1)) and torch.equal(last.view_as(x[:, 0:]), x)
        assert torch.equal(last.flatten(1), x.flatten(1)) and order.copies == 2
        assert last.view(2, 3, 20).data_ptr() == last.data_ptr(), "no copy where a view is one"
        assert last.view(torch.int32).dtype == torch.int32
        assert F.dropout(last, 0.4, training=False) is last
    assert order.copies == 2


def test_what_is_written_into_a_flattened_image_and_read_from_the_image_is_refused() -> None:
    class Writes(ResNet):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(self.stem(x)) * 1.0
            x.flatten(1).mul_(0.5)
            return self.head(x.mean((2, 3)).repeat(1, 16))

    run(build=Writes, max_steps=1)
    with pytest.raises(ValueError, match=r"ChannelsLast: the module writes in place into a flattened \(4, 16, 4, 4\)"):
        run(ChannelsLast(), build=Writes, max_steps=1)


class Checkpointed(Residual):
    """Runs its second half again in the backward pass, by torch's own means."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # pyright: ignore[reportReturnType]


def stacked(block: type[Residual], *, p: float = 0.2) -> Callable[[], pl.LightningModule]:
    def build() -> ResNet:
        net = ResNet()
        net.layers, net.head = nn.Sequential(block(8, 8), block(8, 8)), nn.Linear(512, 5)
        for drop in (m for m in net.modules() if isinstance(m, nn.Dropout)):
            drop.p = p
        return net

    return build


def test_blocks_that_run_again_draw_the_same() -> None:
    """By Rematerialization; within torch's own checkpoint that is refused, and what draws nothing trains."""
    ends = [
        run(*made, build=stacked(Residual), max_steps=2)[0]
        for made in ([ChannelsLast()], [ChannelsLast(), Rematerialization()])
    ]
    assert torch.equal(flat(ends[0]), flat(ends[1]))
    with pytest.raises(ValueError, match=r"ChannelsLast: the module draws random numbers .* within torch\.utils"):
        run(ChannelsLast(), build=stacked(Checkpointed), max_steps=1)
    ends = [run(ChannelsLast(), build=stacked(kind, p=0.0), max_steps=2)[0] for kind in (Residual, Checkpointed)]
    assert torch.equal(flat(ends[0]), flat(ends[1]))


# -- checkpoints, and what is left


def strides_of(net: nn.Module, t: pl.Trainer) -> list[tuple[int, ...]]:
    states = [value for o in t.optimizers for state in o.state.values() for value in state.values()]
    return [x.stride() for p in net.parameters() for x in (p, *([] if p.grad is None else [p.grad]))] + [
        x.stride() for x in states
    ]


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [found for item in items for found in tensors_in(item)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[Path]]:
    directory = tmp_path_factory.mktemp("run")
    saving = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    net, t = run(ChannelsLast(), saving, **MODE, enable_checkpointing=True)
    return final_state(net, t), checkpoints(directory)


MODE: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 1,
}


@pytest.mark.parametrize("step", [0, 4, 9])
def test_it_resumes_bit_for_bit(whole: Any, step: int) -> None:
    """With windows and clipping, whose norm adds up in the order of memory; with states laid anew."""
    final, saved = whole
    assert len(saved) == NUM_STEPS
    net, t = run(ChannelsLast(), resume=saved[step], **MODE)
    assert differences(final, final_state(net, t)) == []


class Strides(pl.Callback):
    """How weights, their gradients and the states that they are stepped with lie, before each step."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Any]] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        beside = [[p, p.grad, *tensors_in(optimizer.state[p])] for p in pl_module.parameters()]
        self.seen[trainer.global_step] = [[x.stride() for x in own] for own in beside]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, SOAP])
def test_what_a_checkpoint_brings_lies_as_it_did(optimizer: Any, tmp_path: Path) -> None:
    """SOAP's states lie plainly, in its own basis, and products of them round by how they lie."""

    class Net(ResNet):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer(self.parameters(), lr=1e-3)

    settings: dict[str, Any] = {"build": Net, "max_steps": 3, "accumulate_grad_batches": 2}
    undisturbed, resumed, from_plain = Strides(), Strides(), Strides()
    final = final_state(*run(ChannelsLast(), undisturbed, SaveBatches(tmp_path, (3,)), **settings))
    again = run(ChannelsLast(), resumed, resume=tmp_path / "batch=3.ckpt", **settings)
    assert differences(final, final_state(*again)) == []
    assert sorted(resumed.seen) == [1, 2] and resumed.seen.items() <= undisturbed.seen.items()
    run(ExactResume(), SaveBatches(tmp_path, (3,)), **settings)
    run(ChannelsLast(), from_plain, resume=tmp_path / "batch=3.ckpt", **settings)
    if optimizer is torch.optim.AdamW:
        assert from_plain.seen == resumed.seen


def test_checkpoints_lie_plainly_and_go_both_ways(whole: Any) -> None:
    _, saved = whole
    checkpoint = torch.load(saved[4], weights_only=True)
    found = [x for x in tensors_in(checkpoint) if x.ndim == 4]
    assert len(found) == 8 + 2 * 8 and all(x.is_contiguous() for x in found)
    assert all(x.stride() == torch.empty(x.shape).stride() for x in found)
    ResNet().load_state_dict(checkpoint["state_dict"], strict=True)
    net, t = run(resume=saved[4], **MODE)
    assert t.global_step == NUM_STEPS
    assert flat(net).isfinite().all()


def test_saving_changes_no_state_that_is_stepped_with() -> None:
    """The optimizer's own dicts stand in what it gives for a checkpoint."""
    seen: list[bool] = []

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            before = [id(x) for x in tensors_in([*trainer.optimizers[0].state.values()])]
            made = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            made = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
            states = tensors_in([*trainer.optimizers[0].state.values()])
            seen.append(before == [id(x) for x in states] and sum(map(lies_last, states)) == 2 * 7)
            seen.append(all(x.is_contiguous() for x in made["state_dict"].values()))

    run(ChannelsLast(), Save(), max_steps=2)
    assert seen == [True] * 4


def test_checkpoint_parts_are_new_ones_of_their_own_kind() -> None:
    state = nn.Conv2d(3, 4, 3).state_dict()
    last = {"a": [channels_last(torch.ones(2, 3, 4, 4)), 1], "b": (2, None), "c": state}
    kept = copy.copy(last)
    made = in_plain_order(last)
    assert made is not last and all(last[key] is kept[key] for key in kept) and lies_last(last["a"][0])
    assert made["a"][0].is_contiguous() and made["b"] == (2, None)
    assert type(made["c"]) is type(state) and made["c"]._metadata == state._metadata


class Fails(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("planted")


@pytest.mark.parametrize("fails", [False, True])
def test_all_lies_as_before_when_it_ends(fails: bool) -> None:
    """And what the user laid so by hand stays so."""

    def by_hand() -> ResNet:
        net = ResNet()
        net.layers[1].to(memory_format=torch.channels_last)
        return net

    built = by_hand()
    expected = [p.stride() for p in built.parameters()]
    assert any(lies_last(p) for p in built.parameters())
    net: pl.LightningModule = by_hand()
    t = trainer(ChannelsLast(), *([Fails()] if fails else []), max_steps=2)
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            t.fit(net, images())
    else:
        t.fit(net, images())
    assert [p.stride() for p in net.parameters()] == expected
    shaped = {p: [p.grad, *t.optimizers[0].state[p].values()] for p in net.parameters()}
    for p, beside in shaped.items():
        assert all(x.stride() == p.stride() for x in beside if isinstance(x, Tensor) and x.shape == p.shape)


def test_kernels_of_parametrizations_are_laid() -> None:
    class Normed(ResNet):
        def __init__(self) -> None:
            super().__init__()
            weight_norm(self.stem)

    technique = ChannelsLast()
    plain, _ = run(build=Normed, max_steps=3)
    net, _ = run(technique, build=Normed, max_steps=3)
    assert technique.report()["convolutions"] == 9, "of the one of two parameters, both have four dimensions"
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-4, atol=1e-5)


# -- recipes and bad input


class Images(pl.LightningDataModule):
    """What ``ResNet`` trains on."""

    def train_dataloader(self) -> DataLoader[Any]:
        return images()


def test_a_yaml_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"model": f"{__name__}.ResNet", "data": f"{__name__}.Images"}
    fit_yaml(tmp_path, "ChannelsLast", {"dims": [2]}, **named, max_steps=3)
    assert "stored the weights of 8 convolutions channels-last" in capsys.readouterr().out


@pytest.mark.parametrize("dims", [[1], "2", [2, 2], [2.5], None, 2])
def test_bad_dims_are_refused(dims: Any) -> None:
    with pytest.raises(ValueError, match=r"ChannelsLast\(dims=.*expected a list of 2 \(images\), 3"):
        ChannelsLast(dims=dims)


def test_dims_without_a_convolution_are_refused_with_what_was_found() -> None:
    with pytest.raises(ValueError, match=r"dims=\[3\].* has no nn\.Conv3d, also not transposed .* 1 Conv2d"):
        trainer(ChannelsLast(dims=[3]), max_steps=1).fit(hugging_face("vit"), loader("vit"))


def test_optimizers_that_scale_blocks_of_memory_are_refused() -> None:
    class Blockwise(torch.optim.SGD):
        pass

    Blockwise.__module__ = "bitsandbytes.optim.adamw"
    net = ResNet()
    net.configure_optimizers = lambda: Blockwise(net.parameters(), 0.1)  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=r"the optimizer Blockwise of bitsandbytes cannot .* Use an optimizer of torch.optim"
    ):
        trainer(ChannelsLast(), max_steps=1).fit(net, images())
