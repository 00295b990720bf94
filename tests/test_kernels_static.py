"""The static analysis of kernels: access widths, loops, the model's numbers, and its committed results."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import kernels_static as static
from benchmarks.kernels_static_code import contiguous, counted, launches, width
from lightning_eff.kernels import _launch

SASS = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0010*/                   LDG.E.U8 R8, desc[UR4][R6.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   CALL.REL.NOINC `($slow) ;
.L_x_1:
        /*0050*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0060*/                   EXIT ;
        /*0070*/                   MUFU.RCP R1, R2 ;
"""


def test_instructions_are_counted_by_trips_and_without_slow_paths() -> None:
    ops, waits = counted(SASS, 5.0, 3)
    assert ops == Counter({"LDG.E.U8": 5, "BRA": 6, "LDG.E.128": 1, "CALL.REL.NOINC": 1, "STG.E.U16": 1, "EXIT": 1})
    assert waits == 5
    assert counted(SASS.replace("LDG.E.U8", "LDGSTS.E.128"), 5.0, 3)[1] == 2.5
    assert [width(op) for op in ("LDG.E.128", "LDG.E.U8", "STG.E.U16", "LDG.E", "STG.E.64")] == [128, 8, 16, 32, 64]


def test_contiguous_bits_come_from_layouts() -> None:
    text = """#blocked = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [8, 4], order = [1, 0]}>
#linear = #ttg.linear<{register = [[0, 1], [0, 2], [4, 0]], lane = [[0, 4]], warp = []}>
    %1 = tt.load %0 : tensor<16x32x!tt.ptr<bf16>, #blocked>
    tt.store %2, %3 : tensor<16x32x!tt.ptr<i8>, #linear>
"""
    assert contiguous(text) == {("load", 16): 128, ("store", 8): 32}


COMPILE = """
import json
import torch
from torch import Tensor
from benchmarks.kernels_static_code import compile_launch, launches
from lightning_eff.kernels import _launch

def pack(num: int):
    def build():
        mask, out = (torch.empty(n, dtype=torch.uint8, device="meta") for n in (num, -(-num // 8)))
        kernels = _launch.triton_module("bit_mask")
        return lambda: kernels.pack(mask, out)
    return [compile_launch(launch) for launch in launches(build)]

for codes in (pack(2**20), pack(2**20 + 8)):
    print(json.dumps([[c.accesses("load"), c.accesses("store"), c.registers, c.spilled] for c in codes]))
"""


@pytest.mark.timeout(300)
def test_a_kernel_with_byte_wide_access_is_told_from_one_with_words(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        cwd=static.RESULTS.parent.parent,
    )
    if "ptxas" in done.stderr and done.returncode:
        pytest.skip(f"Triton cannot compile here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    words, single = (json.loads(line) for line in done.stdout.splitlines())
    assert [row[:2] for row in words] == [[{"128": 8}, {"128": 1}]]
    assert len(single) == 2 and all("8" in row[0] and sum(row[0].values()) > 16 for row in single), (
        "whole tiles, and the rest"
    )
    assert all(row[2] > 0 and row[3] == 0 for row in words + single)


def test_launches_are_recorded_with_the_wrappers_choices() -> None:
    pytest.importorskip("triton")

    def build(num: int = 4096 * 3 + 5) -> object:
        x = torch.empty(num, device="meta", dtype=torch.bfloat16)
        kernels = _launch.triton_module("group_quantization")
        return lambda: kernels.quantize(x, 4, 256, 1)

    found = launches(build)  # pyright: ignore[reportArgumentType]
    assert [(launch.grid, launch.arguments["EVEN"]) for launch in found] == [((3,), True), ((1,), False)]
    assert all(launch.name == "group_quantization.quantize_kernel" for launch in found)
    assert isinstance(found[0].arguments["codes"], Tensor) and found[0].elements == 4096 * 3 + 5


def test_the_committed_predictions_follow_from_the_features() -> None:
    calibration = json.loads(static.OUT.read_text())["calibration"]
    for row in calibration["rows"]:
        assert static.predicted(row["launches"], calibration["parameters"]) == pytest.approx(row["predicted"])
    errors = sorted(abs(row["predicted"] / row["seconds"] - 1) for row in calibration["rows"])
    assert calibration["predicted"]["median_error"] == pytest.approx(errors[len(errors) // 2])


def test_the_fit_recovers_its_parameters() -> None:
    calibration = json.loads(static.OUT.read_text())["calibration"]
    rows = calibration["rows"][::4]
    wanted = calibration["parameters"]
    planted = [row | {"seconds": static.predicted(row["launches"], wanted)} for row in rows]
    found = static.fit(planted)
    worst = max(abs(static.predicted(row["launches"], found) / row["seconds"] - 1) for row in planted)
    assert worst < 0.05
