"""The honest comparison of a recipe with its baseline, and a monitor of what a run uses."""

from lightning_eff.bench.benchmark import Benchmark as Benchmark
from lightning_eff.bench.benchmark import Budget as Budget
