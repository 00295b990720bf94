"""What stays in float32 under StochasticRoundingBF16: buffers, norms with running statistics; and what is put back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from lightning_eff import StochasticRoundingBF16
from tests.cases import CASES
from tests.models import TinyClassifier, hugging_face, loader, make_batch, trainer
from tests.runs import checkpoints, differences, final_state, fit


class Around(pl.LightningModule):
    """``make()`` on batches (4, 8), with the squared difference to ``target``, or the module's own loss."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor], Tensor] = lambda y: y.float().square().mean()) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.seen: list[dict[str, torch.dtype]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append({name: t.dtype for name, t in self.net.state_dict().items()})
        return self.loss(self.net(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def numbers(count: int = 4) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(0)
    return DataLoader([100 + torch.randn(4, 8, generator=g) for _ in range(count)], batch_size=None)  # pyright: ignore[reportArgumentType]


def run(net: pl.LightningModule, data: Any, plugin: StochasticRoundingBF16 | None = None, **kwargs: Any) -> pl.Trainer:
    t = trainer(plugins=[plugin or StochasticRoundingBF16()], **{"max_steps": 4, **kwargs})
    t.fit(net, data)
    return t


def test_running_statistics_are_float32s() -> None:
    torch.manual_seed(0)
    net = Around(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)))
    plain = nn.BatchNorm1d(8)
    run(net, numbers())
    dtypes = net.seen[0]
    assert dtypes["0.running_mean"] == dtypes["0.weight"] == torch.float32
    assert dtypes["1.weight"] == torch.bfloat16
    for x in numbers():
        plain(x.bfloat16())  # the batch is bfloat16, and that is all
    assert torch.equal(net.net[0].running_mean, plain.running_mean)  # pyright: ignore[reportIndexIssue]
    assert torch.equal(net.net[0].running_var, plain.running_var)  # pyright: ignore[reportIndexIssue]
    assert not torch.equal(net.net[0].running_mean, plain.running_mean.bfloat16().float())  # pyright: ignore[reportIndexIssue, reportOptionalMemberAccess]


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)),
        lambda: nn.Sequential(nn.LayerNorm(8), spectral_norm(nn.Linear(8, 8))),
    ],
)
def test_torchs_modules_with_buffers_train(norm: Callable[[], nn.Module]) -> None:
    net = Around(norm())
    before = {name: (t.dtype, t.clone()) for name, t in net.net.state_dict().items()}
    t = run(net, numbers())
    assert t.global_step == 4
    after = net.net.state_dict()
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: d for name, (d, _) in before.items()}
    assert all(tensor.isfinite().all() for tensor in after.values())
    trained = {name for name, _ in net.net.named_parameters()}
    assert any(not torch.equal(after[name], before[name][1]) for name in trained)
    net.net.eval()(torch.randn(4, 8))  # in its own dtypes again


def test_class_weights_are_cast_and_put_back() -> None:
    weights = torch.tensor([0.1, 0.3, 0.7])
    criterion = nn.CrossEntropyLoss(weight=weights.clone())
    net = Around(nn.Linear(8, 3), lambda y: criterion(y, torch.zeros(len(y)).long()))
    net.criterion = criterion
    run(net, numbers())
    assert torch.equal(criterion.weight, weights)


class Positions(nn.Module):
    """A table that is added to activations."""

    def __init__(self, name: str = "table") -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, torch.linspace(0, 1, 8))
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x + getattr(self, self.name))


class Normed(Positions):
    """SideOutputs the table, running statistics and a scale of the output, which may stay float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) * self.scale


class Makes(Positions):
    """Makes a float32 tensor of its own, so that no buffer is the cause."""

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x + torch.linspace(0, 1, 8, dtype=torch.float32))


@pytest.mark.parametrize("build", [Positions, Normed])
def test_a_buffer_that_makes_activations_float32_is_named_alone(build: Callable[[], nn.Module]) -> None:
    net = Around(build())
    before = {name: b.clone() for name, b in net.named_buffers()}
    with pytest.raises(
        RuntimeError, match=r"because net\.table stays float32.*cast_buffers=\('net\.table',\)\), with which"
    ):
        run(net, numbers())
    after = dict(net.named_buffers())
    assert all(torch.equal(after[name], b) for name, b in before.items() if ".norm." not in name)
    assert int(after.get("net.norm.num_batches_tracked", 1)) == 1, "the step that failed moved it, and no try did"
    net = Around(build())
    table = net.net.table.clone()  # pyright: ignore[reportCallIssue]
    run(net, numbers(), StochasticRoundingBF16(cast_buffers=("net.table",)))
    assert net.seen[0]["table"] == torch.bfloat16
    assert torch.equal(net.net.table, table)  # pyright: ignore[reportArgumentType]


def test_where_casting_buffers_does_not_help_it_is_not_advised() -> None:
    with pytest.raises(
        RuntimeError, match=r"casting the module's buffers does not help.*precision='bf16-mixed'"
    ) as caught:
        run(Around(Makes()), numbers())
    assert "Write StochasticRoundingBF16" not in str(caught.value)


@pytest.mark.parametrize(
    "takes_none", [lambda y: y.detach().numpy(), lambda y: np.asarray(y.detach()), lambda y: torch.linalg.qr(y)]
)
def test_what_does_not_take_bfloat16_is_said_with_its_place(takes_none: Callable[[Tensor], Any]) -> None:
    def loss(y: Tensor) -> Tensor:
        takes_none(y)
        return y.square().mean()

    trainer(max_steps=1).fit(Around(nn.Linear(8, 8), loss), numbers())
    line = takes_none.__code__.co_firstlineno
    with pytest.raises(
        RuntimeError, match=rf"\): line {line} of precision/test_\w+\.py gives a bfloat16.*x\.float\(\)"
    ):
        run(Around(nn.Linear(8, 8), loss), numbers())


def test_cast_buffers_that_name_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'tabel' names no floating-point buffer\. Use names from \['net\.table'"):
        run(Around(Positions()), numbers(), StochasticRoundingBF16(cast_buffers=("tabel",)))
    with pytest.raises(ValueError, match=r"expected a list of buffers.* Write a tuple"):
        StochasticRoundingBF16(cast_buffers="table")


def test_errors_of_others_stay_their_own() -> None:
    def fails(y: Tensor) -> Tensor:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match=r"^planted$"):
        run(Around(Positions(), fails), numbers(), StochasticRoundingBF16(cast_buffers=("net.table",)))


def test_rotary_frequencies_are_those_of_transformers_in_bfloat16() -> None:
    """A model whose weights are loaded in bfloat16 keeps its frequencies in float32; one that is cast does not."""
    net = hugging_face("llama")
    rotary: Any = net.model.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    reference = type(rotary)(net.model.config)
    found: list[tuple[Any, Any]] = []
    handle = rotary.register_forward_hook(
        lambda m, args, kw, output: found.append(((args, kw), output)), with_kwargs=True
    )
    run(net, DataLoader([make_batch("llama")] * 2, batch_size=None), max_steps=2)  # pyright: ignore[reportArgumentType]
    handle.remove()
    (args, kwargs), output = found[0]
    assert output[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(output, reference(*args, **kwargs), strict=True))
    assert torch.equal(rotary.inv_freq, frequencies)
    rounded = type(rotary)(net.model.config).to(torch.bfloat16)
    assert not torch.equal(output[0], rounded(*args, **kwargs)[0])


def test_modules_built_in_configure_model_have_exact_buffers() -> None:
    class Late(TinyClassifier):
        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                self.late = nn.Linear(8, 8)
                self.register_buffer("third", torch.tensor(1 / 3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.late(x))

    net = Late()
    run(net, loader("classifier"))
    assert net.third.dtype == torch.float32 and float(net.third) == pytest.approx(1 / 3, abs=1e-8)
    assert net.late.weight.dtype == torch.float32


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_as_it_was_and_its_weights_are_those_trained(fails: bool, tmp_path: Path) -> None:
    class Ends(TinyClassifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last = {name: t.detach().clone() for name, t in self.state_dict().items()}
            if fails and self.trainer.global_step == 3:
                raise KeyError("planted")

    net = Ends()
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    t = trainer(saving, plugins=[StochasticRoundingBF16()], max_steps=4, enable_checkpointing=True)
    if fails:
        with pytest.raises(KeyError, match="planted"):
            t.fit(net, loader("classifier"))
    else:
        t.fit(net, loader("classifier"))
    for name, tensor in net.state_dict().items():
        trained = net.last[name]
        assert tensor.dtype == (torch.int64 if "num_batches" in name else torch.float32)
        assert trained.dtype == (tensor.dtype if name.startswith("norm") else torch.bfloat16)
        assert torch.equal(tensor, trained.to(tensor.dtype))
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in net.parameters())
    saved = torch.load(checkpoints(tmp_path)[-1], weights_only=True)["state_dict"]
    assert {name: t.dtype for name, t in saved.items()} == {name: t.dtype for name, t in net.last.items()}
    plain = TinyClassifier()
    plain.load_state_dict(saved, strict=True)
    if not fails:
        assert all(
            torch.equal(a, b) for a, b in zip(plain.state_dict().values(), net.state_dict().values(), strict=True)
        )
        again = trainer(plugins=[StochasticRoundingBF16()], max_steps=2)
        again.fit(net, loader("classifier"))  # goes on from there
        assert again.global_step == 2


def test_resume_is_exact_with_statistics(tmp_path: Path) -> None:
    def run_with(**kwargs: Any) -> dict[str, Tensor]:
        def resuming() -> list[Any]:
            return [CASES["LatestWeightAveraging"].neutral()]

        return final_state(*fit("classifier", resuming, plugins=[StochasticRoundingBF16()], **kwargs))

    whole = run_with(directory=tmp_path)
    assert differences(whole, run_with(resume=checkpoints(tmp_path)[6])) == []


def test_what_checkpoints_hold_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run(TinyClassifier(), loader("classifier"))
    assert "bfloat16, also in checkpoints; unchanged: buffers (norm.running_mean, norm.running_var)" in caplog.text
