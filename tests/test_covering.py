"""The covering design: every allowed pair stands in it, it grows slowly, and it finds two that break each other."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_eff._core.session import Session
from lightning_eff._core.technique import Technique
from tests.cases import CASES, Case
from tests.covering import Pair, Stack, design, gathered, pairs, smallest, watched
from tests.runs import resume_from_batches, resume_from_every_step
from tests.stacks import MODEL, Stacks, declared, verify


def families(size: int, *rivals: int) -> tuple[list[str], set[Pair]]:
    """``size`` names, of which the first so many, then the next so many, ..., each refuse their like."""
    names, refused, at = [f"t{i:03}" for i in range(size)], set[Pair](), 0
    for count in rivals:
        refused |= pairs(names[at : at + count])
        at += count
    return names, refused


# How many stacks: none fewer than the two largest families multiplied, of which each two stand together once.
GROWTH = [
    ("as now: 6 plugins, 3 pairs of rivals", families(19, 6, 2, 2, 2), 12, 13),
    ("23 names", families(23, 6, 2, 2, 2), 12, 13),
    ("50 names", families(50, 6, 4, 3, 3, 2, 2), 24, 26),
    ("100 names", families(100, 8, 6, 5, 4, 4, 3, 3, 2, 2), 48, 52),
    ("100 names, two families of ten", families(100, 10, 10, 5, 5, 4, 4, 3, 3), 100, 105),
    ("100 names, nobody refused", families(100), 1, 1),
]


@pytest.mark.parametrize(
    ("names", "refused", "least", "most"), [row[1] + row[2:] for row in GROWTH], ids=[r[0] for r in GROWTH]
)
def test_every_allowed_pair_stands_together_in_few_stacks(
    names: list[str], refused: set[Pair], least: int, most: int
) -> None:
    stacks = design(names, refused)
    assert set().union(*map(pairs, stacks)) == pairs(names) - refused
    assert least <= len(stacks) <= most
    assert stacks == design(names[::-1], set(refused)), "another order, another design"


@pytest.mark.parametrize(("names", "refused"), [row[1] for row in GROWTH], ids=[row[0] for row in GROWTH])
def test_each_name_is_looked_at_beside_all_its_partners(names: list[str], refused: set[Pair]) -> None:
    stacks = design(names, refused)
    looked_at = watched(stacks, names)
    for name in names:
        beside = {other for seen in looked_at for other in seen.get(name, ())}
        assert {frozenset((name, other)) for other in beside - {name}} == {
            pair for pair in pairs(names) - refused if name in pair
        }
    assert sum(map(len, looked_at)) <= 11 * len(names), "about as often as the largest family has members"


@pytest.mark.parametrize(("names", "refused"), [row[1] for row in GROWTH], ids=[row[0] for row in GROWTH])
def test_groups_hold_each_name_once_and_no_two_that_refuse_each_other(names: list[str], refused: set[Pair]) -> None:
    groups = gathered(names, refused)
    assert sorted(name for group in groups for name in group) == names
    assert not any(pairs(group) & refused for group in groups)
    enemies = [sum(name in pair for pair in refused) for name in names]
    assert len(groups) == max(enemies) + 1, "as many as the largest family has members"


def test_the_pairs_of_one_name_take_as_many_stacks_as_its_largest_rivals() -> None:
    names, refused = families(100, 8, 6, 5, 4, 4, 3, 3, 2, 2)
    wanted = {pair for pair in pairs(names) if names[-1] in pair}
    stacks = design(names, refused, wanted)
    assert len(stacks) == 8 and all(names[-1] in stack for stack in stacks)
    assert wanted <= set().union(*map(pairs, stacks))
    assert sum(map(len, watched(stacks, names, wanted))) <= 8 + 99


def test_a_name_that_all_refuse_stands_alone() -> None:
    refused = {frozenset(("a", "b")), frozenset(("a", "c"))}
    assert design("abc", refused) == [("b", "c"), ("a",)]
    assert watched(design("abc", refused), "abc") == [{"b": ("c",), "c": ("b",)}, {"a": ()}]


@pytest.mark.parametrize("culprits", [*combinations("adgj", 1), *combinations("adgj", 2), tuple("adg"), tuple("adgj")])
def test_the_smallest_failing_part_is_found(culprits: Stack) -> None:
    asked: list[Stack] = []

    def fails(names: Stack) -> bool:
        asked.append(names)
        return set(culprits) <= set(names)

    assert smallest("abcdefghij", fails) == culprits
    assert len(asked) == len(set(asked)) <= 60


def test_what_is_not_found_within_the_time_is_not_looked_for() -> None:
    assert smallest("abcdefghij", lambda some: "b" in some, seconds=0.0) == (*"abcdefghij",)


# -- two techniques that break each other in silence


class Planted(Technique):
    """Says that it acted, whether it did or not."""

    saves = paper = "planted"

    def report(self) -> dict[str, Any]:
        return {"acted": 1}


class Larger(Planted):
    """Makes the loss's gradients twice as large, so that windows of any length have twice the sum."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        loss.register_hook(lambda gradient: 2 * gradient)


class Signs(Planted):
    """Leaves of each gradient its sign, so that nothing is left of what makes it larger."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad.sign_()


class Growing(Planted):
    """Multiplies gradients by a number that grows with the batches, which it counts."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, session: Session) -> None:
        self.count = 0

    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self.count += 1

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        super().on_after_backward(trainer, pl_module)
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad *= 1 + 0.1 * self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Forgetting(Planted):
    """Halves one gradient, and takes out of a checkpoint what another technique is to find there."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.head.weight.grad *= 0.5

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["callbacks"].pop("Growing", None)


class Refusing(Planted):
    """Trains with all but one, of which it declares nothing."""

    def check(self, session: Session) -> None:
        if any(type(other).__name__ == "Growing" for other in session.techniques):
            raise ValueError("Refusing: does not go with Growing.")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.head.weight.grad *= 0.5


class Idle(Planted):
    """Does nothing beside another, and says so."""

    def report(self) -> dict[str, Any]:
        return {"acted": int(not any(type(other).__name__ == "Signs" for other in self.session.techniques))}


class Counting(Growing):
    """Halves the gradients of every fifth batch that it counts, and a checkpoint does not hold the count."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.count % 5 == 4:
            for p in pl_module.parameters():
                p.grad *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_a_state_that_no_checkpoint_holds_is_found_by_few_runs(tmp_path: Path) -> None:
    """And told are the checkpoints from which a run alone ends otherwise, as where each is resumed to the end."""
    few, each = (
        resume_from_every_step("classifier", lambda: [Counting()], tmp_path / str(each), each=each)
        for each in (False, True)
    )
    assert few.keys() == each.keys() and {"step=1", "step=9"} <= few.keys() and "step=5" not in few
    found = resume_from_batches("classifier", lambda: [Counting()], tmp_path / "batches", (2, 4, 9))
    assert found.keys() == {"batch=2", "batch=4", "batch=9"}


PLANTED = {
    "undone": (Larger, Signs, "Larger changes nothing: without it, every step and the end are the same"),
    "resumed": (Forgetting, Growing, "resumed from step 7, ends otherwise than undisturbed: optimizer0/"),
    "idle": (Idle, Signs, "lets Idle do nothing: acted is zero after every step"),
    "refused": (
        Growing,
        Refusing,
        "is refused or fails, and no conflict is declared: ValueError: Refusing: does not go",
    ),
}


#: that train beside what is planted: few and quick ones, however many there come to be
BYSTANDERS = (
    "ExponentialMovingAverage",
    "LearningRateSchedule",
    "NgramEmbedding",
    "ProgressiveLayerDropping",
    "ProgressiveStacking",
    "ReplaceOptimizer",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
)


def _steps_as_it_is(case: Case) -> bool:
    """Whether a technique leaves alone the hooks in which what is planted acts: there, the callbacks' order is theirs."""
    own = type(case.active())
    return all(
        getattr(own, name) is getattr(Technique, name) for name in ("on_before_optimizer_step", "on_after_backward")
    )


@pytest.mark.parametrize("kind", sorted(PLANTED))
def test_two_that_break_each_other_are_found_and_named(kind: str, tmp_path: Path) -> None:
    """Each trains and resumes alone; together, somewhere in a stack of eight, one of them does not."""
    first, second, told = PLANTED[kind]
    planted = {
        cls.__name__: Case(active=cls, neutral=cls, exact=cls is Idle, figure="acted") for cls in (first, second)
    }
    for name in planted:
        verify(Stacks(planted, {}, tmp_path / name), (name,), {} if planted[name].exact else {name: ()})
    cases = {name: CASES[name] for name in BYSTANDERS}
    assert all(_steps_as_it_is(case) and case.model == MODEL for case in cases.values())
    assert not any(case.exact or case.lossy for case in cases.values())
    cases |= planted
    names = [*cases]
    stacks = design(names, set(declared(cases, {})))
    seen = watched(stacks, [name for name in names if not cases[name].exact])
    both = [i for i, stack in enumerate(stacks) if planted.keys() <= set(stack) and seen[i]]
    assert len(stacks[both[0]]) >= 8
    message = rf"^{first.__name__} \+ {second.__name__} .*{told}"
    with pytest.raises(AssertionError, match=message):
        for i in both:
            verify(Stacks(cases, {}, tmp_path / str(i)), stacks[i], seen[i])
