"""pina-mathlab: a physics-informed network on the Poisson equation, through its own Trainer."""

from tests.published.package import Package, captured


def fit(callbacks, **settings):
    import torch
    from pina import Trainer
    from pina.model import FeedForward
    from pina.problem.zoo import Poisson2DSquareProblem
    from pina.solver import PINN

    torch.manual_seed(7)
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(24, "grid")
    solver = PINN(problem, FeedForward(2, 1, inner_size=16, n_layers=3))
    settings = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False, **settings}
    Trainer(
        solver, batch_size=4, train_size=1.0, callbacks=list(callbacks), enable_model_summary=False, **settings
    ).train()
    return solver


PACKAGE = Package(
    "pina-mathlab",
    "PINN on the Poisson equation, batches of conditions",
    lambda: captured(lambda: fit([])),
    fit=fit,
    trusted=True,
)
