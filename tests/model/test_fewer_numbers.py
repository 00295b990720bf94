"""The table of time against FLOPs: made of its results, honest where masks save no time, and of all techniques of its rooms."""

import argparse
from typing import Any

import pytest

import lightning_eff
from benchmarks import fewer_numbers
from lightning_eff._exports import public

ROW: dict[str, Any] = {
    "room": "sparsity",
    "on": "GPT",
    "needed": 0.4,
    "done": 1.0,
    "time": {"median": 1.0, "lower_quartile": 0.98, "upper_quartile": 1.03},
}


def made_up() -> dict[str, Any]:
    names = [name for arms in fewer_numbers.ARMS.values() for name in arms]
    settings = {"dim": 128, "layers": 3, "length": 144, "batch_size": 8, "rounds": 4}
    machine = {"device": "x86_64", "cpus": 2, "torch": "2", "load_average_before_and_after": [[1.0], [2.0]]}
    return {"techniques": dict.fromkeys(names, ROW), "settings": settings, **machine}


def test_the_page_is_made_of_the_committed_results() -> None:
    text, result = fewer_numbers.PAGE.read_text(), fewer_numbers.committed()
    assert text == fewer_numbers.page(text, result)
    if result is None:
        assert "Not measured yet." in text
        return
    assert set(result["techniques"]) == {name for arms in fewer_numbers.ARMS.values() for name in arms}
    masked = [row for row in result["techniques"].values() if row["room"] == "sparsity" and row["needed"] is not None]
    assert masked and all(0.2 < row["needed"] < 0.95 and row["done"] > 0.99 for row in masked)


def test_every_technique_of_the_rooms_has_a_row() -> None:
    rooms = {f"lightning_eff.model.{room}": arms for room, arms in fewer_numbers.ARMS.items()}
    for name, home in public.HOMES.items():
        room = home.rpartition(".")[0]
        if room in rooms and hasattr(getattr(lightning_eff, name), "saves") and name not in fewer_numbers.UNMEASURED:
            assert any(row.split(",")[0] == name for row in rooms[room]), f"{name} has no row in {room}"
    table = fewer_numbers.table(made_up())
    assert all(f"| {name} |" in table for arms in fewer_numbers.ARMS.values() for name in arms)
    assert all(f"| {name} | – | – | – | – | not measured: " in table for name in fewer_numbers.UNMEASURED)


@pytest.mark.parametrize(
    ("needed", "quartiles", "said"),
    [
        (0.3, (0.97, 1.02), "**no time saved**, though a step needs fewer FLOPs"),
        (0.3, (1.06, 1.2), "**costs time**, though a step needs fewer FLOPs"),
        (1.0, (0.97, 1.02), "**no time saved**"),
        (0.3, (0.6, 0.9), "saves time"),
        (1.0, (1.1, 1.3), "**costs time**"),
        (None, (0.97, 1.02), "**no time saved**"),
    ],
)
def test_where_there_is_no_time_saved_the_table_says_so(
    needed: float | None, quartiles: tuple[float, float], said: str
) -> None:
    time = {"median": sum(quartiles) / 2, "lower_quartile": quartiles[0], "upper_quartile": quartiles[1]}
    assert fewer_numbers.verdict({"needed": needed, "time": time}) == said


def test_masks_need_fewer_flops_and_do_as_many() -> None:
    args = argparse.Namespace(rounds=2, steps=1, warm_up=2, dim=32, layers=1, length=16, batch_size=2)
    row = fewer_numbers.compared("RigL, 80 % zero", "sparsity", args)
    assert row["done"] == 1.0
    # by token: 12 d^2 of a block's maps, V d of the head, which stays dense; attention's Q K^T and P V, and five such backward
    maps, head, attention = 6 * 12 * 32**2, 6 * 256 * 32, 14 * 16 * 32
    assert 1.0 - row["needed"] == pytest.approx(0.8 * maps / (maps + head + attention), rel=2e-3)
