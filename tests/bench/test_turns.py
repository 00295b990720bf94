"""Runs that take turns: one at a time, in order, each with random numbers of its own."""

import itertools
import threading

import pytest
import torch

from lightning_eff.bench.running.turns import in_turns


def test_one_at_a_time_and_in_order() -> None:
    seen: list[str] = []
    running: list[int] = []

    def task(name: str, count: int):
        def run(pass_on):
            for i in range(count):
                running.append(1)
                assert len(running) == 1
                seen.append(f"{name}{i}")
                running.pop()
                pass_on()
            return name

        return run

    assert in_turns([task("a", 3), task("b", 1), task("c", 2)]) == ["a", "b", "c"]
    assert seen[:3] == ["a0", "b0", "c0"] and set(seen[3:5]) == {"a1", "c1"} and seen[5:] == ["a2"]


def test_all_have_a_turn_before_anyone_has_the_next_and_neighbours_change() -> None:
    seen: list[int] = []

    def task(me: int):
        def run(pass_on):
            for _ in range(40):
                seen.append(me)
                pass_on()

        return run

    in_turns([task(i) for i in range(4)])
    rounds = [seen[i : i + 4] for i in range(0, len(seen), 4)]
    assert len(rounds) == 40 and all(sorted(one) == [0, 1, 2, 3] for one in rounds)
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert len({(a, b) for a, b in itertools.pairwise(seen)}) == 12, "all ordered pairs of neighbours occur"


def test_each_draws_as_if_it_were_alone() -> None:
    def task(pass_on):
        torch.manual_seed(7)
        drawn = []
        for _ in range(4):
            drawn.append(torch.rand(1).item())
            pass_on()
        return drawn

    torch.manual_seed(1)
    alone = in_turns([task])[0]
    before = torch.get_rng_state()
    together = in_turns([task, task, task])
    assert together == [alone] * 3 and len(set(alone)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interruption_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def first(pass_on):
        threads.append(threading.current_thread())
        while True:
            pass_on()

    joins = [0]
    join = threading.Thread.join

    def interrupted(self, timeout=None):
        joins[0] += 1
        if joins[0] == 2:
            raise KeyboardInterrupt
        join(self, 0.05)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_turns([first, first])
    for thread in threads:
        join(thread, 5)
        assert not thread.is_alive()
