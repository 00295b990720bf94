"""chemprop: message passing over molecules, with its own data set, collation and loader."""

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


PACKAGE = Package("chemprop", "MPNN with bond message passing, regression", build, trusted=True)
