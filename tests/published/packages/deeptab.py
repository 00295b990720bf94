"""deeptab: FT-Transformer through its scikit-learn estimator."""

from tests.published import reasons
from tests.published.package import Package, captured


def fit(callbacks, **settings):
    import numpy as np
    import pandas as pd
    from deeptab.configs import FTTransformerConfig
    from deeptab.models import FTTransformerClassifier

    draws = np.random.default_rng(0)
    table = pd.DataFrame(draws.normal(size=(30, 3)), columns=["a", "b", "c"])
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **settings,
    }
    model = FTTransformerClassifier(FTTransformerConfig(d_model=16, n_layers=3, n_heads=2))
    model.fit(
        table, (table["a"] > 0).astype(int).to_numpy(), batch_size=4, max_epochs=2, callbacks=callbacks, **settings
    )
    return model._task_model


PACKAGE = Package(
    "deeptab",
    "FT-Transformer through its scikit-learn estimator",
    lambda: captured(lambda: fit([])),
    fit=fit,
    settings={"limit_val_batches": 1.0},
    trusted=True,
    refused={
        "EightBitOptimizer": reasons.DECAY_IN_GRADIENT,
        "RMSNormalization": reasons.READ_BY_A_KERNEL,
        "Mixup": reasons.SEVERAL_INPUTS,
    },
)
