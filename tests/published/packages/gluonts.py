"""gluonts: DeepAR through PyTorchLightningEstimator.train, whose Trainer takes ``trainer_kwargs``."""

from tests.published import reasons
from tests.published.package import Package, captured


def fit(callbacks, **settings):
    import numpy as np
    import pandas as pd
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import PatchTSTEstimator

    draws = np.random.default_rng(0)
    data = ListDataset(
        [
            {"start": pd.Period("2024-01-01", "D"), "target": np.sin(np.arange(60) / 3) + 0.1 * draws.normal(size=60)}
            for _ in range(6)
        ],
        freq="D",
    )
    np.random.seed(7)
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **settings,
    }
    estimator = PatchTSTEstimator(
        prediction_length=4,
        context_length=16,
        patch_len=4,
        stride=4,
        d_model=16,
        nhead=2,
        dim_feedforward=16,
        num_encoder_layers=3,
        dropout=0.0,
        batch_size=4,
        num_batches_per_epoch=6,
        trainer_kwargs={"callbacks": list(callbacks), **settings},
    )
    return estimator.train_model(data).trained_net


PACKAGE = Package(
    "gluonts",
    "PatchTST on its own iterable loader",
    lambda: captured(lambda: fit([])),
    fit=fit,
    trusted=True,
    refused={
        "EightBitOptimizer": reasons.DECAY_IN_GRADIENT,
        "SwapActivation": reasons.NO_ACTIVATION,
        "SelectiveBackprop": reasons.NO_LOSS_CALL,
        "DataPruning": reasons.NO_DATA_LOADER,
        "DifficultyPacing": reasons.NO_DATA_LOADER,
        "Mixup": reasons.NO_LOSS_CALL,
        "LabelSmoothing": reasons.NO_LOSS_CALL,
    },
)
