"""neuralforecast: NHITS through NeuralForecast.fit, whose Trainer takes the model's keyword arguments."""

from tests.published import reasons
from tests.published.package import Package, captured


def fit(callbacks, **settings):
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    draws = np.random.default_rng(0)
    rows = [
        {
            "unique_id": str(g),
            "ds": pd.Timestamp("2024-01-01") + pd.Timedelta(days=t),
            "y": float(np.sin(t / 3 + g) + 0.1 * draws.normal()),
        }
        for g in range(24)
        for t in range(30)
    ]
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **settings,
    }
    model = NHITS(
        h=4,
        input_size=8,
        max_steps=12,
        batch_size=4,
        windows_batch_size=8,
        mlp_units=3 * [[16, 16]],
        val_check_steps=100,
        callbacks=list(callbacks),
        **settings,
    )
    forecast = NeuralForecast([model], freq="D")
    forecast.fit(pd.DataFrame(rows))
    return forecast.models[0]  # a copy of the model is what is trained


PACKAGE = Package(
    "neuralforecast",
    "NHITS on its TimeSeriesDataModule",
    lambda: captured(lambda: fit([])),
    trainer="pytorch_lightning",
    fit=fit,
    trusted=True,
    refused={
        "ProgressiveStacking": reasons.NO_COPIES,
        "StochasticDepth": reasons.NOT_RESIDUAL,
        "LayerScale": reasons.NOT_PROBED,
        "RMSNormalization": reasons.NO_LAYER_NORM,
        "SelectiveBackprop": reasons.NO_LOSS_CALL,
        "DataPruning": reasons.NO_LOGITS,
        "DifficultyPacing": reasons.NO_LOSS_CALL,
        "Mixup": reasons.NO_LOSS_CALL,
        "LabelSmoothing": reasons.NO_LOSS_CALL,
        "Rematerialization": reasons.UNEQUAL,
        "ActivationCompression": reasons.NOTHING_LARGE,
    },
)
