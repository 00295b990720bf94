"""darts: TransformerModel, whose Trainer takes ``pl_trainer_kwargs``."""

from tests.published import reasons
from tests.published.package import Package, captured


def fit(callbacks, **settings):
    import numpy as np
    from darts import TimeSeries
    from darts.models import TransformerModel

    draws = np.random.default_rng(0)
    values = (np.sin(np.arange(35) / 3) + 0.1 * draws.normal(size=35)).astype("float32")
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **settings,
    }
    model = TransformerModel(
        input_chunk_length=8,
        output_chunk_length=4,
        d_model=16,
        nhead=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=16,
        batch_size=4,
        n_epochs=2,
        random_state=7,
        pl_trainer_kwargs={"callbacks": list(callbacks), **settings},
    )
    model.fit(TimeSeries.from_values(values))
    return model.model


PACKAGE = Package(
    "darts",
    "TransformerModel on its own data set",
    lambda: captured(lambda: fit([])),
    trainer="pytorch_lightning",
    fit=fit,
    trusted=True,
    refused={
        "ProgressiveStacking": reasons.TWO_STACKS,
        "StochasticDepth": reasons.TWO_STACKS,
        "LayerFreezing": reasons.TWO_STACKS,
        "SwapActivation": reasons.NO_ACTIVATION,
        "DataPruning": reasons.SAMPLES_SECOND,
        "Mixup": reasons.LABELS_ELSEWHERE,
        "LabelSmoothing": reasons.NO_CLASSES,
        "Rematerialization": reasons.TWO_STACKS,
        "StochasticRoundingBF16": reasons.OTHER_DTYPES,
    },
)
