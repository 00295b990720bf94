"""The assumptions of a plan, each with its source. This module imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """The numbers that the table of accelerators and the profile do not provide.

    With ``pack=True`` memory and messages are those of this package's strategies. Under tensor parallelism the hidden
    state, the logits and the loss are whole on every rank. FSDP gathers weights in their own type. Autocast makes 16-bit
    copies of them in each micro-batch and keeps them with its activations. A pipeline has receive buffers for all
    micro-batches, and keeps the last step's gradients during the next step.

    With ``pack=False`` they are those of Megatron-LM and torchtitan, for the comparison with published runs. The vocabulary
    is divided, 16-bit copies are made once, and only micro-batches in flight have buffers.

    No value is fitted to whole training runs. ``efficiency`` comes from one layer of a 22B GPT on 8 A100 (19.6 ms forward
    and backward, Korthikanti et al. 2022, arXiv:2205.05198, table 4). This model's exchange and memory traffic are
    subtracted from that time.

    Attributes:
        efficiency: matmul speed in a model, as a fraction in (0, 1] of the best matmul's.
        memory_efficiency: fraction of the memory's bandwidth that kernels reach.
        node_efficiency: fraction of the node's link bandwidth that collectives reach (80 %: 8 H200, all-gather,
            reduce-scatter and ring all-reduce, stas00/ml-engineering network/README.md).
        network_efficiency: the same for the network cards (73 %: 4 nodes of 8 B200, ibid.).
        node_latency_seconds: of one exchange within a node (calculon-ai/calculon, systems/a100_80g.json).
        network_latency_seconds: of one exchange between nodes (ibid.).
        fused: one kernel computes everything between two matmuls, as with a compiler. Otherwise each operation reads and
            writes memory, as in eager mode.
        pack: see above.
        sequence_parallel: with ``pack=False``, divide the activations outside tensor-parallel matmuls along the sequence.
        host_link: bytes/s, one direction, between an accelerator and its host (assumed: PCIe 5.0 x16 at 40 %).
        host_memory: bytes/s of host memory for each accelerator (assumed: 400 GB/s in a node of 8).
        usable_memory: fraction of the memory that the driver, NCCL and fragmentation leave.
    """

    efficiency: float = 0.74
    memory_efficiency: float = 0.85
    node_efficiency: float = 0.8
    network_efficiency: float = 0.73
    node_latency_seconds: float = 1e-5
    network_latency_seconds: float = 2e-5
    fused: bool = False
    pack: bool = True
    sequence_parallel: bool = True
    host_link: float = 2.5e10
    host_memory: float = 5e10
    usable_memory: float = 0.9

    def __post_init__(self) -> None:
        for name in ("efficiency", "memory_efficiency", "node_efficiency", "network_efficiency", "usable_memory"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ValueError(f"Assumptions({name}={value}): expected a fraction in (0, 1], such as 0.8.")
        for name in ("host_link", "host_memory"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Assumptions({name}={getattr(self, name)}): expected bytes/s > 0, such as 2.5e10.")
