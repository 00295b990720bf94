"""Random state: captured, restored, forked and keyed."""

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_eff._core import rng
from lightning_eff.strategies._hybrid.batches import same_randomness


def draw() -> tuple[Any, ...]:
    """Numbers of all global generators, of each kind whose state has parts of its own."""
    return (
        random.random(),
        random.gauss(0.0, 1.0),
        float(np.random.standard_normal()),
        np.random.rand(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(5).tolist(),
        torch.nn.functional.dropout(torch.ones(20), 0.5).tolist(),
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_restore_repeats_what_followed_capture() -> None:
    draw()  # leaves a second Gaussian waiting in Python's and NumPy's generators
    state = rng.capture()
    first, second = draw(), draw()
    assert first != second
    saved = through_a_file(state)
    rng.restore(saved)
    assert (draw(), draw()) == (first, second)
    rng.restore(state)
    assert draw() == first


def test_captured_state_is_a_handful_of_objects_and_the_form_of_before_is_restored_too() -> None:
    """Each of Python's 625 numbers as an object of its own made half of what loading a small checkpoint took."""
    state = rng.capture()
    once = draw()
    assert sum(len(x) for x in state.values() if isinstance(x, list)) < 10
    version, numbers, cached = state["python"]
    before = {**state, "python": (version, tuple(numbers.tolist()), cached)}
    draw()
    rng.restore(before)
    assert draw() == once


def test_captured_state_is_not_moved_by_what_follows() -> None:
    state, again = rng.capture(), rng.capture()
    draw()
    assert torch.equal(state["torch"], again["torch"])
    assert torch.equal(state["numpy"][1], again["numpy"][1])
    rng.restore(state)
    first = draw()
    rng.restore(again)
    assert draw() == first


@pytest.mark.parametrize("fails", [False, True])
def test_fork_leaves_no_trace(fails: bool) -> None:
    other = rng.capture()
    inside = draw()
    before = rng.capture()
    outside = draw()
    rng.restore(before)
    if fails:
        with pytest.raises(RuntimeError, match="planted"), rng.fork(other):
            draw()
            raise RuntimeError("planted")
    else:
        with rng.fork(other):
            assert draw() == inside
        with rng.fork():
            assert draw() == outside
    assert draw() == outside


def test_fork_from_a_broken_state_leaves_no_trace() -> None:
    before = rng.capture()
    outside = draw()
    rng.restore(before)
    broken = {**rng.capture(), "torch": torch.zeros(3, dtype=torch.uint8)}
    broken["python"] = random.Random(5).getstate()
    with pytest.raises((RuntimeError, TypeError)), rng.fork(broken):
        pass
    assert draw() == outside


def test_keyed_generators_depend_on_seed_and_key_alone() -> None:
    def numbers(*key: int | str) -> list[float]:
        return torch.rand(4, generator=rng.keyed_generator(*key)).tolist()  # pyright: ignore[reportArgumentType]

    first = numbers(1, "technique", 7)
    draw()
    assert numbers(1, "technique", 7) == first
    keys = [
        (1, "technique", 8),
        (2, "technique", 7),
        (1, "other", 7),
        (1, "technique", "7"),
        (1, "technique", 7, 0),
        (1,),
    ]
    drawn = [numbers(*key) for key in keys]
    assert len({tuple(d) for d in [first, *drawn]}) == len(keys) + 1
    before = rng.capture()
    expected = draw()
    rng.restore(before)
    numbers(1, "technique", 7)
    assert draw() == expected


def test_keyed_generators_do_not_change_between_versions_of_this_library() -> None:
    """A checkpoint must go on with the same draws in a later release."""
    assert rng.keyed_generator(0, "name", 3).initial_seed() == 8042769860003392496


def test_keyed_generators_are_uniform_over_steps() -> None:
    means = torch.stack([torch.rand(1, generator=rng.keyed_generator(0, "x", step)) for step in range(4000)])
    assert means.mean().item() == pytest.approx(0.5, abs=4 * (1 / 12 / 4000) ** 0.5)
    assert means.var().item() == pytest.approx(1 / 12, rel=0.05)


def test_keyed_global_generators() -> None:
    before = rng.capture()
    outside = draw()
    rng.restore(before)
    with rng.keyed(5, "a", 1):
        first = draw()
    assert draw() == outside
    torch.manual_seed(123)
    random.seed(4)
    np.random.seed(9)
    with rng.keyed(5, "a", 1):
        assert draw() == first
    with rng.keyed(5, "a", 2):
        assert draw() != first
    with pytest.raises(RuntimeError, match="planted"), rng.keyed(5, "a", 1):
        raise RuntimeError("planted")
    torch.manual_seed(123)
    expected = torch.rand(2).tolist()
    torch.manual_seed(123)
    with rng.keyed(5):
        draw()
    assert torch.rand(2).tolist() == expected


def test_states_of_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of a machine with four GPUs goes on where there are two."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: seen.append((device, int(state[0]))))
    state = rng.capture() if not torch.cuda.is_initialized() else {}
    rng.restore({**state, "cuda": [torch.tensor([i], dtype=torch.uint8) for i in range(4)]})
    assert seen == [(0, 0), (1, 1)]


class Gpus:
    """Stands in for ``torch.cuda`` in a process of one of two GPUs, each with a state of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int, first: int) -> None:
        self.states = [torch.tensor([first, i], dtype=torch.uint8) for i in range(2)]
        self.current = current
        for name, fn in {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "device_count": lambda: 2,
            "current_device": lambda: current,
            "get_rng_state_all": lambda: [state.clone() for state in self.states],
            "set_rng_state": self.put,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fn)

    def put(self, state: torch.Tensor, device: int | None = None) -> None:
        self.states[self.current if device is None else device] = state.clone()


def test_the_state_of_a_gpu_moves_to_a_process_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on resume in another layout, and among the ranks of one tensor-parallel group."""
    source = Gpus(monkeypatch, current=0, first=7)
    saved = rng.capture()
    other = Gpus(monkeypatch, current=1, first=9)
    with rng.fork(saved):
        assert torch.equal(other.states[1], source.states[0])
    assert torch.equal(other.states[1], torch.tensor([9, 1], dtype=torch.uint8))


def test_ranks_of_one_replica_draw_the_same_on_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def broadcast(state: list[Any], **kwargs: Any) -> None:
        if state[0] is None:
            state[0] = told[0]
        else:
            told[:] = state

    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    group: Any = None
    drawn = []
    with rng.fork():
        for rank in range(2):
            gpus = Gpus(monkeypatch, current=rank, first=rank)
            same_randomness(group, torch.device("cuda", rank), source=rank == 0)
            drawn.append(gpus.states[rank])
    assert torch.equal(drawn[0], drawn[1])
