"""DiLoCo under two processes: the outer step against one process, what is sent, and exact resumes."""

import math
from typing import Any

import pytest
import torch

from lightning_eff.strategies._communication.codecs import BFloat16Codec
from lightning_eff.strategies.di_lo_co import DiLoCo, outer_step
from tests.cases import Case
from tests.conftest import Once
from tests.runs import differences, final_state, fit
from tests.strategies.communication_launch import launch

CASES = {
    "DiLoCo": Case(
        active=lambda: DiLoCo(interval=3, warmup_steps=2),
        neutral=lambda: DiLoCo(warmup_steps=math.inf),
        exact=True,
        figure="local_steps",
        anywhere=True,
    )
}

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too

#: the parameters' shapes in reference_jobs, of which matrices are compressed
SHAPES = [(8, 8), (8,)] * 3 + [(3, 8), (3,)]
#: bits per element of a matrix, and bytes per scale
BITS = {"float32": (32, 0), "bfloat16": (16, 0), "int8": (8, 4), "int4": (4, 4)}


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    jobs = ("diloco_reference", "diloco_bytes", "diloco_overwritten", "diloco_resume")
    return once("diloco", lambda: launch(*jobs, of="reference_jobs"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_train_as_the_algorithm_does_in_one_process(two: dict[str, Any], dtype: str) -> None:
    found = two["diloco_reference"][dtype]
    assert found["error"] < 1e-12
    assert found["moved"] > 0.1, "the outer optimizer changed nothing"
    assert found["alike"]


def test_a_plain_outer_step_is_local_sgd(two: dict[str, Any]) -> None:
    assert two["diloco_reference"]["averaging"] < 1e-12


def test_the_outer_step_is_nesterovs() -> None:
    theta, gradients = torch.randn(3, 5), torch.randn(4, 3, 5)
    expected = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([expected], lr=0.3, momentum=0.8, nesterov=True)
    momentum = torch.zeros_like(theta)
    for delta in gradients:
        theta = outer_step(theta, delta, momentum, lr=0.3, mu=0.8)
        expected.grad = delta.clone()
        optimizer.step()
        torch.testing.assert_close(theta, expected.detach())


@pytest.mark.parametrize("dtype", BITS)
def test_ranks_meet_every_interval_and_send_so_many_bytes(two: dict[str, Any], dtype: str) -> None:
    found = two["diloco_bytes"][dtype]
    assert found["alike"] == [True, True] + [False, False, True] * 4
    bits, scale = BITS[dtype]
    # two ranks: each sends one half of its rows, then the mean of the other half
    rows = [(2 * math.ceil(shape[0] / 2) if bits < 32 else shape[0], *shape[1:]) for shape in SHAPES if len(shape) == 2]
    matrices = sum(math.prod(shape) * bits / 8 + 2 * scale for shape in rows)
    vectors = sum(4 * shape[0] for shape in SHAPES if len(shape) == 1)
    full = sum(4 * math.prod(shape) for shape in SHAPES)
    assert found["bytes"] == [full, full] + [0.0, 0.0, matrices + vectors] * 4
    assert found["reported"] == matrices + vectors


@pytest.mark.parametrize(
    ("dtype", "most"), [("float32", 1e-6), ("bfloat16", 2**-8), ("int8", 2 / 127), ("int4", 2 / 7)]
)
def test_rounding_errors_are_kept_for_the_next_outer_step(two: dict[str, Any], dtype: str, most: float) -> None:
    found = two["diloco_bytes"][dtype]
    assert found["error"] < 1e-6, "what was applied and what is kept is not what was due"
    assert found["off"] < most * found["largest"]
    if dtype != "float32":
        assert found["off"] > 1e-5
        assert found["kept"] > 1e-5


def test_bfloat16_is_rounded_to_nearest() -> None:
    x, codec = torch.randn(3, 5, 7), BFloat16Codec()
    data = codec.encode(x, seed=0)
    assert data.shape == (3, codec.num_bytes(5, 7))
    assert data.dtype == torch.uint8
    mantissa, exponent = torch.frexp(x.double())
    expected = torch.ldexp((mantissa * 2**8).round() / 2**8, exponent)  # half to even, as IEEE 754 has it
    assert torch.equal(codec.decode(data, 5, 7).double(), expected)


def test_overwritten_weights_are_averaged_without_an_outer_step(two: dict[str, Any]) -> None:
    found = two["diloco_overwritten"]
    assert found["error"] < 1e-6
    parameters = len(SHAPES)
    assert found["momenta"] == [0] * 4 + [parameters] * 2 + [0] * 4 + [parameters] * 4


def test_resume_equals_uninterrupted(two: dict[str, Any]) -> None:
    found, whole = two["diloco_resume"], two["diloco_resume"]["parameters"]
    assert found["differences"] == [{}, {}]
    assert found["alike"], "ranks end with different weights"
    assert found["alone"], "one process did not go on"
    # where ranks have met, in step 4, the module's weights are those of the next period's start
    assert found["kept"] == [
        {"reference": reference, "momentum": whole, "residuals": 2, "averagings": 1} for reference in (0, whole)
    ]


def test_checkpoints_hold_the_mean(two: dict[str, Any]) -> None:
    assert two["diloco_resume"]["error"] < 1e-6


def test_one_process_is_plain_training() -> None:
    plain = final_state(*fit("tiny_gpt", list))
    assert differences(plain, final_state(*fit("tiny_gpt", lambda: [DiLoCo(interval=2)]))) == []
    assert DiLoCo(warmup_steps=math.inf).neutral


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": 0}, r"DiLoCo\(interval=0\): expected an integer >= 1: H, the number of inner steps"),
        ({"outer_lr": 0.0}, r"DiLoCo\(outer_lr=0.0\): expected a finite number > 0: eta"),
        ({"outer_momentum": 1.0}, r"DiLoCo\(outer_momentum=1.0\): expected a number in \[0, 1\): mu"),
        ({"outer_dtype": "int2"}, r"DiLoCo\(outer_dtype='int2'\): expected 'float32', 'bfloat16', 'int8' or 'int4'"),
        ({"warmup_steps": -1}, r"DiLoCo\(warmup_steps=-1\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiLoCo(**arguments)
