"""benchmarks.mup_transfer: the page is made of the committed results, and the best learning rate stays with MuP alone."""

import json
import math

from benchmarks import mup_transfer


def test_the_page_is_made_of_the_committed_results() -> None:
    result = json.loads(mup_transfer.RESULTS.read_text())
    text = mup_transfer.PAGE.read_text()
    assert text == mup_transfer.page(text, result)
    assert set(result["losses"]) == set(mup_transfer.ARMS)
    assert result["best"] == {arm: mup_transfer.best(row) for arm, row in result["losses"].items()}


def test_the_best_learning_rate_moves_far_less_with_mup() -> None:
    best = json.loads(mup_transfer.RESULTS.read_text())["best"]
    moved = {arm: abs(math.log2(best[arm] / best["narrow"])) for arm in ("wide", "wide, MuP")}
    assert moved["wide, MuP"] <= 1 + 1e-9
    assert moved["wide"] >= 3 - 1e-9
