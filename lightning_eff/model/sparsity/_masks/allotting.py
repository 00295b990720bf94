"""The number of elements that each weight keeps: the same fraction of each, or more of the small weights (ERK)."""

from collections.abc import Mapping
from math import prod

from lightning_eff.model.sparsity._masks.arguments import Distribution
from lightning_eff.model.sparsity._masks.finding import Block, Weight


def erk(dims: Mapping[str, tuple[int, ...]], counts: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """The fraction of each weight that is kept under Erdős-Rényi-Kernel (Evci et al. 2019).

    ``1 - s^l = eps (n_out + n_in + w + h) / (n_out n_in w h)``, at most 1, with ``eps`` such that all weights together keep
    ``1 - sparsity``.

    Args:
        dims: the sizes of each weight.
        counts: the number of elements of each.
        sparsity: of all together, in [0, 1).
    """
    budget, whole = (1.0 - sparsity) * sum(counts.values()), set[str]()
    raw = {name: sum(sizes) / prod(sizes) for name, sizes in dims.items()}
    while True:
        rest = [name for name in dims if name not in whole]
        left = budget - sum(counts[name] for name in whole)
        eps = left / sum(raw[name] * counts[name] for name in rest) if rest else 0.0
        over = {name for name in rest if eps * raw[name] > 1.0}
        if not over:
            return {name: 1.0 if name in whole else eps * raw[name] for name in dims}
        whole |= over


def allotted(
    weights: Mapping[str, Weight], sparsity: float, distribution: Distribution, block: Block = (1, 1)
) -> dict[str, int]:
    """The number of blocks that each weight keeps, at least 1."""
    if distribution == "uniform":
        shares = dict.fromkeys(weights, 1.0 - sparsity)
    else:
        shares = erk({n: w.dims for n, w in weights.items()}, {n: w.numel for n, w in weights.items()}, sparsity)
    return {name: max(round(shares[name] * w.num_blocks(block)), 1) for name, w in weights.items()}
