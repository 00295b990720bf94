"""Pipelines equal a single process that runs the same micro-batches, and refuse what they would compute wrongly."""

from itertools import product
from typing import Any

import pytest

from tests.conftest import Once
from tests.runs import largest
from tests.selection import share_of
from tests.strategies import pipeline_zoo as zoo
from tests.strategies.pipeline_around import CASES
from tests.strategies.pipeline_cases import EXACT, REFUSED
from tests.strategies.pipeline_compare import SCHEDULES
from tests.strategies.pipeline_jobs import launch

# of losses near 4 and of gradients near 1; the figures are 5e-7 and 1.1e-6 at most
LOSS, GRAD = 2e-6, 2e-6
FAILING = "fails_in_the_middle"
MODELS = ("gpt_untied", "gpt_tied", "gpt2", "llama", "bert", "vit")
HALF = {name for pair in product(MODELS, SCHEDULES) if share_of(2, name := "_".join(pair)) == 0}
OTHER_HALF = ["_".join(pair) for pair in product(MODELS, SCHEDULES) if "_".join(pair) not in HALF]
APART = ("wide", "slow", "experts")
TWO = [name for name in CASES if not name.startswith(APART) and name not in (FAILING, *OTHER_HALF)]
EXPERTS = [name for name in CASES if name.startswith("experts")]
WIDE = [name for name in CASES if name.startswith("wide")]
SLOW = [name for name in CASES if name.startswith("slow")]

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(once: Once) -> Results:
    """What the cases returned on each of two pipeline ranks."""
    return once("pipeline_two", lambda: launch(2, TWO))


@pytest.fixture(scope="module")
def four(once: Once) -> Results:
    return once("pipeline_four", lambda: launch(4, WIDE))


@pytest.fixture(scope="module")
def more(once: Once) -> Results:
    return once("pipeline_more", lambda: launch(2, SLOW))


@pytest.fixture(scope="module")
def experts(once: Once) -> Results:
    return once("pipeline_experts", lambda: launch(2, EXPERTS))


@pytest.fixture(scope="module")
def other_half(once: Once) -> Results:
    return once("pipeline_other_half", lambda: launch(2, OTHER_HALF))


def results(everyone: Results, name: str) -> list[Any]:
    """A case's result on each rank."""
    found = [rank[name] for rank in everyone]
    for rank, result in enumerate(found):
        if isinstance(result, dict) and "error" in result:
            pytest.fail(f"rank {rank}: {result['error']}")
    return found


def result(everyone: Results, name: str) -> Any:
    """A case's result, the same on every rank."""
    found = results(everyone, name)
    assert all(other == found[0] for other in found)
    return found[0]


def close(differences: dict[str, float]) -> None:
    assert differences["loss"] <= LOSS and differences["grad"] <= GRAD, differences
    assert differences.get("buffers", 0) <= 1e-6, differences


@pytest.mark.parametrize("name", sorted(HALF))
def test_schedules_compute_what_one_process_does(two: Results, name: str) -> None:
    close(result(two, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_HALF)
def test_the_other_schedules_compute_what_one_process_does(other_half: Results, name: str) -> None:
    close(result(other_half, name))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("dropout_")])
def test_dropout_is_exact(two: Results, name: str) -> None:
    close(result(two, name))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("exact_")])
def test_hazards_that_work(two: Results, name: str) -> None:
    close(result(two, name))


def test_a_stack_may_be_two_lists_that_are_named(two: Results) -> None:
    close(result(two, "halves"))


def test_the_stack_is_the_longest_list_whose_blocks_feed_one_another(two: Results) -> None:
    close(result(two, "longer_heads"))


def test_a_value_that_a_stage_let_go_of_is_not_read_in_silence(two: Results) -> None:
    assert result(two, "used_too_late") == [True, False]


def test_norms_over_micro_batches_are_named_at_setup(two: Results) -> None:
    assert results(two, "normalised_apart")[0]


def test_every_hazard_is_looked_at() -> None:
    assert len([name for name in CASES if name.startswith("exact_")]) == 2 * len(EXACT)
    assert len([name for name in CASES if name.startswith("refused_")]) == len(REFUSED) + 1


SAYS = {
    "Skips": ("'blocks.0.", "skip", "layers="),
    "Summed": ("'blocks.0.", "sum over all hidden states"),
    "Quiet": ("the loss in stage 1", "depends on more results of earlier blocks"),
    "SideOutputs": ("block 1 of 'blocks' is not fed by block 0", "pipeline_parallel_size=1"),
    "Regularised": ("'blocks.0.", "self.parameters()"),
    "Noted": ("the loss of the first micro-batch would be", "uncut it is"),
    "Twice": ("block 0 of 'blocks' was called where block 4",),
    "Dropping": ("block 2 of 'blocks' was called where block 1", "layer drop"),
    "TwoOutputs": ("the loss in stage 1", "tensors at [1], which are not sent"),
    "Manual": ("automatic_optimization=False", "pipeline_parallel_size=1"),
    "OwnBackward": ("overrides backward",),
    "Reentrant": ("without gradients", "use_reentrant=False"),
    "Nothing": ("training_step returned NoneType", "expected the loss"),
    "Infinite": ("a loss of nan", "finite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hazards_that_are_refused_at_setup(two: Results, name: str) -> None:
    for message in results(two, f"refused_{name}"):
        assert message.startswith("HybridParallelStrategy")
        for words in SAYS[name]:
            assert words in message


def test_models_whose_blocks_give_more_than_the_hidden_state_are_refused(two: Results) -> None:
    assert "relative_attention_bias" in result(two, "biased") and "tensors at [1, 2]" in result(two, "biased")


def test_a_hazard_is_found_at_the_first_step_without_a_check_at_setup(two: Results) -> None:
    for message in results(two, "never_verified_skips"):
        assert "depends on more results of earlier blocks" in message


def test_a_batch_that_does_not_divide(two: Results) -> None:
    message = result(two, "odd_batch")
    assert "10 samples for 4 micro-batches: 10 / 4 = 2.50" in message
    assert "[2, 5, 10]" in message and "drop_last=True" in message


def test_the_number_of_micro_batches_follows_the_batch(two: Results) -> None:
    assert result(two, "number_left_to_the_batch") == [4, 3, 5, 1]


def test_batches_of_other_shapes(two: Results) -> None:
    found = result(two, "shapes_that_change")
    close(found)
    assert largest([found["before"], found["last 0"], found["last 1"]]) <= LOSS


def test_ranks_with_other_batches(two: Results) -> None:
    content, shapes = result(two, "other_batches_on_other_ranks")
    assert "different content" in content and "different shapes" in shapes and "seed_everything" in content


@pytest.mark.parametrize("name", ["containers", "batch_encoding", "scaled"])
def test_batches_and_scale(two: Results, name: str) -> None:
    close(result(two, name))


@pytest.mark.parametrize(
    "name",
    [
        "never_verified",
        "frozen",
        "checkpointed_by_hugging_face",
        "reentrant_inside",
        "compiled",
        "autocast",
        "accumulated",
    ],
)
def test_what_works_in_several_ways(two: Results, name: str) -> None:
    for differences in result(two, name).values():
        close(differences)


def test_the_order_of_operations_is_that_of_the_runs(two: Results) -> None:
    for found in results(two, "order_as_it_runs"):
        assert found == dict.fromkeys(SCHEDULES, True)


def test_a_rank_holds_its_share(two: Results) -> None:
    for found in results(two, "memory_by_blocks"):
        assert abs(found["share"] - 1) < 0.05 and abs(found["bytes"] - 1) < 0.05
        assert found["names"] and found["freed"] == 64 // 2 * 4  # weights and biases of two layers in each block


def test_tied_and_unused_parameters_are_let_go_of(two: Results) -> None:
    """Of a GPT with an untied head the first stage holds no head, the last no embeddings."""
    first, last = results(two, "what_is_held")
    assert "head.weight" not in first and "norm.weight" not in first and "embed.weight" in first
    assert "embed.weight" not in last and "position.weight" not in last and "head.weight" in last


def test_every_key_is_saved_once(two: Results) -> None:
    assert all(found == [True, True] for found in results(two, "state_dict_is_shared_out"))


def test_logs_are_the_same_on_every_rank(two: Results) -> None:
    for found in result(two, "logged").values():
        values = {name: (value, options) for name, value, options in found["values"]}
        assert list(values) == ["size", "largest", "loss", "double", "one", "accuracy", "seen"]
        assert values["size"] == (8.0, {"reduce_fx": "sum", "batch_size": 8})  # a sum over micro-batches of 2
        assert values["largest"][0] == pytest.approx(found["largest"], abs=1e-5)
        assert values["loss"][0] == pytest.approx(found["loss"], abs=1e-5)
        assert values["loss"][1] == {"prog_bar": True}
        assert values["double"][0] == pytest.approx(2 * found["loss"], abs=1e-5)
        assert values["one"][0] == 1.0
        assert values["accuracy"][0] == pytest.approx(found["accuracy"], abs=1e-6)
        assert values["seen"][0] == found["counts"] == 16  # two batches of 8, each sample counted once


def test_evaluation_is_the_same_on_every_rank(two: Results) -> None:
    found = result(two, "evaluated")
    assert found["logits"] <= 1e-6 and found["val_loss"] <= 1e-6
    assert found["rest"] == [["a", "b"], 3, [3, 4]]


def test_a_check_leaves_no_trace(two: Results) -> None:
    assert result(two, "untouched_by_verify") == [True] * 5


def test_random_numbers(two: Results) -> None:
    left, differs, resumed = result(two, "random_numbers_outside_are_left")
    assert left and differs and resumed <= LOSS


def test_a_block_of_another_rank_says_so(two: Results) -> None:
    assert all("another pipeline rank" in message for message in results(two, "refused_outside_steps"))


@pytest.mark.parametrize("name", WIDE)
def test_four_ranks(four: Results, name: str) -> None:
    close(result(four, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_models(more: Results, name: str) -> None:
    close(result(more, name))


ZOO = [name for name in CASES if name.startswith("zoo_")]


@pytest.mark.parametrize("name", [name for name in ZOO if not name.startswith("zoo_refused")])
def test_ordinary_modules_train_as_one_process_on_whole_batches(two: Results, name: str) -> None:
    """Twelve steps of AdamW in float64; the first batch has no padding, later ones have."""
    found = result(two, name)
    rounded = name in ("zoo_GPT-2", "zoo_Mixtral")  # their losses are in float32 whatever the weights are in
    assert found["loss"] <= (2e-6 if rounded else 1e-10), found
    assert found["weights"] <= (1e-7 if rounded else 1e-9), found
    assert found["learnt"] < -1e-2, "nothing was learnt, so nothing was compared"


@pytest.mark.parametrize("name", [name for name in ZOO if name.startswith("zoo_refused")])
def test_ordinary_modules_that_a_pipeline_would_train_wrongly_are_refused(two: Results, name: str) -> None:
    for message in results(two, name):
        assert message.startswith("HybridParallelStrategy") and "pipeline_parallel_size=1" in message
        kind = name.removeprefix("zoo_refused_")
        if kind in zoo.NO_RULE:
            assert "It is not their mean" in message and "microbatch_weight=f" in message
        elif kind in zoo.MOVING:
            what = {"Averaged": "'average'", "Counting": "'_count'", "Teacher": "'teacher.weight'"}[kind]
            assert f"training_step changes {what}" in message and "on_train_batch_end" in message
        elif kind == "NormedResidual":
            assert "depends on more results of earlier blocks" in message
        else:
            assert "leave tensors with gradients" in message


def test_a_step_of_evaluation_is_looked_at_by_itself(two: Results) -> None:
    for found in results(two, "evaluated_otherwise"):
        assert largest(found.values()) <= 1e-12


def test_given_weights_are_taken(two: Results) -> None:
    for found in result(two, "given_weights").values():
        assert found["loss"] <= 1e-12 and found["grad"] <= 1e-12


def test_a_failure_has_its_own_message() -> None:
    """A rank that raises in the middle of a schedule raises the user's own error, and the others end with it."""
    with pytest.raises(AssertionError) as error:
        launch(2, [FAILING], timeout=120)
    printed = str(error.value)
    assert "ZeroDivisionError: in block 3" in printed and "timeout" not in printed.split("---")[0]


@pytest.mark.parametrize("name", [name for name in EXPERTS if name not in ("experts_said", "experts_evaluated")])
def test_routers_losses_train_as_in_a_loop_over_micro_batches(experts: Results, name: str) -> None:
    """In float64: balance losses that blocks of other stages return, keep, append to a list, or give to transformers."""
    found = result(experts, name)
    if name == "experts_padded":  # Mixtral's cross-entropy is in float32
        close(found)
    else:
        assert found["loss"] <= 1e-12 and found["grad"] <= 1e-14, found


def test_routers_losses_are_those_of_one_process_in_evaluation(experts: Results) -> None:
    assert largest(result(experts, "experts_evaluated").values()) <= 1e-12


def test_losses_of_micro_batches_that_are_not_the_batchs_are_named(experts: Results) -> None:
    balance, mean = results(experts, "experts_said")[0]
    assert (
        len(balance) == 1 and "what blocks leave in router_losses" in balance[0] and "num_microbatches=1" in balance[0]
    )
    assert mean == []  # a mean over tokens is that of the whole batch
