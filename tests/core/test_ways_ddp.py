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
