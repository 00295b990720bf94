"""Pipeline parallelism for an unchanged LightningModule, on PyTorch's own stages and schedules."""
