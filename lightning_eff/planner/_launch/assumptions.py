"""What a plan assumes, with where each figure is from. Nothing heavy is imported here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Assumptions:
    """What the table and the profile do not say.

    Attributes:
        efficiency: matmul rate in a model over the best matmul's, in (0, 1]. 0.74 is what one layer of a 22B GPT on 8
            A100 took (19.6 ms forward and backward, Korthikanti et al. 2022, arXiv:2205.05198, table 4), less its
            exchange and memory traffic by this model; nothing here is fitted to whole training runs.
        memory_efficiency: share of the memory's bandwidth that kernels reach.
        node_efficiency: share of the node's links that collectives reach (80 %: 8 H200, all-gather, reduce-scatter and
            ring all-reduce, stas00/ml-engineering network/README.md).
        network_efficiency: share of the network cards' rate that collectives reach (73 %: 4 nodes of 8 B200, ibid.).
        node_latency_seconds: of one exchange within a node (calculon-ai/calculon, systems/a100_80g.json).
        network_latency_seconds: of one exchange between nodes (ibid.).
        fused: everything between two matmuls is one kernel, as a compiler or hand-written kernels have it; otherwise
            each operation reads and writes memory by itself, as eager mode does.
        pack: memory and messages are those of this pack's strategies: under tensor parallelism the hidden state, the
            logits and the loss are whole on every rank; FSDP gathers weights in their own type, and autocast makes 16-bit
            copies of them in each micro-batch, kept with its activations; a pipeline's receive buffers are there for all
            micro-batches, and the last step's gradients through the next one's passes. False takes all of that as
            Megatron-LM and torchtitan have it, for the comparison with published runs: the vocabulary is divided, 16-bit
            copies are made once, and buffers are only those of micro-batches in flight.
        sequence_parallel: with ``pack=False``, what lies between the matmuls that tensor parallelism divides is divided
            along the sequence.
        host_link: bytes/s, one direction, between an accelerator and its host (assumed: PCIe 5.0 x16 at 40 %).
        host_memory: bytes/s of an accelerator's share of its host's memory (assumed: 400 GB/s of a node of 8).
        usable_memory: share of the memory that is left after the driver, NCCL and fragmentation.
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
                raise ValueError(f"Assumptions({name}={value}): expected a share in (0, 1].")
        for name in ("host_link", "host_memory"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Assumptions({name}={getattr(self, name)}): expected bytes/s > 0.")
