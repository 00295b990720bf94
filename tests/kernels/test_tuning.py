"""The choice among configurations: timed once per kind of call, and the first one where nothing can be timed."""

from typing import Any

import pytest
import torch

from lightning_eff.kernels import _tuning

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TIMES = {"a": 3.0, "b": 1.0, "c": float("inf")}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is timed, with times from a table, as on a GPU."""
    found: list[str] = []

    def milliseconds(run: Any, configuration: str) -> float:
        run(configuration)
        found.append(configuration)
        return TIMES[configuration]

    monkeypatch.setattr(_tuning, "_milliseconds", milliseconds)
    monkeypatch.setattr(_tuning, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_the_fastest_is_timed_once_for_each_key(timed: list[str]) -> None:
    ran: list[str] = []
    for _ in range(3):
        assert _tuning.choose(("kernel", 8), ("a", "b", "c"), ran.append, CUDA) == "b"
    assert timed == ran == ["a", "b", "c"]
    assert _tuning.choose(("kernel", 16), ("a", "c"), ran.append, CUDA) == "a"
    assert timed == ["a", "b", "c", "a", "c"]


def test_the_first_one_where_nothing_is_timed(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(configuration: str) -> None:
        raise AssertionError(configuration)

    assert _tuning.choose("key", ("a", "b"), never, CPU) == "a"
    assert _tuning.choose("key", ("a",), never, CUDA) == "a"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _tuning.choose("key", ("a", "b"), never, CUDA) == "a"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert _tuning.choose("key", ("a", "b"), lambda c: None, CUDA) == "b", "a recorded graph leaves no choice behind"


def test_sizes_of_one_step_share_a_choice() -> None:
    assert [_tuning.step_of(n) for n in (0, 1, 2, 3, 4, 5, 1000, 1024, 1025)] == [1, 1, 2, 4, 4, 8, 1024, 1024, 2048]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_configuration_that_does_not_fit_is_left_out() -> None:
    from triton.runtime.errors import OutOfResources

    def run(configuration: str) -> None:
        if configuration == "large":
            raise OutOfResources(10**6, 10**5, "shared memory")
        torch.ones(8, device="cuda").sum()

    assert _tuning.choose("test", ("large", "small"), run, CUDA) == "small"
