"""A table of accelerators: memory, matmul speed and bandwidths, each with its source."""

import difflib
from dataclasses import dataclass

# The sources, as cited in Accelerator.source: Stas Bekman's stas00/ml-engineering at commit 744d01e and datasheets.
_BOOK = "stas00/ml-engineering"
_SPEC = f"peaks and memory: datasheets as collected in {_BOOK}, compute/accelerator"
_MAMF = f"rates reached: {_BOOK}, compute/accelerator, maximum achievable matmul FLOPS"
_LINK = f"links: {_BOOK}, network"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator in its usual node.

    Attributes:
        name: the value of ``--gpu``.
        memory_bytes: memory of one accelerator, as sold (decimal gigabytes).
        peak_flops: dense BF16 FLOP/s of the datasheet, the reference for MFU.
        matmul_flops: dense BF16 FLOP/s measured for the best matmul.
        fp8_peak_flops: dense FP8 FLOP/s of the datasheet, or None without FP8.
        fp8_matmul_flops: dense FP8 FLOP/s measured for the best matmul, or None without FP8.
        memory_bandwidth: bytes/s of the accelerator's memory.
        node_bandwidth: bytes/s, one direction, between two accelerators of a node.
        network_bandwidth: bytes/s, one direction, of the node's network cards per accelerator.
        node_size: accelerators in a node.
        source: source of the figures.
    """

    name: str
    memory_bytes: float
    peak_flops: float
    matmul_flops: float
    fp8_peak_flops: float | None
    fp8_matmul_flops: float | None
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    node_size: int
    source: str


def _row(
    name: str,
    gigabytes: float,
    bf16: tuple[float, float],
    fp8: tuple[float, float] | None,
    bandwidths: tuple[float, float, float],
    source: str,
    node_size: int = 8,
) -> Accelerator:
    """Build a row from GB, (peak, reached) TFLOP/s in BF16 and FP8, and GB/s of (memory, node, network)."""
    memory, node, network = bandwidths
    return Accelerator(
        name,
        gigabytes * 1e9,
        bf16[0] * 1e12,
        bf16[1] * 1e12,
        fp8[0] * 1e12 if fp8 else None,
        fp8[1] * 1e12 if fp8 else None,
        memory * 1e9,
        node * 1e9,
        network * 1e9,
        node_size,
        source,
    )


_ALL = f"{_SPEC}; {_MAMF}; {_LINK}"
#: Accelerators by the name that ``--gpu`` takes.
ACCELERATORS: dict[str, Accelerator] = {
    row.name: row
    for row in (
        _row(
            "a100-40",
            40,
            (312, 271.2),
            None,
            (1555, 300, 25),
            f"NVIDIA A100 datasheet (40 GB SXM: 1,555 GB/s, NVLink 600 GB/s both ways); {_MAMF} (A100 SXM);"
            " network: DGX A100 User Guide, 8 HDR InfiniBand cards of 200 Gb/s",
        ),
        _row(
            "a100-80",
            80,
            (312, 271.2),
            None,
            (2039, 300, 25),
            f"NVIDIA A100 datasheet (80 GB SXM: 2,039 GB/s, NVLink 600 GB/s both ways); {_MAMF} (A100 SXM);"
            " network: Narayanan et al. 2021 section 5, 8 HDR InfiniBand cards of 200 Gb/s",
        ),
        _row("h100", 80, (989, 794.5), (1979, 1402.6), (3350, 450, 50), f"{_ALL}; DGX H100: 8 NDR cards of 400 Gb/s"),
        _row(
            "h100-96",
            96,
            (989, 794.5),
            (1979, 1402.6),
            (2400, 450, 50),
            f"torchtitan benchmarks/llama3_h100_202412_torchtitan.md (96 GB HBM2e, 2.4 TB/s, 400 Gb/s a GPU; it ran at"
            f" 500 W, and these rates are those of 700 W); {_MAMF} (H100 SXM)",
        ),
        _row("h200", 141, (989, 794.5), (1979, 1453.4), (4800, 450, 50), f"{_ALL}; its BF16 rate is the H100's"),
        _row(
            "b200",
            180,
            (2250, 1745.0),
            (4500, 3432.5),
            (8000, 900, 50),
            f"{_ALL}; network: 8 cards of 400 Gb/s (P6-B200, the same source)",
        ),
        _row(
            "mi300x",
            192,
            (1300, 668.4),
            (2610, 1336.8),
            (5300, 448, 50),
            f"{_ALL}; FP8 reached: assumed, twice BF16; network: assumed, 8 cards of 400 Gb/s",
        ),
        _row(
            "l40s",
            48,
            (362, 262.0),
            (733, 530.5),
            (864, 32, 25),
            "NVIDIA L40S datasheet (PCIe 4.0 x16, 64 GB/s both ways); rates reached:"
            " assumed, 72.4 % of the peak; network: assumed, a card of 200 Gb/s a GPU",
        ),
    )
}


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator called ``name``, ignoring case.

    Raises:
        ValueError: if the table has no such name; the message lists all names.
    """
    found = ACCELERATORS.get(name.lower())
    if found is None:
        rows = "\n".join(
            f"  {a.name:<8} {a.memory_bytes / 1e9:4.0f} GB, {a.peak_flops / 1e12:5.0f} TFLOP/s dense BF16,"
            f" {a.node_size} per node"
            for a in ACCELERATORS.values()
        )
        near = difflib.get_close_matches(name.lower(), ACCELERATORS, 1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"--gpu {name}: not in the table of accelerators. Pass one of\n{rows}\n{meant}".rstrip())
    return found
