"""Compile the Triton kernels that a program launches for GPUs that need not be present, and count what the code does.

A program runs on torch's meta device, with `JITFunction.run` replaced. So the kernels' own wrappers choose grids, constants and
warps, and nothing has to list them here. Each recorded launch is compiled with the specialisations that Triton's launcher would
choose. The counts come from the machine code (SASS): instructions of all blocks that can be reached, those in a loop weighed by
the loop's number of trips.
"""

import contextlib
import inspect
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from lightning_eff.kernels import _launch

MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)(?P<rest>[^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+):")
TARGET = re.compile(r"\(\.L_x_\d+\)")
GLOBAL = re.compile(r"^(LDG|LDGSTS|STG|RED|ATOMG)\b")
ENDS = ("EXIT", "BRA", "RET", "JMP", "BRX")


class Launch(NamedTuple):
    """One launch of a Triton kernel.

    Attributes:
        kernel: the JITFunction.
        grid: programs in each dimension.
        arguments: by the kernel's parameters.
        options: such as ``num_warps``.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The module and the function."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2].strip('_').removesuffix('_triton')}.{self.kernel.fn.__name__}"

    @property
    def programs(self) -> int:
        """How many programs run."""
        return math.prod(self.grid)

    @property
    def elements(self) -> int:
        """The elements of the largest tensor."""
        return max(t.numel() for t in self.arguments.values() if isinstance(t, Tensor))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.arguments.values() if isinstance(t, Tensor))


class Code(NamedTuple):
    """What one warp of a compiled kernel does.

    Attributes:
        registers: per thread.
        spilled: bytes of local memory and stack per thread.
        shared: bytes of shared memory per program.
        warps: of a program.
        ops: how often each instruction is issued, with its modifiers.
        waits: how often it waits for global memory: once, and in each trip of a loop that loads what it then needs.
        runs: the contiguous bits that a thread has of a tensor, by "load" or "store" and the bits of an element.
    """

    registers: int
    spilled: int
    shared: int
    warps: int
    ops: Counter[str]
    waits: float
    runs: dict[tuple[str, int], int]

    def accesses(self, kind: str) -> dict[int, float]:
        """Global accesses per warp by their width in bits; ``kind`` is "load" or "store"."""
        found: Counter[int] = Counter()
        for op, times in self.ops.items():
            if GLOBAL.match(op) and (op.startswith("LDG") == (kind == "load")):
                found[width(op)] += times
        return dict(sorted(found.items()))


def width(op: str) -> int:
    """Bits that each thread accesses."""
    parts = op.split(".")
    return next((bits for bits in (128, 64, 16, 8) if {str(bits), f"U{bits}", f"S{bits}"} & set(parts)), 32)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches of Triton kernels instead of running them, and send meta tensors to Triton."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        grid = grid(bound.arguments) if callable(grid) else grid
        found.append(Launch(self, tuple(grid), dict(bound.arguments), options))

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(_launch, "uses_triton", lambda x: True),
        mock.patch.object(_launch, "num_programs", lambda device: 4 * MULTIPROCESSORS),
    ):
        yield found


def launches(build: Callable[[], Callable[[], Any]]) -> list[Launch]:
    """What the program that ``build`` returns launches; what ``build`` itself launches is not counted."""
    with recording() as found:
        program = build()
        found.clear()
        program()
    return found


def specialised(launch: Launch, aligned: bool) -> tuple[dict[str, str], dict[Any, Any], dict[Any, Any]]:
    """Find signature, constants and attributes like Triton's launcher; without ``aligned`` no integer's divisor is known."""
    signature, constants, attributes = {}, {}, {}
    for p in launch.kernel.params:
        value, free = launch.arguments[p.name], not p.do_not_specialize
        if p.name == "NATIVE":
            value = True  # the fp8 kernels ask the device
        divisible = False
        if p.is_constexpr or value is None or (free and type(value) is int and value == 1):
            signature[p.name], constants[(p.num,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[p.name] = "*" + TYPES[value.dtype]
            divisible = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, float):
            signature[p.name] = "fp32"
        else:
            signature[p.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = aligned and value % 16 == 0
        if divisible and free:
            attributes[(p.num,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(launch: Launch, capability: int = 90, *, trips: float = 1.0, aligned: bool = True) -> Code:
    """Compile a launch for an architecture.

    Args:
        launch: the launch.
        capability: such as 90 for sm_90.
        trips: how often each of the kernel's loops runs.
        aligned: whether integers that 16 divides are known as such, as Triton's launcher finds them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, *specialised(launch, aligned))
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def read(tool: str, option: str) -> str:
            return subprocess.run([tools / tool, option, file.name], check=True, capture_output=True, text=True).stdout

        usage, text = read("cuobjdump", "-res-usage"), read("nvdisasm", "-c")
    registers, *spilled = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "LOCAL", "STACK"))
    m, (ops, waits) = compiled.metadata, counted(text, trips, compiled.metadata.num_stages)
    return Code(registers, sum(spilled), m.shared, m.num_warps, ops, waits, contiguous(compiled.asm["ttgir"]))


def contiguous(ttgir: str) -> dict[tuple[str, int], int]:
    """Find each thread's contiguous bits in the tensors that are loaded and stored, from Triton's layouts."""
    elements: dict[str, int] = {}
    for name, size, order in re.findall(
        r"^#(\w+) = #ttg\.blocked<\{sizePerThread = \[([^\]]*)\].*?order = \[(\d+)", ttgir, re.MULTILINE
    ):
        elements[name] = int(size.split(",")[int(order)])
    for name, bases in re.findall(r"^#(\w+) = #ttg\.linear<\{register = \[(.*?)\], lane", ttgir, re.MULTILINE):
        last = [int(v) for v in re.findall(r"(\d+)\]", bases)]
        elements[name] = 1
        while elements[name] in last:
            elements[name] *= 2
    found: dict[tuple[str, int], int] = {}
    for kind, bits, name in re.findall(r"tt\.(load|store) .*tensor<[\dx]*!tt\.ptr<\w*?(\d+)\w*>, #(\w+)>", ttgir):
        key = kind, int(bits)
        found[key] = max(found.get(key, 0), int(bits) * elements.get(name, 1))
    return found


def counted(sass: str, trips: float, stages: int) -> tuple[Counter[str], float]:
    """Count the instructions that can be reached without a call, in a loop ``trips`` times, and waits for memory.

    A loop that copies to shared memory in ``stages`` stages waits once in ``stages`` - 1 trips. A call leads to the slow path
    of a division or a square root, which hardly any number takes.
    """
    code: list[tuple[str, str, bool]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found["op"], found["rest"], bool(found["guard"])))
    jumps = {
        i: labels[target[0].strip("()`")]
        for i, (op, rest, _) in enumerate(code)
        if op.startswith("BRA") and (target := TARGET.search(rest))
    }
    reached: set[int] = set()
    ahead = [0]
    while ahead:
        i = ahead.pop()
        while i < len(code) and i not in reached:
            reached.add(i)
            if i in jumps:
                ahead.append(jumps[i])
            op, _, guarded = code[i]
            if op.startswith(ENDS) and not guarded:
                break
            i += 1
    times = [1.0 if i in reached else 0.0 for i in range(len(code))]
    waits = 1.0
    for at, target in jumps.items():
        if target < at and at in reached:
            inside = {op.split(".")[0] for op, _, _ in code[target : at + 1]}
            if "LDGSTS" in inside:
                waits = max(waits, trips / max(stages - 1, 1))
            elif "LDG" in inside:
                waits = max(waits, trips)
            for i in range(target, at + 1):
                times[i] *= trips
    ops: Counter[str] = Counter()
    for (op, _, _), often in zip(code, times, strict=True):
        if often and op != "NOP":
            ops[op] += often  # pyright: ignore[reportArgumentType] -- trips may be a mean
    return ops, waits
