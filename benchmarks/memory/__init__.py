"""What the techniques of ``lightning_eff.memory`` save and cost: ``python -m benchmarks.memory --help``."""
