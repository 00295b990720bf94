"""benchmarks/precision.py runs: tiny, on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import precision


def test_the_tiny_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precision.main(["--tiny", "--out", str(tmp_path / "precision.json")])
    text = (tmp_path / "precision.json").read_text()
    found = json.loads(text)
    machine = found["machine"]
    assert machine["tiny"] and {"gpu", "driver", "cuda", "torch", "lightning", "torchao"} <= machine.keys()
    assert found["bf16_tflops_ceiling"] > 0 and found["copy_gigabytes_per_second"] > 0
    assert {row["arm"] for row in found["casts"]} == {"tensorwise", "rowwise", "blockwise"}
    assert {row["case"] for row in found["cases"]} == {"linear d=32", "block d=32", "tiny gpt2", "tiny llama"}
    against_bf16 = {row["arm"] for row in found["cases"] if row["baseline"] == "bf16"}
    assert {"bf16", "tensorwise", "tensorwise delayed", "rowwise", "blockwise"} <= against_bf16
    for row in found["cases"]:
        assert row["speedup"]["rounds"] == 2 and row["speedup"]["min"] <= row["speedup"]["max"]
        assert row["ms"]["median"] > 0 and row["tflops"] > 0 and row["tokens_per_second"] > 0
    assert str(Path.home()) not in text and str(Path.cwd()) not in text
    assert "x" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        precision.main([])
    assert "Add --tiny" in capsys.readouterr().err
