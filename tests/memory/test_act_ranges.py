"""8-bit codes by running ranges (Mesa): the rule against a plain one, clamping, what is kept exact, and resuming."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from lightning_eff import LatestWeightAveraging
from lightning_eff.memory._compression import ranges as _ranges
from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.ranges import RunningRanges, follow, of_rank
from lightning_eff.memory.act_precision import ACTPrecision
from lightning_eff.memory.activation_compression import ActivationCompression
from tests.memory.test_act_engine import _text, error, gradient, small_net, trained_gpt2  # noqa: F401
from tests.models import TinyGPT, loader, trainer
from tests.runs import fit, resume_from_every_step


class Plain:
    """The rule, one head after another, in float64 and rounding to nearest."""

    def __init__(self) -> None:
        self.minimum: list[float] = []
        self.range: list[float] = []

    def codes(self, heads: list[Tensor], decay: float = 0.9) -> list[tuple[Tensor, Tensor]]:
        """Codes and what they decode to, of each head."""
        lows, spans = [float(h.min()) for h in heads], [float(h.max() - h.min()) for h in heads]
        if not self.range:
            self.minimum, self.range = lows, spans
        else:
            self.minimum = [decay * m + (1 - decay) * low for m, low in zip(self.minimum, lows, strict=True)]
            self.range = [decay * r + (1 - decay) * span for r, span in zip(self.range, spans, strict=True)]
        found = []
        for h, m, r in zip(heads, self.minimum, self.range, strict=True):
            code = ((h.double() - m) / (r / 255) + 0.5).floor().clamp(0, 255)
            found.append((code, m + r / 255 * code))
        return found


@pytest.mark.parametrize(("shape", "dim"), [((2, 4, 8, 16), 1), ((2, 8, 4, 16), 2), ((3, 5, 40), None), ((500,), None)])
def test_against_the_plain_rule(shape: tuple[int, ...], dim: int | None) -> None:
    ranges, plain = RunningRanges(), Plain()
    for turn in range(4):
        x = torch.randn(shape) * (1 + 0.02 * turn) + 0.05 * turn
        if dim is not None:
            x = x * torch.arange(1.0, shape[dim] + 1).view([-1 if d == dim else 1 for d in range(len(shape))])
        codes, fit = ranges.encode("a", x, None if dim is None else (dim, shape[dim]), seed=None)
        heads = [x] if dim is None else list(x.unbind(dim))
        expected = plain.codes(heads)
        found = codes.decode()
        assert codes._codes is not None and found.shape == x.shape
        stored = codes._codes.view(shape)
        for (code, value), byte, decoded in zip(
            expected,
            [stored] if dim is None else stored.unbind(dim),
            [found] if dim is None else found.unbind(dim),
            strict=True,
        ):
            apart = (byte.double() - code).abs()
            assert apart.max() <= 1 and (apart > 0).double().mean() < 0.002  # float32, on the boundary of two codes
            close = apart == 0
            assert torch.allclose(decoded[close].double(), value[close], atol=1e-4)
        assert bool(fit) and codes.num_bytes == x.numel() + 8 * len(heads)


def test_codes_are_clamped_where_the_research_code_wraps() -> None:
    """1 % of the elements lie above the range: modulo 256 their error is a whole range, clamped what they stand out by."""
    x = torch.rand(20_000)
    ranges = RunningRanges({"a": torch.tensor([[0.005], [0.985]])})
    codes, fit = ranges.encode("a", x, None, seed=None)
    minimum, span = ranges.state_dict()["a"][:, 0].double()
    steps = ((x.double() - minimum) / (span / 255) + 0.5).floor()
    outside = (steps < 0) | (steps > 255)
    assert 0.005 < outside.double().mean() < 0.05
    wrapped = minimum + span / 255 * steps.remainder(256)
    clamped = (codes.decode().double() - x).square().mean()
    assert clamped < (wrapped - x).square().mean() / 100
    assert bool(fit) and (codes.decode().double() - x).abs().max() < 0.02


def test_stochastic_rounding_is_right_on_average() -> None:
    x = torch.rand(4096) * 0.98 + 0.01
    state = {"a": torch.tensor([[0.0], [20.0]])}  # coarse: a step of 0.07 after the next tensor's range
    decoded = torch.stack(
        [RunningRanges(state).encode("a", x, None, seed=seed)[0].decode() for seed in range(400)]
    ).double()
    step = (0.9 * 20 + 0.1 * 0.98) / 255
    assert (decoded - x).abs().max() < step * 1.01
    assert float((decoded.mean(0) - x).abs().mean()) < 0.05 * step
    nearest = RunningRanges(state).encode("a", x, None, seed=None)[0].decode()
    assert float((nearest - x).abs().mean()) > 0.2 * step


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_kept_exact_and_moves_nothing(bad: float) -> None:
    ranges, good = RunningRanges(), torch.randn(2, 4, 8, 16)
    wrong = good.clone()
    wrong[0, 1, 2, 3] = bad
    assert not ranges.encode("a", wrong, (1, 4), seed=0)[1]  # at first sight, too
    assert ranges.encode("a", good, (1, 4), seed=0)[1]
    before = ranges.state_dict()["a"]
    assert torch.equal(before[0], good.amin((0, 2, 3)))
    assert not ranges.encode("a", wrong, (1, 4), seed=0)[1]
    assert torch.equal(ranges.state_dict()["a"], before)


def test_a_tensor_that_clamping_would_ruin_is_kept_exact_and_hardly_moves_the_range() -> None:
    ranges, good = RunningRanges(), torch.randn(4096)
    ranges.encode("a", good, None, seed=0)
    span = float(ranges.state_dict()["a"][1])
    assert not ranges.encode("a", 1e6 * good, None, seed=0)[1]
    assert span < float(ranges.state_dict()["a"][1]) <= 2.001 * span
    assert ranges.encode("a", good, None, seed=0)[1]  # usable at once
    fits = [bool(ranges.encode("a", 100 * good, None, seed=0)[1]) for _ in range(12)]
    assert fits[-1] and not fits[0]  # what stays so large is followed
    assert not ranges.encode("a", 1e-6 * good, None, seed=0)[1]  # the whole tensor within a hundredth of a step


def test_a_range_of_zero_is_none() -> None:
    ranges = RunningRanges()
    codes, fit = ranges.encode("a", torch.full((512,), 0.3), None, seed=0)
    assert fit and torch.equal(codes.decode(), torch.full((512,), 0.3))
    x = torch.randn(512)
    assert ranges.encode("a", x, None, seed=0)[1]
    assert torch.equal(ranges.state_dict()["a"], torch.tensor([[x.min()], [x.max() - x.min()]]))


def test_follow_is_an_average_with_a_decay_of_nine_tenths() -> None:
    running = follow(torch.tensor([[0.0], [1.0]]), torch.tensor([-1.0]), torch.tensor([2.0]))
    assert torch.allclose(running, torch.tensor([[-0.1], [1.2]]))
    other = follow(torch.tensor([[0.0], [1.0]]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0]))
    assert torch.equal(other, torch.tensor([[0.0, 1.0], [1.0, 2.0]]))  # of another number of heads


def test_a_second_forward_before_the_backward_does_not_change_what_the_first_decodes() -> None:
    w = torch.randn(16, 64, requires_grad=True)
    engine = Engine(small_net(), bits=8, ranges=RunningRanges())

    def run(scale: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 64) * scale
        with engine.forward(0, (w,)):
            return x, (w * (x.requires_grad_() + 0.0)).sum()

    (x, first), (y, second) = run(1.0), run(0.5)
    for values, loss in ((x, first), (y, second)):
        w.grad = None
        loss.backward()
        assert w.grad is not None and error(w.grad, values.detach()) < 0.03  # 0.05 with the other scale


@pytest.mark.parametrize("form", ["fused", "math", "products", "transposed"])
def test_attention_has_a_range_for_each_head(form: str) -> None:
    """Heads of very different sizes are each as near as one alone, also where memory has another order."""
    size = torch.tensor([1.0, 100.0, 1e4]).view(1, 3, 1, 1)
    q, k, v = ((torch.randn(2, 3, 32, 16) * (size if n == 2 else 1)).requires_grad_() for n in range(3))
    if form == "transposed":
        q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k, v))

    def run() -> Tensor:
        if form == "products":
            return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).square().mean((0, 2, 3)).sum()
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-9 if form == "math" else 0.0)
        return (attended / size).square().mean()

    exact = torch.autograd.grad(run(), (q, k, v))
    engine = Engine(small_net(), bits=8, ranges=RunningRanges())
    with engine.forward(0, ()):
        loss = run()
    assert engine.ranges is not None
    assert any(state.shape == (2, 3) for state in engine.ranges.state_dict().values())
    if form != "products":
        for g, e in zip(torch.autograd.grad(loss, (q, k, v)), exact, strict=True):
            for head in range(3):
                assert error(g[:, head], e[:, head]) < 0.1, head
    shapes = {key: tuple(state.shape) for key, state in engine.ranges.state_dict().items()}
    assert all(shape == (2, 3) for key, shape in shapes.items() if "square" not in key and "mul" not in key), shapes


def test_gradients_of_a_trained_gpt2(trained_gpt2: nn.Module) -> None:  # noqa: F811
    engine = Engine(trained_gpt2, bits=8, ranges=RunningRanges())
    batch = _text(8, 64, 2000)
    for turn in range(4):
        batch = _text(8, 64, 2000 + turn)
        exact = gradient(trained_gpt2, lambda: trained_gpt2(**batch).loss).double()  # noqa: B023
        found = gradient(trained_gpt2, lambda: trained_gpt2(**batch).loss, engine, turn).double()  # noqa: B023
        assert float(F.cosine_similarity(found, exact, dim=0)) >= 0.999
    with engine.forward(9, batch):
        loss = trained_gpt2(**batch).loss
    assert engine.ledger.unfit == 0 and engine.ledger.bits < 8
    plain = Engine(trained_gpt2, bits=8)
    with plain.forward(9, batch):
        other = trained_gpt2(**batch).loss
    assert engine.ledger.saved_bytes < plain.ledger.saved_bytes
    del loss, other


# -- in a run


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    """Also what the checkpoint holds loads as weights alone; fresh ranges in a resumed run would round otherwise."""
    assert resume_from_every_step("tiny_gpt", lambda: [ActivationCompression(bits=8, method="mesa")], tmp_path) == {}


def test_the_plugin_resumes_too(tmp_path: Path) -> None:
    def build() -> list:
        return [LatestWeightAveraging(window=3, interval=2)]  # resumes the loader and the random state

    plugins: dict[str, Any] = {"plugins": [ACTPrecision(bits=8, method="mesa")]}
    assert resume_from_every_step("tiny_gpt", build, tmp_path, **plugins) == {}


def test_state_is_of_every_name_and_stays_after_the_run() -> None:
    technique = ActivationCompression(bits=8, method="mesa")
    fit("tiny_gpt", lambda: [technique], max_steps=2)
    (state,) = technique.state_dict()["ranges"]
    assert state["blocks.0.mlp.1:gelu:0"].shape == (2, 1)
    assert state["blocks.3:scaled_dot_product_attention:0"].shape == (2, 2)
    assert "method" not in technique.report() and technique.report()["ratio"] > 3
    plugin = ACTPrecision(bits=8, method="mesa")
    trainer(max_steps=1, plugins=[plugin]).fit(TinyGPT(), loader("tiny_gpt"))
    assert len(plugin.state_dict()["ranges"][0]) > 10
    again = ACTPrecision(bits=8, method="mesa")
    again.load_state_dict(plugin.state_dict())
    assert again.state_dict()["ranges"] == plugin.state_dict()["ranges"]


def _of_ranks(rank: int, port: int, directory: str) -> None:
    """A process of two: what is saved of both, after steps on different data."""
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(address)
    torch.distributed.init_process_group("gloo")
    plugin = ACTPrecision(bits=8, method="mesa")
    plugin.convert_module(small_net())
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    with plugin.train_step_context():
        assert plugin._module is not None
        plugin._module(x)
    saved = plugin.state_dict()
    again = ACTPrecision(bits=8, method="mesa")
    again.load_state_dict(saved)
    again.convert_module(small_net())
    engine = again._make_engine(small_net())
    assert engine.ranges is not None and plugin._ranges is not None
    torch.save(
        (saved["ranges"], engine.ranges.state_dict(), plugin._ranges.state_dict()), Path(directory, f"{rank}.pt")
    )
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_each_rank_goes_on_with_its_own(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start_processes(_of_ranks, (port, str(tmp_path)), nprocs=2, start_method="spawn")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    key = "0:linear:0"
    for rank, (saved, taken_up, own) in enumerate(found):
        assert [torch.equal(saved[other][key], found[other][2][key]) for other in (0, 1)] == [True, True]
        assert torch.equal(taken_up[key], own[key]), rank
    assert not torch.equal(found[0][2][key], found[1][2][key])


def test_of_rank_wraps_around() -> None:
    states = [{"a": torch.zeros(2, 1)}, {"a": torch.ones(2, 1)}]
    assert of_rank(states, 1) is states[1] and of_rank(states, 2) is states[0]
    assert _ranges.DECAY == 0.9
