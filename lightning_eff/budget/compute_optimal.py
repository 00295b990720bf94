"""The compute-optimal size and training tokens of a language model (Hoffmann et al. 2022, refit 2024)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """A scaling law of the loss over parameters ``N`` and training tokens ``D``: ``L(N, D) = E + A / N^alpha + B / D^beta``."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss in nats per token of ``parameters`` > 0 trained on ``tokens`` > 0."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def best(self, flops: float, flops_per_weight: float = 6.0) -> tuple[float, float]:
        """Return the parameters and tokens with the lowest loss for a training compute of ``flops`` > 0.

        With ``C = k N D``, ``N = G (C/k)^a`` and ``D = (C/k)^b / G``, where ``G = (alpha A / (beta B))^(1/(alpha+beta))``,
        ``a = beta / (alpha+beta)`` and ``b = alpha / (alpha+beta)``.

        Args:
            flops: ``C``, the FLOPs of the whole training run.
            flops_per_weight: ``k``, the FLOPs per parameter and token, forward and backward.
        """
        both = self.alpha + self.beta
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        product = flops / flops_per_weight
        return G * product ** (self.beta / both), product ** (self.alpha / both) / G


#: Besiroglu et al. 2024 (arXiv:2404.10102): a new fit to the data of Chinchilla's figure 4.
REFIT = Fit(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, arXiv:2404.10102")
#: As printed. Its exponents are rounded, and it contradicts the paper's own model of 70e9 parameters and 1.4e12 tokens.
PUBLISHED = Fit(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, arXiv:2203.15556, as printed")


def check_amount(name: str, value: float | None, unit: str) -> None:
    """Check an amount given on the command line.

    Raises:
        ValueError: if it is not a finite number above zero.
    """
    if value is not None and not (0 < value < math.inf):
        raise ValueError(f"--{name} {value:g}: expected {unit}, a finite number above 0.")
