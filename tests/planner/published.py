"""Published runs, as their sources have them."""

from typing import NamedTuple

from lightning_eff.planner.layouts import Layout

#: Forward and backward pass of one layer of a 22B GPT on 8 A100, micro-batch 4, by remat: Korthikanti et al. 2022
#: (arXiv:2205.05198), table 4, without sequence parallelism.
LAYER_MILLISECONDS = {"none": 19.6, "full": 27.2}


class Run(NamedTuple):
    """A GPT of Narayanan et al. 2021 (arXiv:2104.04473), table 1, or a PTD-P row of table 2.

    Vocabulary 51,200, samples of 2,048 tokens. The runs were interleaved (section 5.1); the number of chunks is not given.
    ``chunks`` is the least that divides the layers of a rank: the only possible one for 1T (2 layers) and 530B (3 layers,
    also in Korthikanti et al. 2022).
    """

    billions: float
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    micro_batch: int
    teraflops: float

    @property
    def chunks(self) -> int:
        return 1 if self.pp == 1 else next(v for v in (2, 3, 5) if self.layers // self.pp % v == 0)

    @property
    def flops(self) -> float:
        """Of a step: the paper's equation 3, which counts the forward pass that is run again."""
        n, h, s = self.layers, self.width, 2048
        return 96 * self.batch * s * n * h * h * (1 + s / (6 * h) + 51200 / (16 * n * h))


MEGATRON = (
    Run(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 137),
    Run(3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 138),
    Run(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 142),
    Run(18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 135),
    Run(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 138),
    Run(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 140),
    Run(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 148),
    Run(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 155),
    Run(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 163),
    Run(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 163),
    Run(174.6, 96, 12288, 96, 8, 12, 384, 1536, 1, 153),
    Run(174.6, 96, 12288, 96, 8, 12, 768, 1536, 1, 149),
    Run(174.6, 96, 12288, 96, 8, 12, 1536, 1536, 1, 141),
    Run(529.6, 128, 20480, 105, 8, 35, 560, 2240, 1, 171),
    Run(529.6, 128, 20480, 105, 8, 35, 1120, 2240, 1, 167),
    Run(529.6, 128, 20480, 105, 8, 35, 2240, 2240, 1, 159),
)


class Titan(NamedTuple):
    """A Llama 3.1 of torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (Liang et al. 2024, arXiv:2410.06511).

    Samples of 8,192 tokens. Memory is what the allocator had reserved at most (``max_reserved_gib``). Micro-batches of the
    405B runs: as many as pipeline ranks, the default at the commit that the source names (9dec370), with two stages a rank
    where interleaved. FSDP does not reshard under a pipeline there.
    """

    name: str
    billions: float
    layers: int
    width: int
    inner: int
    heads: int
    fp8: bool
    layout: Layout
    tokens_per_second: float
    gibibytes: float | None


_405B = (405.0, 126, 16384, 53248, 128, True)
_70B = (70.6, 80, 8192, 28672, 64)
_8B = (8.03, 32, 4096, 14336, 32)
TITAN = (
    Titan("405B 1F1B", *_405B, Layout(8, 8, 8, "zero2", "1F1B", 1, 4, 8, "full"), 100, 82.5),
    Titan("405B Interleaved1F1B", *_405B, Layout(8, 8, 8, "zero2", "Interleaved1F1B", 2, 4, 8, "full"), 128, 72.7),
    Titan("70B FP8", *_70B, True, Layout(32, 8, 1, "zero3", "none", 1, 16, 1, "full"), 829, 71.9),
    # benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, without asynchronous tensor parallelism
    Titan("70B", *_70B, False, Layout(32, 8, 1, "zero3", "none", 1, 16, 1, "full"), 597.3, None),
    Titan("8B on 8", *_8B, False, Layout(8, 1, 1, "zero3", "none", 1, 2, 1, "selective"), 6667, 77.0),
    Titan("8B on 128", *_8B, False, Layout(128, 1, 1, "zero3", "none", 1, 2, 1, "selective"), 6514, 62.0),
    Titan("8B FP8 on 8", *_8B, True, Layout(8, 1, 1, "zero3", "none", 1, 2, 1, "selective"), 8532, 76.8),
)
