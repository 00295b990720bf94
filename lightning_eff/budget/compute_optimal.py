"""The size of a language model and the tokens that a budget of compute is best spent on (Hoffmann et al. 2022; refit 2024)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """A law of loss over parameters ``N`` and training tokens ``D``: ``L(N, D) = E + A / N^alpha + B / D^beta``."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    source: str

    def loss(self, parameters: float, tokens: float) -> float:
        """Nats a token, of ``parameters`` > 0 trained on ``tokens`` > 0."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    def best(self, flops: float, flops_per_weight: float = 6.0) -> tuple[float, float]:
        """The parameters and tokens of lowest loss whose training takes ``flops`` > 0.

        With ``C = k N D``, ``N = G (C/k)^a`` and ``D = (C/k)^b / G``, where ``G = (alpha A / (beta B))^(1/(alpha+beta))``,
        ``a = beta / (alpha+beta)`` and ``b = alpha / (alpha+beta)``.

        Args:
            flops: ``C``, of the whole training.
            flops_per_weight: ``k``, of a parameter and a token, forward and backward.
        """
        both = self.alpha + self.beta
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        product = flops / flops_per_weight
        return G * product ** (self.beta / both), product ** (self.alpha / both) / G


#: Besiroglu et al. 2024 (arXiv:2404.10102): the data of Chinchilla's figure 4, fitted again.
REFIT = Fit(1.8172, 482.01, 2085.43, 0.3478, 0.3658, "Besiroglu et al. 2024, arXiv:2404.10102")
#: As printed; its exponents are rounded, and it contradicts the paper's own model of 70e9 parameters and 1.4e12 tokens.
PUBLISHED = Fit(1.69, 406.4, 410.7, 0.34, 0.28, "Hoffmann et al. 2022, arXiv:2203.15556, as printed")


def check_amount(name: str, value: float | None, unit: str) -> None:
    """Raises: ValueError: for what is no finite number above zero."""
    if value is not None and not (0 < value < math.inf):
        raise ValueError(f"--{name} {value:g}: expected {unit}, a finite number above 0.")
