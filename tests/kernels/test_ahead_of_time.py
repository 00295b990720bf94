"""Every Triton kernel compiles for the GPUs that most people have, with no GPU here, and spills no register."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ahead_of_time.py"
KERNELS = {
    "stochastic_rounding_triton.round_kernel",
    "bf16_adamw_triton.adamw_kernel",
    "bit_mask_triton.pack_kernel",
    "bit_mask_triton.pack_pair_kernel",
    "bit_mask_triton.unpack_kernel",
    "bit_mask_triton.unpack_pair_kernel",
    "int8_quantization_triton.rows_kernel",
    "compressed_gelu_triton.backward_kernel",
    "compressed_gelu_triton.forward_kernel",
    "compressed_norm_triton.backward_kernel",
    "compressed_norm_triton.forward_kernel",
    "fp8_cast_triton.amax_kernel",
    "fp8_cast_triton.rows_kernel",
    "fp8_cast_triton.tile_kernel",
    "fp8_matmul_triton.matmul_kernel",
    "group_quantization_triton.dequantize_kernel",
    "group_quantization_triton.quantize_kernel",
    "linear_cross_entropy_triton.loss_kernel",
    "norm_triton.backward_kernel",
    "norm_triton.forward_kernel",
}
PER_THREAD = {80: 255, 90: 255}  # registers; more are spilt to memory
LEAST = {"fp8_matmul_triton.matmul_kernel": 90}  # architecture: float8 products


@pytest.mark.parametrize("which", [["--few"], pytest.param([], marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.timeout(900)
def test_kernels_compile_without_a_gpu(which: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(SCRIPT), *which, *map(str, PER_THREAD)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    with capsys.disabled():
        for line in lines:
            print(
                f"\n{line['kernel']:45} sm_{line['sm']} {line['dtype']:>5}: {line['registers']:3} registers,"
                f" {line['local'] + line['stack']} bytes spilt, {line['shared']} of shared memory",
                end="",
            )
    assert {(line["kernel"], line["sm"]) for line in lines} == {
        (k, sm) for k in KERNELS for sm in PER_THREAD if sm >= LEAST.get(k, 0)
    }
    for line in lines:
        assert line["local"] == line["stack"] == 0, f"spills: {line}"
        assert 0 < line["registers"] <= PER_THREAD[line["sm"]]
