"""Efficient-training techniques for PyTorch Lightning, stacked onto an unchanged LightningModule."""

from lightning_eff.data.importance_sampling import ImportanceSampling
from lightning_eff.data.selective_backprop import SelectiveBackprop
from lightning_eff.data.sequence_length_warmup import SequenceLengthWarmup
from lightning_eff.model.progressive_layer_dropping import ProgressiveLayerDropping
from lightning_eff.model.progressive_stacking import ProgressiveStacking
from lightning_eff.optim.latest_weight_averaging import LatestWeightAveraging
from lightning_eff.optim.sharpness_aware_minimization import SharpnessAwareMinimization

__all__ = [
    "ImportanceSampling",
    "LatestWeightAveraging",
    "ProgressiveLayerDropping",
    "ProgressiveStacking",
    "SelectiveBackprop",
    "SequenceLengthWarmup",
    "SharpnessAwareMinimization",
]
