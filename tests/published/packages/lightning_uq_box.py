"""lightning-uq-box: mean and variance estimation, on batches that are dictionaries."""

from tests.published.package import Package


def build():
    import torch
    from lightning_uq_box.uq_methods import MVERegression
    from torch import nn

    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
    rows = [{"input": row, "target": row[:1].sin()} for row in x]
    network = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    return MVERegression(network, burnin_epochs=1), torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)


PACKAGE = Package("lightning-uq-box", "MVERegression over an MLP, batches of dictionaries", build, flags=("--no-deps",))
