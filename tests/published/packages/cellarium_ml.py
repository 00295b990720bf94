"""cellarium-ml: logistic regression of cell types, in a CellariumModule that builds its model in configure_model."""

from tests.published.package import Package


def build():
    import numpy as np
    import torch
    from cellarium.ml import CellariumModule
    from cellarium.ml.models import LogisticRegression

    genes = np.array([f"g{i}" for i in range(12)])
    kinds = np.array(["a", "b", "c"])
    x = torch.randn(24, 12, generator=torch.Generator().manual_seed(0))
    rows = [{"x_ng": row, "y_n": i % 3} for i, row in enumerate(x)]

    def collate(items):
        return {
            "x_ng": torch.stack([item["x_ng"] for item in items]),
            "y_n": torch.tensor([item["y_n"] for item in items]),
            "var_names_g": genes,
            "y_categories": kinds,
        }

    model = LogisticRegression(n_obs=24, var_names_g=genes, y_categories=kinds)
    module = CellariumModule(model=model, optim_fn=torch.optim.Adam, optim_kwargs={"lr": 1e-2})
    return module, torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)


PACKAGE = Package("cellarium-ml", "LogisticRegression in a CellariumModule", build, trusted=True)
