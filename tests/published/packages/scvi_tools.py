"""scvi-tools: SCVI through its TrainingPlan, AnnDataLoader and its own ``train``."""

from tests.published import reasons
from tests.published.package import Package, captured


def model():
    import anndata
    import numpy as np
    import scvi

    draws = np.random.default_rng(0)
    cells = anndata.AnnData(draws.poisson(2.0, (24, 12)).astype("float32"))
    cells.obs["batch"] = [str(i % 2) for i in range(24)]
    scvi.settings.seed = 7
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    return scvi.model.SCVI(cells, n_hidden=16, n_latent=4, n_layers=2)


def fit(callbacks, **settings):
    one = model()
    one.train(max_epochs=2, batch_size=4, train_size=1.0, accelerator="cpu", callbacks=callbacks, **settings)
    return one.module


PACKAGE = Package(
    "scvi-tools",
    "SCVI, its TrainingPlan and AnnDataLoader",
    lambda: captured(lambda: fit([])),
    imports="scvi",
    fit=fit,
    refused={
        "EightBitOptimizer": reasons.DECAY_IN_GRADIENT,
        **dict.fromkeys(
            ("ProgressiveStacking", "StochasticDepth", "LayerFreezing", "Rematerialization"), reasons.NO_STACK
        ),
        "LayerScale": reasons.NOT_PROBED,
        "RMSNormalization": reasons.NO_LAYER_NORM,
        "DataPruning": reasons.NO_LOGITS,
        **dict.fromkeys(("SelectiveBackprop", "DifficultyPacing", "Mixup", "LabelSmoothing"), reasons.NO_LOSS_CALL),
        "ActivationCompression": reasons.NOTHING_LARGE,
    },
)
