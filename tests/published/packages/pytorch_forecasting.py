"""pytorch-forecasting: the temporal fusion transformer on its TimeSeriesDataSet and loader."""

from tests.published import reasons
from tests.published.package import Package


def build():
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    draws = np.random.default_rng(0)
    rows = [
        {
            "time": t,
            "group": str(g),
            "value": float(np.sin(t / 3 + g) + 0.1 * draws.normal()),
            "price": float(draws.normal()),
        }
        for g in range(2)
        for t in range(25)
    ]
    data = TimeSeriesDataSet(
        pd.DataFrame(rows),
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=10,
        min_encoder_length=10,
        max_prediction_length=4,
        static_categoricals=["group"],
        time_varying_known_reals=["time", "price"],
        time_varying_unknown_reals=["value"],
    )
    module = TemporalFusionTransformer.from_dataset(
        data,
        hidden_size=8,
        attention_head_size=2,
        hidden_continuous_size=8,
        dropout=0.1,
        learning_rate=1e-2,
        optimizer="adam",
    )
    return module, data.to_dataloader(train=True, batch_size=4, num_workers=0)


PACKAGE = Package(
    "pytorch-forecasting",
    "TemporalFusionTransformer on its TimeSeriesDataSet",
    build,
    trusted=True,
    refused={
        **dict.fromkeys(
            ("ProgressiveStacking", "StochasticDepth", "LayerFreezing", "Rematerialization"), reasons.SINGLE_LAYERS
        ),
        "LayerScale": reasons.NOT_PROBED,
        "DataPruning": reasons.NO_LOGITS,
        **dict.fromkeys(("SelectiveBackprop", "DifficultyPacing", "Mixup", "LabelSmoothing"), reasons.NO_LOSS_CALL),
    },
)
