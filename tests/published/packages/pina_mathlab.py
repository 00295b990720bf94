"""pina-mathlab: a physics-informed PirateNet on the Poisson equation, through the package's own Trainer."""

from tests.published.package import Package


def trainer(module, **settings):
    from pina import Trainer

    return Trainer(module, batch_size=4, **settings)


def build():
    from pina.model import PirateNet
    from pina.problem.zoo import Poisson2DSquareProblem
    from pina.solver import PhysicsInformedSingleModelSolver

    problem = Poisson2DSquareProblem()
    problem.discretise_domain(24, "random", domains=["D", "boundary"])
    solver = PhysicsInformedSingleModelSolver(problem, PirateNet(2, 16, 1))
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    data = trainer(solver, **quiet, enable_checkpointing=False, enable_model_summary=False).data_module
    return solver, data


PACKAGE = Package(
    "pina-mathlab",
    "PirateNet on the Poisson equation, with derivatives by its inputs in the loss",
    build,
    imports="pina",
    trainer_of=trainer,
    trusted=True,
    known={
        "SelectiveBackprop": "A pass for losses alone keeps no graph, and this step takes derivatives by its inputs.",
        "StochasticDepth": "Labels of the package's own tensor class are lost where a dropped block hands its input on.",
        "Rematerialization": "Labels of the package's own tensor class are lost where a block's inputs are detached.",
    },
)
