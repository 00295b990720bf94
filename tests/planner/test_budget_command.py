"""``lightning-eff budget``: the law against a search by hand and Chinchilla itself, and what is said of bad options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_eff import cli
from lightning_eff.budget.compute_optimal import PUBLISHED, REFIT
from tests.planner.test_command import elsewhere, recipe  # noqa: F401

CHINCHILLA = 5.76e23


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    cli.main(["budget", *options, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fit", [REFIT, PUBLISHED])
@pytest.mark.parametrize("flops", [1e18, CHINCHILLA])
def test_the_best_size_is_the_lowest_of_a_search(fit: Any, flops: float) -> None:
    sizes = torch.logspace(6, 14, 200_001, dtype=torch.float64)
    tokens = flops / 6 / sizes
    losses = fit.E + fit.A / sizes**fit.alpha + fit.B / tokens**fit.beta
    size, best = fit.best(flops)
    assert size == pytest.approx(float(sizes[losses.argmin()]), rel=1e-3)
    assert 6 * size * best == pytest.approx(flops) and fit.loss(size, best) == pytest.approx(float(losses.min()))


def test_the_refit_is_chinchillas_own_model_and_the_printed_constants_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """T: 72B parameters and 18 tokens for each at Chinchilla's budget; 32B and 93 as printed."""
    best = asked(capsys, "--flops", f"{CHINCHILLA}")["best"]
    assert best["refit"]["parameters"] == pytest.approx(72e9, rel=0.03)
    assert best["refit"]["tokens_per_parameter"] == pytest.approx(18, rel=0.06)
    assert best["published"]["parameters"] == pytest.approx(32e9, rel=0.03)
    assert best["published"]["tokens_per_parameter"] == pytest.approx(93, rel=0.03)
    cli.main(["budget", "--flops", "5.76e23"])
    assert "contradict the paper's own 70B model" in capsys.readouterr().out


def test_hours_and_money_are_flops_at_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    by_hours = asked(capsys, "--hours", "100", "--flops-per-second", "4e14")
    assert by_hours["flops"] == pytest.approx(100 * 3600 * 4e14)
    by_money = asked(capsys, "--money", "250", "--price-per-hour", "2.5", "--gpu", "H100")
    assert by_money["hours"] == pytest.approx(100) and by_money["flops"] == pytest.approx(100 * 3600 * 0.4 * 989e12)
    assert "40% of the BF16 peak of h100" in by_money["speed_source"]
    found = asked(capsys, "--flops", "1e21", "--gpu", "h100", "--mfu", "0.5")
    assert found["hours"] == pytest.approx(1e21 / (0.5 * 989e12) / 3600)


def test_a_module_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = recipe(tmp_path, accelerator="cpu", devices=1, num_nodes=1, precision="32-true", accumulate_grad_batches=2)
    found = asked(capsys, "--hours", "1", "--config", config)
    module, dim, length = found["module"], 64, 32
    # 4 blocks of 12 dim^2, and the head over 256 bytes; attention's products beside them
    linear = 6 * (4 * 12 * dim * dim + 256 * dim)
    assert linear < module["flops_per_token"] < linear + 4 * 4 * 14 * length * dim
    assert found["flops"] == pytest.approx(3600 * module["flops_per_second"])
    assert found["speed_source"].startswith("measured") and module["tokens_per_step"] == 2 * 4 * length
    assert module["tokens"] == pytest.approx(found["flops"] / module["flops_per_token"])
    assert module["loss_above_best"] >= 0
    cli.main(["budget", "--flops", "1e15", "--config", config])
    out = capsys.readouterr().out
    assert "What this run cost" not in out and "GPT has " in out and "tokens/s on one device)" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "got no budget; expected exactly one of --flops"),
        (["--flops", "1e20", "--hours", "3"], "got --flops and --hours; expected exactly one of"),
        (["--hours", "3"], "the speed of the accelerator is unknown. Add --gpu NAME"),
        (["--money", "3", "--gpu", "h100"], "--money needs --price-per-hour"),
        (["--flops", "-1"], "--flops -1: expected FLOPs, a finite number above 0"),
        (["--flops", "nan"], "--flops nan: expected FLOPs"),
        (["--flops", "many"], "argument --flops: invalid float value: 'many'"),
        (["--hours", "1", "--gpu", "h10"], "Did you mean h100"),
        (["--hours", "1", "--gpu", "h100", "--mfu", "40"], "expected a fraction of the peak in"),
        (["--flops", "1", "--mfu", "0.4"], "Add --gpu"),
        (["--hours", "1", "--gpu", "h100", "--flops-per-second", "1e12"], "which both set the accelerator's speed"),
        (["--flop", "1e20"], "Did you mean '--flops'"),
        (["--flops", "1e20", "--config", "recpe.yaml"], "no such file"),
    ],
)
def test_bad_options_are_told_in_words(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["budget", *options])
    err = capsys.readouterr().err
    assert raised.value.code == 2 and err.startswith("lightning-eff budget: ") and message in err
    assert "Traceback" not in err


def test_a_command_that_is_nearly_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["buget"])
    assert "Did you mean 'budget'" in capsys.readouterr().err


def test_a_module_without_tokens_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "classes.yaml"
    path.write_text("model: {class_path: tests.models.TinyClassifier}\ndata: {class_path: tests.cli_data.Classes}\n")
    with pytest.raises(SystemExit):
        cli.main(["budget", "--flops", "1e15", "--config", str(path)])
    assert "has no tokens, so the law for language models" in capsys.readouterr().err
