"""ResIST: each block has a holder, is averaged over its holders alone, and one process is plain training."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_eff.strategies.res_ist import ResIST, deal
from tests.cases import Case, no_blocks
from tests.conftest import Once
from tests.families import module as family
from tests.models import TinyClassifier, hugging_face, loader, make_batch, trainer
from tests.runs import NUM_STEPS, differences, final_state, fit, fit_yaml
from tests.strategies.communication_launch import launch

CASES = {
    "ResIST": Case(
        active=lambda: ResIST(interval=3),
        neutral=lambda: ResIST(warmup_steps=math.inf),
        exact=True,
        figure="local_steps",
        lost=(no_blocks, "classifier", "no stack of repeated blocks"),
    )
}

pytestmark = pytest.mark.timeout(900)  # one start of processes serves all, on a busy machine too


@pytest.fixture(scope="module")
def two(once: Once) -> dict[str, Any]:
    """What two processes find, one start for all."""
    return once("res_ist", lambda: launch("rounds", "resume", "t5", "narrowing", of="res_ist_jobs"))


@pytest.mark.parametrize(
    ("count", "ranks", "least"), [(6, 2, 1), (7, 3, 1), (22, 4, 10), (3, 8, 1), (5, 5, 5), (4, 1, 1)]
)
def test_each_block_has_a_holder_and_each_rank_enough_blocks(count: int, ranks: int, least: int) -> None:
    blocks, seen = [*range(3, 3 + count)], set()
    for seed in range(20):
        held = deal(blocks, ranks, least, torch.Generator().manual_seed(seed))
        assert len(held) == ranks and set().union(*held) == set(blocks)
        sizes = [len(one) for one in held]
        assert min(sizes) >= min(least, count)
        assert max(sizes) <= max(min(least, count), math.ceil(count / ranks))
        seen.add(tuple(map(tuple, map(sorted, held))))
    assert len(seen) > 1 or ranks == 1 or least >= count


def test_a_rank_trains_its_blocks_and_no_others(two: dict[str, Any]) -> None:
    found = two["rounds"]
    assert found["wrong"] == []
    # a step in plain DDP; then rounds of three steps, of which each divides the four blocks anew
    assert [sum(held) for held in found["held"]] == [8] + [4] * 11
    assert found["met"] == [True] + [False, False, True] * 3 + [False, False]
    assert len(found["deals"]) > 1


def test_blocks_are_averaged_over_their_holders_alone(two: dict[str, Any]) -> None:
    assert two["rounds"]["meetings"] == 3
    assert two["rounds"]["error"] < 1e-6
    assert two["rounds"]["from_all"] > 1e-4, "a mean over all ranks would be the same"


def test_a_branch_counts_for_those_that_are_passed_over(two: dict[str, Any]) -> None:
    assert two["rounds"]["branch"] == pytest.approx(2.0, abs=1e-4)
    assert two["rounds"]["unscaled"] == pytest.approx(1.0, abs=1e-4)


def test_what_a_rank_receives_has_no_momenta(two: dict[str, Any]) -> None:
    found = two["rounds"]
    assert found["received"] > 0 and found["fresh"] == found["received"]
    assert found["kept"] > 0 and found["gone_on"] == found["kept"]


def test_resume_equals_uninterrupted(two: dict[str, Any]) -> None:
    found = two["resume"]
    assert found["differences"] == [{}, {}]
    assert found["alike"], "ranks end with different weights"
    assert found["sizes"] == [[0, 0]] + [[2, 2], [2, 2], [0, 2]] * 3 + [[2, 2]] * 2


def test_checkpoints_hold_the_means_over_holders(two: dict[str, Any]) -> None:
    assert two["resume"]["error"] < 1e-6 and two["resume"]["checked"] == NUM_STEPS


def test_windows_of_micro_batches_resume_too(two: dict[str, Any]) -> None:
    assert two["resume"]["windows"] == [{}, {}]


def test_blocks_that_others_need_are_held_by_all(two: dict[str, Any]) -> None:
    assert two["t5"]["finite"] and two["t5"]["alike"]
    assert two["t5"]["blocks"] == [3, 3]  # the first of five, and two of the others


def test_a_stack_of_which_nothing_can_be_passed_over_is_refused_before_the_first_step(two: dict[str, Any]) -> None:
    """And not where the first round begins, after a hundred steps."""
    assert "no block of" in two["narrowing"]["told"] and "Name another stack by layers=" in two["narrowing"]["told"]
    assert not two["narrowing"]["moved"]


def test_one_process_is_plain_training() -> None:
    plain = final_state(*fit("tiny_gpt", list))
    assert differences(plain, final_state(*fit("tiny_gpt", lambda: [ResIST(interval=2)]))) == []
    assert ResIST(warmup_steps=math.inf).neutral


@pytest.mark.parametrize("name", ["gpt2", "vit", "resnet"])
def test_unchanged_modules(name: str) -> None:
    net: Any = family(name) if name == "resnet" else hugging_face(name, 3)
    technique = ResIST(interval=1)
    data: Any = [make_batch("gpt2" if name == "gpt2" else "vit")] * 3
    trainer(technique, max_steps=3).fit(net, torch.utils.data.DataLoader(data, batch_size=None))
    assert technique.report()["local_steps"] == 2 and technique.report()["blocks"] >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": 0}, r"ResIST\(interval=0\): expected an integer >= 1: the number of steps"),
        ({"warmup_steps": 0}, "warmup_steps=0.: expected an integer >= 1 or inf"),
        ({"least": 0}, "least=0.: expected an integer >= 1: the minimum number of blocks"),
        ({"scaled": 2}, "scaled=2.: expected True or False"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResIST(**arguments)


def test_one_block_at_all_places_is_refused() -> None:
    net = TinyClassifier()
    block = net.blocks[0]
    net.blocks = nn.Sequential(block, block, block)
    with pytest.raises(ValueError, match=r"ResIST: .*holds the same block several times"):
        trainer(ResIST(), max_steps=1).fit(net, loader("classifier"))


def test_a_yaml_trains(tmp_path: Path) -> None:
    arguments = {"interval": 2, "warmup_steps": 1, "layers": "blocks"}
    fit_yaml(tmp_path, "ResIST", arguments, model="TinyGPT", data="Sequences", max_steps=4)
