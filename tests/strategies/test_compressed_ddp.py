"""Compressed gradients: the rules against references, bytes counted, checkpoints, and small runs beside plain DDP."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_eff.strategies._communication.codecs import QuantizedCodec, SignCodec, pack_codes, unpack_codes
from lightning_eff.strategies._communication.exchange import Residuals, redistribute
from lightning_eff.strategies.compressed_ddp import CompressedDDPStrategy
from tests.conftest import Once
from tests.models import loader, module, trainer
from tests.runs import MODES, NUM_STEPS, largest
from tests.strategies.communication_jobs import HOOKS
from tests.strategies.communication_launch import launch

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too
NAMES = sorted(HOOKS)
every = pytest.mark.parametrize("name", NAMES)
RULES = ("mean_rule:sign", "mean_rule:qsgd", "sign_reference", "unbiased", "low_rank")


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    jobs = [f"{job}:{name}" for job in ("resume", "modes", "traffic") for name in NAMES]
    return once("compressed_two", lambda: launch(*RULES, *jobs))


@pytest.fixture(scope="module")
def three(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three processes find: rows that do not divide, and the checkpoint of two."""

    def run() -> dict[str, Any]:
        directory = str(tmp_path_factory.mktemp("world"))
        launch("other_world:onebit", world_size=2, CHECKPOINT=directory)
        jobs = ("mean_rule:sign", "mean_rule:qsgd", "sign_reference", "other_world:onebit")
        return launch(*jobs, world_size=3, CHECKPOINT=directory)

    return once("compressed_three", run)


# -- bytes


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 7, 8, 33])
def test_codes_survive_packing(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    assert torch.equal(unpack_codes(packed, bits, count), codes)


@pytest.mark.parametrize("codec", [SignCodec(), QuantizedCodec(4, 16), QuantizedCodec(8, 1000), QuantizedCodec(2, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 8), (7, 33)])
def test_a_codec_says_how_many_bytes(codec: SignCodec | QuantizedCodec, shape: tuple[int, int]) -> None:
    x = torch.randn(2, *shape)
    data = codec.encode(x, seed=1)
    assert data.dtype == torch.uint8 and data.shape == (2, codec.num_bytes(*shape))
    found = codec.decode(data, *shape)
    assert found.shape == x.shape
    assert torch.equal(codec.decode(codec.encode(torch.zeros_like(x), seed=1), *shape), torch.zeros_like(x))
    assert torch.equal(codec.encode(x, seed=1), data), "the same seed gives the same bytes"


@pytest.mark.parametrize(("bits", "size"), [(4, 16), (8, 64), (4, 1024)])
def test_quantization_stays_within_a_step_of_its_bucket(bits: int, size: int) -> None:
    x = torch.randn(1, 12, 20)
    found = QuantizedCodec(bits, size).decode(QuantizedCodec(bits, size).encode(x, seed=3), 12, 20)
    levels = 2 ** (bits - 1) - 1
    for i in range(0, 240, size):
        bucket, back = x.flatten()[i : i + size], found.flatten()[i : i + size]
        step = bucket.abs().max() / levels
        assert (bucket - back).abs().max() <= step * 1.0001
        assert torch.allclose(back / step, (back / step).round(), atol=1e-4)
        assert back[bucket.abs().argmax()] == pytest.approx(float(bucket[bucket.abs().argmax()]), rel=1e-5)


def test_signs_against_rows() -> None:
    x = torch.randn(1, 4, 6)
    x[0, 2] = 0.0
    x[0, :, 1] = 0.0
    found = SignCodec().decode(SignCodec().encode(x, seed=0), 4, 6)[0]
    live = [0, 2, 3, 4, 5]
    for row in (0, 1, 3):
        scale = float(x[0, row, live].abs().mean())
        assert found[row, live].tolist() == pytest.approx([scale if v >= 0 else -scale for v in x[0, row, live]])
    assert not found[2].any() and not found[:, 1].any()


# -- the exchange


@pytest.mark.parametrize("rule", ["sign", "qsgd"])
@pytest.mark.parametrize("world", ["two", pytest.param("three", marks=pytest.mark.slow)])
def test_what_was_sent_and_what_is_kept_is_the_sum(rule: str, world: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(world)[f"mean_rule:{rule}"]
    assert found["alike"], "ranks got different numbers"
    assert largest(found["errors"].values()) < 3e-6
    assert found["unsent"]["c"] > 0.1, "nothing was left out, so nothing was compressed"
    assert largest(found["kept"].values()) < 1.5, "the residuals grow"


@pytest.mark.parametrize("world", ["two", pytest.param("three", marks=pytest.mark.slow)])
def test_signs_against_loops(world: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(world)["sign_reference"]
    assert found["error"] < 1e-6 < found["size"]
    assert found["zeros"] == 0.0


def test_quantization_is_unbiased(two: dict[str, Any]) -> None:
    found = two["unbiased"]
    assert found["different"] == 500, "the draws do not differ"
    assert found["worst"] < 5.0 and 0.85 < found["typical"] < 1.15  # standard errors, over 320 elements
    assert found["noise"] > 0.01


def test_powersgd_is_exact_up_to_its_rank(two: dict[str, Any]) -> None:
    found = two["low_rank"]
    assert largest(found["2"] + found["3"]) < 1e-5
    assert min(found["1"]) > 0.1


def test_residuals_are_shared_out_anew() -> None:
    ranks = [
        Residuals({"a": torch.full((5, 2), float(r))}, {"a": torch.arange(6.0).view(3, 2) + 10 * r}) for r in (0, 1)
    ]
    assert redistribute(ranks, 1, 2) is ranks[1]
    parts = [redistribute(ranks, r, 3) for r in range(3)]
    assert all(torch.equal(part.worker["a"], torch.full((5, 2), 0.5)) for part in parts)
    whole = torch.cat([part.server["a"] for part in parts])
    assert torch.equal(whole[:5], torch.cat([ranks[0].server["a"], ranks[1].server["a"]])[:5])
    assert not whole[5:].any()


# -- in a Trainer


@every
def test_modes(name: str, two: dict[str, Any]) -> None:
    assert set(two[f"modes:{name}"]) == set(MODES)
    for mode, found in two[f"modes:{name}"].items():
        assert found == {"alike": True, "finite": True, "steps": NUM_STEPS, "acts": True}, mode


@every
def test_resume_equals_uninterrupted(name: str, two: dict[str, Any]) -> None:
    found = two[f"resume:{name}"]
    assert found["differences"] == [{}, {}]
    assert found["checkpoints"] == found["step"] == NUM_STEPS
    assert found["ranks"] == 2
    assert found["plain"] == NUM_STEPS, "did not go on in plain DDP"
    if name != "bf16":
        assert found["kept"][0] != found["kept"][1], "ranks keep different residuals"


@pytest.mark.slow
def test_resume_with_another_number_of_ranks(three: dict[str, Any]) -> None:
    assert three["other_world:onebit"] == {"steps": NUM_STEPS, "alike": True, "finite": True}


@every
def test_bytes(name: str, two: dict[str, Any]) -> None:
    found = two[f"traffic:{name}"]
    shapes = [(shape[0], math.prod(shape[1:]), len(shape)) for shape in found["shapes"]]
    numel = sum(rows * cols for rows, cols, _ in shapes)
    assert found["eff/compressed_ddp/plain_bytes"] == 4 * numel  # 2 (N - 1) / N = 1
    assert found["eff/compressed_ddp/sent_bytes"] == found["counted"]
    expected = 0
    for rows, cols, ndim in shapes:
        share = -(-rows // 2) * cols  # of the elements, sent to the other rank and then by it
        if name == "bf16":
            expected += 2 * rows * cols
        elif ndim < 2:
            expected += 4 * rows * cols
        elif name == "powersgd":  # rank 2: P and Q
            expected += 4 * 2 * (rows + cols)
        elif name == "onebit":  # scales, columns that are alive, signs
            expected += 2 * (4 * -(-rows // 2) + -(-cols // 8) + -(-share // 8))
        else:  # scales, four bits
            expected += 2 * (4 * -(-share // 64) + -(-share // 2))
    assert found["counted"] == expected
    assert expected < {"bf16": 0.51, "qsgd": 0.17, "onebit": 0.07, "powersgd": 0.07}[name] * 4 * numel


def test_one_process_is_plain_ddp() -> None:
    assert launch("alone", world_size=1)["alone"] == dict.fromkeys(HOOKS, True)


@pytest.mark.slow
def test_converges_like_plain_ddp() -> None:
    """About 40 s. Of what plain DDP takes off the loss in 150 steps, a hook takes off at least so much."""
    found = launch("converges")["converges"]
    gain = {name: (found["first"] - found[name]) / (found["first"] - found["plain"]) for name in NAMES}
    assert gain["bf16"] > 0.99 and gain["qsgd"] > 0.95 and gain["onebit"] > 0.85 and gain["powersgd"] > 0.7, gain


# -- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hook": "topk"}, "expected 'powersgd', 'bf16', 'onebit' or 'qsgd'"),
        ({"hook": "onebit", "rank": 2}, "rank does nothing with this hook.*'powersgd'"),
        ({"hook": "bf16", "error_feedback": True}, "error_feedback does nothing with this hook"),
        ({"hook": "qsgd", "bits": 3}, "bits=3.: expected 2, 4 or 8"),
        ({"hook": "qsgd", "bucket_size": 0}, "bucket_size=0.: expected an integer >= 1.*the number of elements"),
        ({"hook": "powersgd", "rank": 0}, "rank=0.: expected an integer >= 1"),
        (
            {"hook": "onebit", "start_step": -1},
            "start_step=-1.: expected an integer >= 0.*the number of optimizer steps",
        ),
        ({"hook": "onebit", "ddp_comm_hook": print}, "ddp_comm_hook=.*one communication hook"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedDDPStrategy(**arguments)


def test_a_gradient_scaler_is_refused() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    t = trainer(max_steps=1, strategy=CompressedDDPStrategy("onebit"), plugins=[plugin])
    with pytest.raises(ValueError, match=r"got precision '16-mixed'.*bf16-mixed"):
        t.fit(module("tiny_gpt"), loader("tiny_gpt"))


@every
def test_is_registered(name: str) -> None:
    strategy = trainer(strategy=f"ddp_{name}").strategy
    assert isinstance(strategy, CompressedDDPStrategy) and strategy.hook == name
    assert f"ddp_{name}" in StrategyRegistry.available_strategies()
