"""The honest comparison of a recipe with its baseline, and a monitor of what a run uses."""

from lightning_eff.bench.benchmark import Benchmark
from lightning_eff.bench.monitor import EfficiencyMonitor
from lightning_eff.bench.pace import Budget, Incomparable

__all__ = ["Benchmark", "Budget", "EfficiencyMonitor", "Incomparable"]
