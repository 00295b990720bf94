"""Other targets and fewer tokens in two processes."""

from tests import processes


def test_two_processes() -> None:
    """Both ways at once resume bit for bit, ranks end alike and choose tokens of their own; one's error is all's."""
    result = processes.launch("tests.core.ways_jobs")
    assert result["alike"]
    first, second = result["ranks"]
    for rank in (first, second):
        assert rank["differences"] == [] and rank["acts"]
    assert len(first["chosen"]) == len(second["chosen"]) > 0 and first["chosen"] != second["chosen"]
    assert first["refused"].startswith("On rank 1: OtherTargets: ") and "gather" in first["refused"]
    assert second["refused"].startswith("OtherTargets: ")


def test_an_error_of_one_rank_in_a_later_batch_ends_the_other_rank_too() -> None:
    """It waits for gradients that never come until its neighbour's process has ended; nothing of ours keeps either."""
    codes, logs, _ = processes.start("tests.core.ways_jobs", "later", world_size=2, timeout=240)
    assert all(isinstance(code, int) and code != 0 for code in codes), f"{codes}\n{logs[0][-2000:]}\n{logs[1][-2000:]}"
    assert "its output depends on token positions" in logs[1]
