"""Efficient-training techniques for PyTorch Lightning, stacked onto an unchanged LightningModule."""
