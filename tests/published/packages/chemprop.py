"""chemprop: message passing over molecules, with its own data set, collation and loader."""

from tests.published import reasons
from tests.published.package import Package

SMILES = ["C" * n + end for n in (1, 2, 3, 4, 5, 6) for end in ("O", "N", "Cl", "C=O")]


def build():
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(smiles, [float(len(smiles)) / 5]) for smiles in SMILES]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=True, seed=3)
    passing = nn.BondMessagePassing(d_h=16, depth=3)
    return models.MPNN(
        passing, nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16), batch_norm=True
    ), loader


PACKAGE = Package(
    "chemprop",
    "MPNN with bond message passing, regression",
    build,
    trusted=True,
    refused={
        "ProgressiveStacking": reasons.NO_STACK,
        "StochasticDepth": reasons.NO_STACK,
        "LayerFreezing": reasons.NO_STACK,
        "LayerScale": reasons.NOT_PROBED,
        "RMSNormalization": reasons.NO_LAYER_NORM,
        "SelectiveBackprop": reasons.NO_SAMPLES,
        "DataPruning": reasons.NO_LOSS_CALL,
        "DifficultyPacing": reasons.NO_LOSS_CALL,
        "Mixup": reasons.NO_CLASSES,
        "LabelSmoothing": reasons.NO_CLASSES,
        "Rematerialization": reasons.NO_STACK,
        "StochasticRoundingBF16": reasons.OTHER_DTYPES,
    },
)
