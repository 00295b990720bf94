"""pytorch-tabular: FT-Transformer through TabularModel.fit."""

from tests.published import reasons
from tests.published.package import Package, captured


def fit(callbacks, **settings):
    import numpy as np
    import pandas as pd
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import FTTransformerConfig

    draws = np.random.default_rng(0)
    table = pd.DataFrame(draws.normal(size=(24, 3)), columns=["a", "b", "c"])
    table["kind"] = [str(i % 3) for i in range(24)]
    table["target"] = (table["a"] > 0).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]),
        model_config=FTTransformerConfig(
            task="classification", input_embed_dim=16, num_heads=2, num_attn_blocks=3, attn_dropout=0.0, ff_dropout=0.0
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=4,
            max_epochs=2,
            accelerator="cpu",
            progress_bar="none",
            checkpoints=None,
            early_stopping=None,
            load_best=False,
            trainer_kwargs={"enable_model_summary": False, **settings},
        ),
        verbose=False,
        suppress_lightning_logger=True,
    )
    model.fit(train=table, validation=table, callbacks=list(callbacks), seed=7)
    return model.model


PACKAGE = Package(
    "pytorch-tabular",
    "FT-Transformer, classification, on its TabularDatamodule",
    lambda: captured(lambda: fit([])),
    flags=("--no-deps",),
    trainer="pytorch_lightning",
    fit=fit,
    trusted=True,
    refused={
        "ProgressiveStacking": reasons.NEEDS_ALL,
        "StochasticDepth": reasons.READ_BY_OTHERS,
        "Mixup": reasons.PARTLY_MIXED,
        "StochasticRoundingBF16": reasons.NO_BFLOAT16,
    },
)
