"""The watch over the processes of a run: whom it takes for dead, and what it opens."""

from tests.strategies.launch import start


def test_only_the_dead_are_taken_for_dead_and_no_port_is_opened() -> None:
    codes, logs, found = start("tests.strategies.watch_jobs", "watched", "", world_size=2, timeout=300)
    assert found is not None, logs
    assert found["opened"] == 0
    assert found["held"] == [None, None], "a process that holds Python's lock lives"
    assert "W: rank 1 (process 1 on " in found["message"]
    assert "gave no sign of life for" in found["message"]
    assert codes[1] == -9
