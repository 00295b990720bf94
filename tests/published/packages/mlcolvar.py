"""mlcolvar: an autoencoder of collective variables on its DictModule, whose loader is no torch DataLoader."""

from tests.published import reasons
from tests.published.package import Package


def build():
    import torch
    from mlcolvar.cvs import AutoEncoderCV
    from mlcolvar.data import DictDataset, DictModule

    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    options = {"encoder": {"activation": "relu"}, "decoder": {"activation": "relu"}, "optimizer": {"lr": 1e-3}}
    loader = DictModule(DictDataset({"data": data}), lengths=[1.0], batch_size=4)
    return AutoEncoderCV([8, 16, 16, 2], options=options), loader


PACKAGE = Package(
    "mlcolvar",
    "AutoEncoderCV on its DictModule",
    build,
    requirements=("KDEpy", "mlcolvar"),
    flags=("--no-deps",),
    trusted=True,
    refused={
        **dict.fromkeys(
            ("ProgressiveStacking", "StochasticDepth", "LayerFreezing", "Rematerialization"), reasons.NO_STACK
        ),
        "LayerScale": reasons.NO_BRANCH,
        "RMSNormalization": reasons.NO_LAYER_NORM,
        "SelectiveBackprop": reasons.NO_LOSS_CALL,
        "DataPruning": reasons.NO_DATA_LOADER,
        "DifficultyPacing": reasons.NO_DATA_LOADER,
        "Mixup": reasons.NO_LOSS_CALL,
        "LabelSmoothing": reasons.NO_LOSS_CALL,
        "ActivationCompression": reasons.NOTHING_LARGE,
        "StochasticRoundingBF16": reasons.OTHER_DTYPES,
    },
)
