"""Compile every Triton kernel for GPUs that need not be there, and print what each takes; run by test_ahead_of_time.

    python tests/kernels/ahead_of_time.py [--few] 80 90

For each kernel, configuration (``--few``: one for each kernel) and architecture, prints a line of JSON: registers for
each thread and bytes of local memory and stack, where spilt registers go, as the bundled ``cuobjdump`` reads them from
the binary; and bytes of shared memory.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from lightning_eff.kernels import (
    _bf16_adamw_triton,
    _bit_mask_triton,
    _compressed_gelu_triton,
    _compressed_norm_triton,
    _fp8_cast_triton,
    _fp8_matmul_triton,
    _group_quantization_triton,
    _int8_quantization_triton,
    _linear_cross_entropy_triton,
    _norm_triton,
    _stochastic_rounding_triton,
)

POINTERS = {"codes": "u8", "packed": "u8", "mask": "u8"} | dict.fromkeys(("scale", "minimum", "reciprocal"), "fp32")
POINTERS |= {"target": "i64", "row_grad": "fp32", "loss": "fp32", "mean": "fp32"}
SCALARS = {"num": "i64", "first": "i32", "length": "i32", "seed": "i64", "rows": "i32"} | dict.fromkeys(
    ("eps", "keep", "size", "b1", "b2", "root"), "fp32"
)
SCALARS |= {"columns": "i32", "width": "i32", "stride": "i32", "smoothing": "fp32"}
POINTERS |= {"turned": "u8", "amax": "i32", "turned_amax": "i32", "scratch": "i32", "record": "i32"}
POINTERS |= dict.fromkeys(("inverse", "turned_inverse", "a_inverse", "b_inverse", "peak", "seen"), "fp32")
POINTERS |= dict.fromkeys(("first_amax", "second_amax"), "fp32")
SCALARS |= dict.fromkeys(("num_rows", "num_columns", "M", "N", "K", "a_step", "b_step"), "i32")
LEAST = {"matmul_kernel": _fp8_matmul_triton.LEAST}  # architecture


def configurations() -> list[tuple[Any, str, dict[str, Any], Any]]:
    """(kernel, float type of its tensors, constants, warps or warps and stages), as the launchers choose them."""
    found: list[tuple[Any, str, dict[str, Any], Any]] = []
    q, gelu, norm, mask = (
        _group_quantization_triton,
        _compressed_gelu_triton,
        _compressed_norm_triton,
        _bit_mask_triton,
    )
    for bits in (1, 2, 3, 4, 8):
        for dtype in ("fp32", "bf16", "fp16"):
            group = {"GROUP": 256, "BITS": bits, "GROUPS": q.BLOCK // 256, "EVEN": True}
            found.append((q.dequantize_kernel, dtype, group, q.num_warps(group["GROUP"])))
            for stochastic in (False, True):
                found.append((q.quantize_kernel, dtype, group | {"STOCHASTIC": stochastic}, q.num_warps(256)))
    for group_size in (16, 8192):
        group = {"GROUP": group_size, "BITS": 4, "GROUPS": max(q.BLOCK // group_size, 1), "EVEN": group_size > 16}
        found.append((q.quantize_kernel, "fp32", group | {"STOCHASTIC": True}, q.num_warps(group["GROUP"])))
        found.append((q.dequantize_kernel, "fp32", group, q.num_warps(group["GROUP"])))
    for bits in (2, 4, 8):
        group = {"GROUP": 256, "BITS": bits, "GROUPS": q.BLOCK // 256, "EVEN": True}
        for tanh in (False, True):
            found.append((gelu.forward_kernel, "bf16", group | {"TANH": tanh, "STOCHASTIC": True}, q.num_warps(256)))
        found.append((gelu.backward_kernel, "bf16", group, q.num_warps(group["GROUP"])))
        for size in (256, 768, 4096):
            row = {"K": size // 256, "K2": triton.next_power_of_2(size // 256), "GROUP": 256, "BITS": bits}
            for centre in (False, True):
                flags = row | {"CENTRE": centre, "WEIGHT": True, "BIAS": centre}
                found.append((norm.forward_kernel, "bf16", flags | {"STOCHASTIC": True}, norm.num_warps(size)))
                found.append((norm.backward_kernel, "bf16", flags, norm.num_warps(size)))
    for even in (False, True):
        flags = {"BLOCK": mask.BLOCK, "EVEN": even}
        found.append((mask.pack_kernel, "i32" if even else "u8", flags, mask.NUM_WARPS))
        found.append((mask.unpack_kernel, "i32" if even else "u8", flags | {"WIDE": even}, mask.NUM_WARPS))
        found.append((mask.pack_pair_kernel, "bf16", flags, mask.NUM_WARPS))
        found.append((mask.unpack_pair_kernel, "bf16", flags, mask.NUM_WARPS))
    rounding, adamw, integers = _stochastic_rounding_triton, _bf16_adamw_triton, _int8_quantization_triton
    for even in (False, True):
        found.append((rounding.round_kernel, "fp32", {"TILES": rounding.TILES, "EVEN": even}, rounding.NUM_WARPS))
        for bits in (False, True):
            flags = {"HALF": bits, "TILES": adamw.TILES, "EVEN": even}
            found.append((adamw.adamw_kernel, "i16", flags, rounding.NUM_WARPS))
        for tiles in (1, 4, 16):
            flags = {"FACTOR": True, "STOCHASTIC": True, "WHOLE": even, "TILES": tiles, "EVEN": even}
            found.append((integers.rows_kernel, "fp32", flags, tiles))
    loss, plain_norm = _linear_cross_entropy_triton, _norm_triton
    for dtype in ("fp32", "fp16", "bf16"):
        for gradient, scaled, smooth in ((False, False, False), (True, True, True), (True, False, False)):
            flags = {"GRADIENT": gradient, "SCALED": scaled, "SMOOTH": smooth, "BLOCK": loss.BLOCK}
            flags |= {"ITEMS": loss.ITEMS}
            found.append((loss.loss_kernel, dtype, flags, loss.num_warps(loss.BLOCK)))
        for size in (8, 64, 768, 1024, 2048, 5120, 8192, 4096):
            filled, tile, forward_warps, backward_warps = plain_norm.geometry(size)
            for centre in (False, True):
                flags = {"D": size, "D2": filled, "ROWS": tile, "CENTRE": centre, "WEIGHT": True, "BIAS": centre}
                found.append((plain_norm.forward_kernel, dtype, flags, forward_warps))
                found.append((plain_norm.backward_kernel, dtype, flags, backward_warps))
    cast, matmul = _fp8_cast_triton, _fp8_matmul_triton
    for dtype in ("fp32", "bf16"):
        for e5m2 in (False, True):
            flags = {"E5M2": e5m2, "NATIVE": False}  # see main
            for columns in (512, 16384, 4096):
                height, width, warps = cast.rows_of(columns)
                block = {"BLOCK_ROWS": height, "BLOCK_COLUMNS": width}
                found.append((cast.rows_kernel, dtype, flags | block, warps))
            for scales in range(4):
                tile = {"SCALES": scales, "GIVEN": False, "PEAK": scales == 0, "BY_ROW": True, "BY_COLUMN": True}
                tile |= {"KNOWN": scales == 0, "RECORDS": 3 if scales == 0 else 0}
                warps = cast.warps_of(("tensor", "rows", "groups", "blocks")[scales], delayed=scales == 0)
                found.append((cast.tile_kernel, dtype, tile | flags | {"BLOCK": cast.BLOCK}, warps))
                if scales < 2:
                    few = {"PEAK": scales == 0, "SCALES": scales, "BLOCK": cast.BLOCK}
                    found.append((cast.amax_kernel, dtype, few, cast.NUM_WARPS))
    for even in (False, True):
        for a_blocks, b_blocks, tiles in (
            (False, False, matmul.WITH_GROUPS),
            (True, False, matmul.WITH_GROUPS),
            (True, True, (matmul.LARGE,)),
            (False, True, matmul.WITH_BLOCKS),
        ):
            for m, n, warps, stages in tiles:
                flags = {"A_BLOCKS": a_blocks, "B_BLOCKS": b_blocks, "EVEN_K": even, "BLOCK_M": m, "BLOCK_N": n}
                found.append((matmul.matmul_kernel, "bf16", flags | {"SUPER": matmul.SUPER}, (warps, stages)))
    return found


def resources(binary: bytes) -> dict[str, int]:
    """Registers, local memory and stack of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    names = {"registers": "REG", "local": "LOCAL", "stack": "STACK"}
    return {key: int(re.findall(rf"{name}:(\d+)", text)[0]) for key, name in names.items()}


def main() -> None:
    chosen = configurations()
    if "--few" in sys.argv:  # 4 bits, stochastic, groups of 256: what a training would most likely run
        chosen = [c for c in chosen if c[2].get("BITS", 4) == 4 and c[2].get("STOCHASTIC", True)]
        chosen = [c for c in chosen if c[2].get("GROUP", 256) == 256]
        chosen = list({(c[0].fn.__module__, c[0].__name__): c for c in chosen}.values())
    for kernel, dtype, constants, warps in chosen:
        names = list(inspect.signature(kernel.fn).parameters)
        signature = {
            name: "constexpr" if name in constants else SCALARS.get(name) or "*" + POINTERS.get(name, dtype)
            for name in names
        }
        if kernel.__name__ == "round_kernel":
            signature["out"] = "*i16"
        if kernel.__name__.startswith(("pack_", "unpack_")):
            words = "*i32" if dtype == "i32" else "*u8"
            signature |= {name: words for name in ("mask", "packed") if name in names}
            signature |= {"out": "*u8"} if kernel.__name__ == "pack_pair_kernel" else {}
            signature |= {"other": "*i32"} if "other" in names else {}
        if kernel.__name__ == "rows_kernel" and "q" in names:
            signature["q"] = "*i8"
        if kernel.__name__ == "adamw_kernel" and not constants["HALF"]:
            signature["g"] = "*fp32"
        if kernel.__name__ == "backward_kernel" and "dw" in names:
            signature |= {"dw": "*fp32", "db": "*fp32"}
        if kernel.__name__ == "matmul_kernel":
            signature |= {"a": "*fp8e5", "b": "*fp8e4nv"}
        # Tensors from torch's allocator are aligned to 16 bytes, which the launcher tells the compiler too
        divisible = ("stride", "length", "width")
        aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in divisible]
        if kernel.__name__ in ("tile_kernel", "amax_kernel", "matmul_kernel"):  # their launchers pad
            aligned += [i for i, name in enumerate(names) if name in ("num_rows", "num_columns", "K")]
        aligned = {(i,): [["tt.divisibility", 16]] for i in aligned}
        for capability in (int(arg) for arg in sys.argv[1:] if arg.isdigit()):
            if capability < LEAST.get(kernel.__name__, 0):
                continue
            if "NATIVE" in constants:
                constants["NATIVE"] = capability >= 89
            source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
            pair = dict(zip(("num_warps", "num_stages"), warps if isinstance(warps, tuple) else (warps,), strict=False))
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=pair)
            line = {
                "kernel": f"{kernel.fn.__module__.rpartition('._')[2]}.{kernel.__name__}",
                "sm": capability,
                "dtype": dtype,
                "warps": warps,
                **constants,
                **resources(compiled.asm["cubin"]),
                "shared": compiled.metadata.shared,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
