"""Update rules: ``torch.optim.Optimizer`` subclasses for any ``configure_optimizers``."""
