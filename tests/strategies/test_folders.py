"""Folders of pieces that are written in the background hold the state of the moment, and are complete or absent."""

from pathlib import Path
from typing import Any

from tests.strategies.launch import launch

JOBS = "tests.strategies.folder_jobs"
STATEFUL: dict[str, list[str]] = {
    "fsdp2 Muon": ["Muon", "EMA", "GradientNoiseScale"],
    "fsdp2 LoRA": ["LoRA", "GradientNoiseScale"],
    "shard Muon": ["Muon", "EMA", "GradientNoiseScale"],
    "shard LoRA": ["LoRA"],
    "tp2": ["ExactResume"],
    "pp2": ["ExactResume"],
}
BOTH = ["fsdp2", "shard"]


def test_a_folder_holds_the_state_of_the_call(tmp_path: Path) -> None:
    found = launch(JOBS, "snapshots", str(tmp_path), STATEFUL, world_size=2)
    assert found == {case: [[], []] for case in STATEFUL}


def test_a_run_resumes_from_folders_written_late(tmp_path: Path) -> None:
    found = launch(JOBS, "resumed", str(tmp_path), STATEFUL, world_size=2)
    for case, ranks in found.items():
        for names in ranks:
            assert not [name for name in names if not name.endswith("milliseconds")], case


def test_model_checkpoint_keeps_the_same_folders(tmp_path: Path) -> None:
    found = launch(JOBS, "kept", str(tmp_path), BOTH, world_size=2)
    for case, result in found.items():
        now, late = result["False"], result["True"]
        for what in ("after", "best", "last", "steps"):
            assert late[what] == now[what], (case, what)
        assert not late["partial"] and not late["own"], case
        # the first folder is written when the second one is saved, and removed when that is complete
        assert all(late["seen"][2:]) and all(late["during"][1:]), f"{case}: at some time there was no checkpoint"


def test_steps_are_made_while_a_folder_is_written(tmp_path: Path) -> None:
    found = launch(JOBS, "meanwhile", str(tmp_path), BOTH, world_size=2)
    assert found == {strategy: [[[True], 2, []]] * 2 for strategy in BOTH}


def test_errors_end_the_run_and_leave_complete_folders(tmp_path: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = launch(JOBS, "failures", str(tmp_path), BOTH, world_size=2)
    for case, ranks in found.items():
        for result in ranks:
            assert result["left"] == result["alive"] == [], case
            assert "No space left on device" in result["error"] or ", step" in case, case
            if ", at once" in case:
                assert result["step"] == 3 and result["folders"] == [], case
                continue
            if ", step" in case:
                assert result["error"] == "ArithmeticError: the run failed" and result["folders"] == ["2.ckpt"], case
                continue
            assert result["error"].startswith("RuntimeError: AsyncCheckpointIO: the background thread could not"), case
            if ", remove" in case:
                assert result["folders"] == ["step=2.ckpt", "step=4.ckpt"], case
                assert result["step"] == 6, case
                continue
            left = {"rename": [], "older": ["step=2.ckpt"]}.get(case.rpartition(", ")[2], ["2.ckpt"])
            assert result["folders"] == left, case
            assert result["step"] == (5 if "next" in case else 6), case


def test_files_requeued_jobs_and_older_checkpoints(tmp_path: Path) -> None:
    found = launch(JOBS, "others", str(tmp_path), world_size=2)
    assert found["file"] == 2
    assert "No space left" in found["failing file"][0]["error"]
    for strategy in BOTH:
        assert found[f"{strategy}, requeued"] == [False, True, True, True, True, True]
        assert found[f"{strategy}, over"] == [3, False, True]
    assert found["after"] and found["flat"] == [[], []]
