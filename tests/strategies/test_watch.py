"""The watch over the processes of a run: whom it takes for dead, and what it opens."""

import pytest

from lightning_eff._core._run.error_text import causes
from lightning_eff.strategies._hybrid.watch import _of_messages
from tests.strategies.launch import start


def test_only_the_dead_are_taken_for_dead_and_no_port_is_opened() -> None:
    codes, logs, found = start("tests.strategies.watch_jobs", "watched", "", world_size=2, timeout=300)
    assert found is not None, logs
    assert found["opened"] == 0
    assert found["held"] == [None, None], "a process that holds Python's lock lives"
    assert "W: rank 1 (process 1 on " in found["message"]
    assert "gave no sign of life for" in found["message"]
    assert codes[1] == -9


@pytest.mark.timeout(30)
def test_errors_that_cause_each_other_are_looked_through_once() -> None:
    """So a pipeline leaves them that raises the user's own error in place of torch's report of it."""
    own, report = ValueError("bad sample"), RuntimeError("Failed to run stage 1")
    try:
        try:
            raise report from own
        except RuntimeError:
            raise own from None
    except ValueError as error:
        assert [*causes(error)] == [own, report]
        assert not _of_messages(error)
    lost = RuntimeError("Connection closed by peer")
    own.__context__ = lost
    assert _of_messages(own)
