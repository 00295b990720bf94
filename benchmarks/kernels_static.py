"""Predict the speed of every Triton kernel on H100 and H200 from its compiled code, with no GPU.

    python -m benchmarks.kernels_static [--only WORD] [--as after] [--dry]
    python -m benchmarks.kernels_static --calibrate
    python -m benchmarks.kernels_static --page

The first command compiles the launches of `benchmarks/gpu/bandwidth.py` and of `CASES` below for sm_90. For each one it
prints the width of its global accesses, registers, spilled bytes, shared memory, barriers, warps per scheduler, bytes and
instructions per element, the predicted time and what limits it. It writes the rows to
`benchmarks/results/kernels_static.json` under the name that ``--as`` gives and Triton's version. ``--only`` prints some of
the rows and writes nothing. ``--page`` writes the table of `benchmarks/README.md` from that file.

The second command fits the model to the committed figures of an H100. Run it where `kernels/` is as those figures measured
it, with the measured version of Triton. The file keeps the features of each measured kernel, so later versions need not
repeat it.

**The model.** A launch takes the p-norm of the times that its resources need: DRAM, writes to the L2 cache (a narrow store
takes a whole sector of 32 bytes), and for each of 528 schedulers the instructions issued, the pipes for integers and logic,
for multiplication, for special functions, and for shared memory, shuffles and global accesses. The last one is the time for
which the resident warps wait: the number of rounds of resident warps, times a latency per wait for global memory, per
instruction and per barrier. The issue rates are those of the CUDA programming guide for compute capability 9.0. The p-norm,
the three latencies and the L2 rate are fitted.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import kernels_static_page as page
from benchmarks.gpu import bandwidth
from benchmarks.kernels_static_code import MULTIPROCESSORS, Code, Launch, compile_launch, launches, width
from lightning_eff.kernels import _launch, fp8_cast, fp8_matmul
from lightning_eff.kernels.group_quantization import quantize

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "kernels_static.json"
NUM, WIDTH = 2**27, 4096
META = torch.device("meta")
SCHEDULERS = 4 * MULTIPROCESSORS
CLOCK = 1.755e9
DRAM = {"H100": 3.0e12, "H200": 4.3e12}  # bytes per second: what a copy reached, and as much of the H200's data sheet
TENSOR = 1.32e15  # FLOP/s of the largest float8 product in gpu_ceilings.json
# how often a kernel's loops run; a kernel with a loop needs an entry
TRIPS: dict[str, Callable[[dict[str, Any]], float]] = {
    "norm.backward_kernel": lambda a: a["rows"] / (a["ROWS"] * 4 * MULTIPROCESSORS),
    "compressed_norm.backward_kernel": lambda a: a["rows"] / (4 * MULTIPROCESSORS),
    "fp8_matmul.matmul_kernel": lambda a: a["K"] / 128,
    "linear_cross_entropy.loss_kernel": lambda a: a["columns"] / a["BLOCK"],
}
SPECIAL = ("MUFU", "F2I", "I2F", "F2F", "POPC", "FRND")
MEMORY = ("LDS", "STS", "LDG", "STG", "LDGSTS", "RED", "ATOMG", "ATOMS", "LDSM", "STSM", "LDL", "STL")
# not of the pipe for integers and logic: control, uniform registers, constants, tensor cores
OTHER = (
    *("BRA", "EXIT", "S2R", "CS2R", "LDC", "HGMMA", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "BSSY", "BSYNC", "WARPGROUP"),
    *("MOV", "ERRBAR", "MEMBAR", "CCTL", "SYNCS", "FENCE", "BAR", "NANOSLEEP", "YIELD", "ARRIVES", "CALL", "RET"),
)
RESOURCES: tuple[str, ...] = (
    "DRAM",
    "L2 writes",
    "issue",
    "integers",
    "multiplication",
    "special functions",
    "shared and global",
    "latency",
)
Row = dict[str, Any]


class Case(NamedTuple):
    """A program to compile.

    Attributes:
        name: of the row.
        nbytes: that must be moved.
        build: makes the operands on the meta device, and returns the program.
        flops: of float8 products in its kernel.
    """

    name: str
    nbytes: float
    build: Callable[[], Callable[[], Any]]
    flops: float = 0.0


def loss_of_chunk(classes: int) -> Callable[[], Callable[[], Any]]:
    """The fused head's own kernel, on a chunk of logits in rows that are a multiple of 16 apart."""

    def build() -> Callable[[], Any]:
        logits = torch.empty(4096, -(-classes // 16) * 16, device=META, dtype=torch.bfloat16)[:, :classes]
        target = torch.empty(4096, device=META, dtype=torch.int64)
        kernels = _launch.triton_module("linear_cross_entropy")
        return lambda: kernels.loss_and_gradient(logits, target, smoothing=0.0, gradient=True, row_grad=None)

    return build


def delayed_cast() -> Callable[[], Any]:
    """The cast of a gradient whose amax is known, and recorded with two others."""
    x = torch.empty(NUM // WIDTH, WIDTH, device=META, dtype=torch.bfloat16)
    first, second, value = (torch.empty((), device=META) for _ in range(3))
    scratch, record = torch.empty(2, device=META, dtype=torch.int32), torch.empty(3, device=META)
    peak = fp8_cast.Peak(value, known=True, scratch=scratch, record=record, others=(first, second))
    return lambda: fp8_cast.cast(x, torch.float8_e5m2, "tensor", columns=True, peak=peak)


def gradient_of_weight() -> Callable[[], Any]:
    """The float8 product of two operands with groups."""
    g, x = (torch.empty(WIDTH, NUM // WIDTH, device=META, dtype=torch.bfloat16) for _ in range(2))
    pairs = [fp8_cast.cast(t, torch.float8_e4m3fn, "groups").rows for t in (g, x)]
    a, b = pairs
    assert a is not None and b is not None
    return lambda: fp8_matmul.matmul(a, b, torch.float32)


def pair(pack: bool) -> Callable[[], Callable[[], Any]]:
    """The kernel of :func:`pack_pair` or :func:`unpack_pair`, without torch's check of the first elements."""

    def build() -> Callable[[], Any]:
        x, codes = (
            torch.empty(NUM, device=META, dtype=torch.bfloat16),
            torch.empty(NUM // 8, device=META, dtype=torch.uint8),
        )
        low, high = x[:1], x[:1]
        kernels = _launch.triton_module("bit_mask")
        if pack:
            return lambda: kernels.pack_pair(x, low, high, codes)
        return lambda: kernels.unpack_pair(codes, low, high, x)

    return build


def to_nearest(bits: int, num: int = NUM) -> Callable[[], Callable[[], Any]]:
    """Quantisation without random numbers."""

    def build() -> Callable[[], Any]:
        x = torch.empty(num // WIDTH, WIDTH, device=META, dtype=torch.bfloat16)
        return lambda: quantize(x, bits, bandwidth.GROUP)

    return build


# Beside the rows of benchmarks/gpu/bandwidth.py. A name of those replaces it, with what can run on the meta device.
CASES: list[Case] = [
    *(Case(f"quantize {b}, to nearest", 2 * NUM + bandwidth.codes(NUM, b), to_nearest(b)) for b in (8, 4)),
    Case("linear cross-entropy", 2 * 2 * 4096 * 32768, loss_of_chunk(32768)),
    Case("linear cross-entropy, 50257 classes", 2 * 2 * 4096 * 50257, loss_of_chunk(50257)),
    Case("cast to float8 by tensor, delayed, and transposed", 4 * NUM, delayed_cast),
    Case("product in float8, groups", 2 * NUM + 4 * WIDTH**2, gradient_of_weight, 2.0 * NUM * WIDTH),
    Case("pack two values", 2 * NUM + NUM // 8, pair(True)),
    Case("unpack two values", 2 * NUM + NUM // 8, pair(False)),
]


def cases(num: int = NUM) -> Iterator[Case]:
    """All rows; each works on ``num`` elements."""
    replaced = {case.name for case in CASES}
    for k in bandwidth.kernels(num, WIDTH, META, torch.bfloat16):
        if k.name not in replaced:
            yield Case(k.name, k.nbytes, k.build, k.flops)
    yield from CASES


def cost(op: str) -> dict[str, float]:
    """Cycles of each pipe for one instruction of a warp."""
    parts = op.split(".")
    name, spent = parts[0], {"issue": 1.0}
    if name in ("FADD", "FMUL", "FFMA"):
        spent["multiplication"] = 0.5
    elif name == "IMAD":
        spent["multiplication"] = 4.0 if {"HI", "WIDE"} & set(parts) else 2.0
    elif name in SPECIAL:
        spent["special functions"] = 8.0
    elif name == "SHFL":
        spent["shared and global"] = 4.0
    elif name in MEMORY:
        spent["shared and global"] = 4.0 * max(width(op) // 32, 1)
    elif name not in OTHER and not name.startswith("U") and not name.endswith("2UR"):
        spent["integers"] = 2.0
    return spent


def resident(code: Code) -> float:
    """Warps that a scheduler holds: limited by warps, registers, shared memory and programs of a multiprocessor."""
    registers = max(8, -(-code.registers // 8) * 8) * 32 * code.warps
    programs = min(32, 64 // code.warps, 65536 // registers, 227 * 1024 // (code.shared + 1024))
    return programs * code.warps / 4


def features(launch: Launch, code: Code, nbytes: float, flops: float) -> Row:
    """What the model needs to know of a launch: seconds and counts, per scheduler where that matters."""
    spent: dict[str, float] = dict.fromkeys(RESOURCES[2:7], 0.0)
    written = 0.0
    for op, times in code.ops.items():
        for pipe, cycles in cost(op).items():
            spent[pipe] += cycles * times
        for kind, prefix in (("load", "LDG"), ("store", "STG")):
            if op.startswith(prefix):
                bits = width(op)
                run = min(max(code.runs.get((kind, bits), bits), bits), 256)
                # a warp's narrow access touches the sectors of all of its threads' runs
                spent["shared and global"] += 4.0 * (run - bits) / 32 * times if run > bits else 0.0
                written += run / 8 * 32 * times if kind == "store" else 0.0
    warps = launch.programs * code.warps
    held = min(resident(code), max(warps / SCHEDULERS, 1.0))
    return {
        "nbytes": nbytes,
        "written": written * warps,
        "cycles": {pipe: spent[pipe] * warps / SCHEDULERS for pipe in RESOURCES[2:7]},
        "rounds": warps / SCHEDULERS / held,
        "instructions": sum(code.ops.values()),
        "barriers": sum(n for op, n in code.ops.items() if op.startswith("BAR")),
        "waits": code.waits,
        "flops": flops,
    }


def times(f: Row, parameters: dict[str, float], device: str = "H100") -> dict[str, float]:
    """Seconds that each resource needs."""
    wait = (
        parameters["start"] * f["waits"]
        + parameters["instruction"] * f["instructions"]
        + parameters["barrier"] * f["barriers"]
    )
    return {
        "DRAM": f["nbytes"] / DRAM[device],
        "L2 writes": f["written"] / parameters["l2"] / 1e12,
        **{pipe: cycles / CLOCK for pipe, cycles in f["cycles"].items()},
        # the loads of a product are in flight while tensor cores work
        **({"tensor cores": f["flops"] / TENSOR} if f["flops"] else {"latency": f["rounds"] * wait / CLOCK}),
    }


def predicted(launched: list[Row], parameters: dict[str, float], device: str = "H100") -> float:
    """Seconds of some launches, one after another."""
    p = parameters["norm"]
    return sum(sum(t**p for t in times(f, parameters, device).values()) ** (1 / p) for f in launched)


def analysed(case: Case, *, aligned: bool = True) -> list[tuple[Launch, Code, Row]]:
    """Compile the launches of a program.

    Raises:
        ValueError: if a kernel loops, and TRIPS does not say how often.
    """
    found = launches(case.build)
    total = sum(launch.nbytes for launch in found)
    out = []
    for launch in found:
        trips = TRIPS.get(launch.name)
        code = compile_launch(launch, trips=trips(launch.arguments) if trips else 1.0, aligned=aligned)
        if trips is None and compile_launch(launch, trips=2.0, aligned=aligned).ops != code.ops:
            raise ValueError(f"TRIPS: {launch.name} has a loop. Add how often it runs.")
        out.append((launch, code, features(launch, code, case.nbytes * launch.nbytes / total, case.flops)))
    return out


def told(case: Case, parameters: dict[str, float]) -> list[Row]:
    """The rows of a program, one for each of its launches."""
    rows = []
    for launch, code, f in analysed(case):
        seconds = {device: predicted([f], parameters, device) for device in DRAM}
        needs = times(f, parameters)
        lanes = 32 * launch.programs * code.warps / NUM
        rows.append(
            {
                "row": case.name,
                "kernel": launch.name,
                "loads": {str(k): round(v, 1) for k, v in code.accesses("load").items()},
                "stores": {str(k): round(v, 1) for k, v in code.accesses("store").items()},
                "registers": code.registers,
                "spilled": code.spilled,
                "shared": code.shared,
                "warps": code.warps,
                "barriers": f["barriers"],
                "resident": resident(code),
                "bytes_per_element": round(f["nbytes"] / NUM, 3),
                "instructions_per_element": round(f["instructions"] * lanes, 2),
                "microseconds": {device: round(t * 1e6, 1) for device, t in seconds.items()},
                "of_copy": {device: round(f["nbytes"] / t / DRAM[device], 3) for device, t in seconds.items()},
                "limit": max(needs, key=lambda name: needs[name]),
                "limits": {name: round(t * 1e6, 1) for name, t in needs.items()},
            }
        )
    return rows


def measured() -> Iterator[tuple[str, str, bool, float, Case]]:
    """(kernel, its module, whether sizes' divisors were known, seconds, program) of the committed figures of an H100."""
    old = {row["row"]: row for row in json.loads((RESULTS / "gpu_bandwidth.json").read_text())["rows"]}
    new = {row["kernel"]: row for row in json.loads((RESULTS / "kernel_changes_h100.json").read_text())["rows"]}
    told_later = {row["kernel"].split(",")[0] for row in new.values()}
    for k in bandwidth.kernels(NUM, WIDTH, META, torch.bfloat16):
        if k.flops or k.name.endswith("two values") or k.module == "fp8_cast":
            continue  # torch's operations took part, or the kernel changed later
        changed = k.module in ("group_quantization", "compressed_gelu", "stochastic_rounding", "bf16_adamw")
        case = Case(k.name, k.nbytes, k.build)
        yield k.name, k.module, not changed, k.nbytes / old[k.name]["gigabytes_per_second"]["median"] / 1e9, case
    for k in bandwidth.kernels(NUM // 2, WIDTH, META, torch.bfloat16):
        name = k.name.replace(", and transposed", ", bfloat16, and transposed")
        name = f"{name}, stochastic" if name.startswith("quantize") else name
        if k.name.split(",")[0] in told_later and name in new:
            yield name, k.module, True, new[name]["after_ms"] / 1e3, Case(name, k.nbytes, k.build)
    for bits in (8, 4):
        name, nbytes = f"quantize {bits}, to nearest", NUM + bandwidth.codes(NUM // 2, bits)
        case = Case(name, nbytes, to_nearest(bits, NUM // 2))
        yield name, "group_quantization", True, new[name]["after_ms"] / 1e3, case


def fit(rows: list[Row]) -> dict[str, float]:
    """Minimise the mean squared logarithm of predicted over measured time, one parameter after another."""
    found = {"norm": 3.0, "start": 800.0, "instruction": 2.0, "barrier": 50.0, "l2": 4.0}

    def loss() -> float:
        return sum(math.log(predicted(row["launches"], found) / row["seconds"]) ** 2 for row in rows)

    least, step = loss(), 0.3
    while step > 0.002:
        before = least
        for name in found:
            for factor in (1 + step, 1 / (1 + step)):
                kept = found[name]
                found[name] = max(kept * factor, 1.0) if name == "norm" else kept * factor
                now = loss()
                if now < least:
                    least = now
                    break
                found[name] = kept
        step = step / 2 if least == before else step
    return found


def calibrate() -> Row:
    """Fit the model; also predict each module with a fit that leaves it out."""
    import triton

    rows = []
    for name, module, aligned, seconds, case in measured():
        launched = [f for _, _, f in analysed(case, aligned=aligned)]
        rows.append({"kernel": name, "module": module, "aligned": aligned, "seconds": seconds, "launches": launched})
    parameters = fit(rows)
    without = {m: fit([row for row in rows if row["module"] != m]) for m in {row["module"] for row in rows}}
    for row in rows:
        row["predicted"] = predicted(row["launches"], parameters)
        row["predicted_without_its_module"] = predicted(row["launches"], without[row["module"]])
    errors = {
        key: [abs(row[key] / row["seconds"] - 1) for row in rows] for key in rows[0] if key.startswith("predicted")
    }
    summary = {key: {"median_error": statistics.median(e), "largest_error": max(e)} for key, e in errors.items()}
    return {"triton": triton.__version__, "parameters": parameters, **summary, "rows": rows}


def main() -> None:
    """Run the command line."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="print the rows whose name contains this, and write nothing")
    parser.add_argument("--as", dest="name", default="after", choices=["before", "after"], help="name of the rows")
    parser.add_argument("--calibrate", action="store_true", help="fit the model to the committed figures of an H100")
    parser.add_argument("--page", action="store_true", help="write the tables of the README, and compile nothing")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: Row = json.loads(OUT.read_text()) if OUT.exists() else {}
    if given.page:
        page.write_page(result)
        return
    if given.calibrate:
        result["calibration"] = calibrate()
        for row in result["calibration"]["rows"]:
            both = row["seconds"] * 1e6, row["predicted"] * 1e6
            print(f"{row['kernel']:55} {both[0]:7.0f} {both[1]:7.0f} {both[1] / both[0]:.2f}")
        print({k: v for k, v in result["calibration"].items() if k != "rows"})
    else:
        chosen = [case for case in cases() if given.only in case.name]
        rows = [row for case in chosen for row in told(case, result["calibration"]["parameters"])]
        print(page.launch_table(rows))
        result.setdefault(given.name, {})[triton.__version__] = rows
    if not given.only and not given.dry:
        OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
