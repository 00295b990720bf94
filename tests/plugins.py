"""One case for each exported precision plugin: how the contract's tests set it up, and what it must refuse.

A case stands beside its plugin's own tests, in their file: ``PLUGINS = {"Plugin": PluginCase(...)}``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_eff._core.wrapping import WrappingPrecision
from tests.beside import SideOutputs, beside


@dataclass(frozen=True)
class PluginCase:
    """How one plugin is tried.

    Attributes:
        build: makes it around a precision, so that it acts within a run of 12 steps of 4 samples.
        precisions: around which it is tried.
        lossy: whether what it computes depends on which tensors autograd saves.
        restores_dtypes: whether the module has its own dtypes again after the run, where Lightning's precision leaves others.
    """

    build: Callable[[Any], WrappingPrecision]
    precisions: tuple[str, ...] = ("32-true", "bf16-mixed")
    lossy: bool = False
    restores_dtypes: bool = False


PLUGINS: SideOutputs[PluginCase] = SideOutputs(beside("PLUGINS", of="tests.plugins.PluginCase"), "PLUGINS")
