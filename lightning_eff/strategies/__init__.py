"""Strategies: one per Trainer, over torch.distributed and DeepSpeed."""
