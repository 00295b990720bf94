"""The maximal update parametrization without multipliers in the forward pass (Yang et al. 2022, Table 3).

Every formula is relative to a base model. A parameter has r_in times the base's inputs and r_out times its outputs::

                                       input, bias, norm    hidden         output
    standard deviation                 1                    r_in^(-1/2)    1 / r_in
    learning rate, Adam and its kind   1                    1 / r_in       1 / r_in
    learning rate, SGD                 r_out                r_out / r_in   1 / r_in

The spectral condition (Yang et al. 2023) gives the rule for Muon, whose updates have a spectral norm of one. Their norm must
grow as sqrt(r_out / r_in).

A parameter can take over a multiplier m from the forward pass. It then starts at m times the size. Its learning rate is m
times as large under Adam and Muon, and m^2 times under SGD. So the multipliers of attention and of a tied head need no change
to the forward pass.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

Rule = Literal["adam", "sgd", "spectral"]
#: The classes that each rule fits, subclasses included. The size of the first ones' updates does not depend on the gradients'.
CLASSES: Mapping[Rule, tuple[str, ...]] = {
    "adam": (
        *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "SparseAdam"),
        *("Lion", "Adan", "AdamWScheduleFree"),
    ),
    "sgd": ("SGD", "SGDScheduleFree"),
    "spectral": ("Muon",),
}


@dataclass(frozen=True)
class Role:
    """The function of a parameter, and its shape compared with the base's.

    Attributes:
        kind: "input" for all parameters with a fixed number of inputs: embeddings, biases, norms and first layers.
        inputs: the number of inputs, and the base's.
        outputs: the number of outputs, and the base's.
        multiplier: m, the part of it that the parameter takes over from the forward pass.
    """

    kind: Literal["input", "hidden", "output"]
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    multiplier: float = 1.0

    @property
    def r_in(self) -> float:
        """The number of inputs relative to the base's."""
        return self.inputs[0] / self.inputs[1]

    @property
    def r_out(self) -> float:
        """The number of outputs relative to the base's."""
        return self.outputs[0] / self.outputs[1]


def std_factor(role: Role) -> float:
    """Return the first standard deviation of a parameter, relative to the base's."""
    power = {"input": 0.0, "hidden": -0.5, "output": -1.0}[role.kind]
    return role.multiplier * role.r_in**power


def rate_factor(role: Role, rule: Rule) -> float:
    """Return the learning rate of a parameter, relative to the base's; for "spectral", without the optimizer's own scale."""
    if rule == "sgd":
        return role.multiplier**2 * role.r_out / role.r_in
    if rule == "spectral":
        return role.multiplier * math.sqrt(role.r_out / role.r_in)
    return role.multiplier / role.r_in


def rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Rule | None:
    """Return the rule that fits the class of an optimizer, or its group; None for other classes."""
    if group.get("algorithm") == "adamw":  # the other parameters of Muon
        return "adam"
    names = [cls.__name__.removeprefix("Paged").removesuffix("8bit") for cls in type(optimizer).__mro__]
    return next((rule for name in names for rule, known in CLASSES.items() if name in known), None)


def own_scale(group: Mapping[str, Any], role: Role, shape: Sequence[int], base: Sequence[int]) -> float:
    """Return by how much a Muon's own scale of its updates, a function of the shape, exceeds that for the base.

    This package's Muon names the scale in ``scale``, of (out, in), and torch's in ``adjust_lr_fn``, of the tensor's shape.
    """
    if "scale" in group:
        sizes = [(role.outputs[i], role.inputs[i]) for i in (0, 1)]
    else:
        sizes = [(shape[0], shape[1]), (base[0], base[1])]
    matches = "match_rms_adamw" in (group.get("scale"), group.get("adjust_lr_fn"))
    wide, narrow = (max(a, b) if matches else max(1.0, a / b) for a, b in sizes)
    return math.sqrt(wide / narrow)


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's numbers, computed in float64."""
    return float(tensor.detach().double().square().mean().sqrt())
