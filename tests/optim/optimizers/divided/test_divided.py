"""Matrix optimizers over ranks: equal to one process, each matrix decomposed once, and messages and memory counted."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Once
from tests.optim.optimizers.divided import divided_jobs as jobs
from tests.strategies.launch import launch

RULES = sorted(jobs.RULES)
_HERE = "tests.optim.optimizers.divided.divided_jobs"


@pytest.fixture(scope="session")
def two(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once("divided two", lambda: launch(_HERE, "two", str(tmp_path_factory.mktemp("two")), world_size=2))


@pytest.fixture(scope="session")
def four(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once("divided four", lambda: launch(_HERE, "four", str(tmp_path_factory.mktemp("four")), world_size=4))


@pytest.fixture(params=[2, 4])
def found(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    return request.param, request.getfixturevalue({2: "two", 4: "four"}[request.param])


# -- equal to one process


@pytest.mark.parametrize("rule", RULES)
def test_weights_and_state_are_those_of_one_process_in_every_layout(found: tuple[int, Any], rule: str) -> None:
    """With gradients that are None for a step, a group that is added, and shards that are uneven or empty."""
    world, results = found
    assert len(results["layouts"]) == {2: 3, 4: 6}[world]
    for layout, far in results["layouts"].items():
        assert far[rule] < 1e-12, layout


def test_fsdp2_within_tensor_parallelism_is_one_process_too(four: Any) -> None:
    assert max(four["within"].values()) < 1e-10, four["within"]


@pytest.mark.parametrize("rule", ["SOAP", "Shampoo"])
def test_under_ddp_decompositions_are_divided_and_nothing_else_changes(found: tuple[int, Any], rule: str) -> None:
    world, results = found
    ddp = results["ddp"][rule]
    assert ddp["equal"] == [True] * world, "bit for bit"
    assert sum(ddp["shares"]) == ddp["alone"] and max(ddp["shares"]) < 0.75 * ddp["alone"]
    assert ddp["apart"] == [0.0] * world, "ranks that train apart divide nothing"


# -- work, messages and memory


@pytest.mark.parametrize("rule", RULES)
def test_each_matrix_is_decomposed_once_over_all_ranks(found: tuple[int, Any], rule: str) -> None:
    made = found[1]["work"][rule]["made"]
    each = {"Muon": 6, "SOAP": 12, "Shampoo": 12}[rule]  # both sides have a basis or a root
    assert sum(made) == each
    assert max(made) - min(made) <= each // 6, "as evenly as six matrices can be divided"


@pytest.mark.parametrize("rule", RULES)
def test_a_step_sends_each_gradient_and_each_step_once(found: tuple[int, Any], rule: str) -> None:
    """Of a matrix in pieces of one size on N ranks, the owner lacks (N - 1) / N, and keeps as much of the step."""
    world, results = found
    elements, gradient = 6 * 8 * 8, 8
    step = 4 if rule == "Muon" else 8  # Muon's products are in float32
    assert sum(results["work"][rule]["sent"]) == elements * (gradient + step) * (world - 1) // world


def test_copies_of_shards_send_to_all_copies_and_gather_from_one(four: Any) -> None:
    """An owner lacks a half of the matrix, and sends a half, a half and the other half of the step to the three others."""
    for rule, sent in four["copies"].items():
        assert sum(sent) == 8 * 8 * 4 * (0.5 + 1.5), rule


@pytest.mark.parametrize("rule", RULES)
def test_state_is_divided_over_ranks(found: tuple[int, Any], rule: str) -> None:
    world, results = found
    state = results["work"][rule]["state"]
    # Muon: the momentum; SOAP: two moments and four factors; Shampoo: two moments, two covariances and two roots
    tensors = {"Muon": 1, "SOAP": 6, "Shampoo": 6}[rule]
    assert sum(state) == 6 * tensors * 8 * 8 * 8
    assert max(state) <= sum(state) / world * (1 if rule == "Muon" else 4 / 3)


# -- failures


@pytest.mark.parametrize("rule", RULES)
def test_if_one_rank_fails_all_do(found: tuple[int, Any], rule: str) -> None:
    world, results = found
    raised = results["failures"][rule]
    told = f"RuntimeError: {rule}: the step failed on another rank"
    assert all(text.startswith(told) for text in raised["failed"][:-1]), raised["failed"]
    assert raised["failed"][-1] == "ArithmeticError: no decomposition"
    assert all("do not have gradients of the same parameters" in text for text in raised["no gradient"])
    assert raised["fine"] == [""] * world
    if rule != "Muon":
        assert all("failed on another rank" in text for text in raised["whole"][:-1]), raised["whole"]
        assert raised["whole"][-1] == "ArithmeticError: no decomposition"


# -- checkpoints


@pytest.mark.parametrize("rule", RULES)
def test_a_state_goes_on_exactly_in_its_layout_and_in_others(found: tuple[int, Any], rule: str) -> None:
    ends = found[1]["reloaded"][rule]
    assert ends.pop("same layout") == 0.0 and ends.pop("whole state") == 0.0
    assert max(ends.values()) < 1e-12, ends


def test_runs_resume_exactly_and_end_where_one_process_does(found: tuple[int, Any]) -> None:
    """Files and folders of pieces of Lightning's own strategy and of HybridParallelStrategy."""
    for name, run in found[1]["runs"].items():
        assert run["alike"], name
        assert run["again"] == [0.0] * found[0], name
        weights = torch.tensor(run["weights"], dtype=torch.float64)
        assert (weights - in_one_process(name.partition(" ")[0])).abs().max() < 1e-9, name


_ALONE: dict[str, torch.Tensor] = {}


def in_one_process(rule: str) -> torch.Tensor:
    if rule not in _ALONE:
        with tempfile.TemporaryDirectory() as directory:
            _ALONE[rule], _ = jobs.fitted(rule, Path(directory))
    return _ALONE[rule]
