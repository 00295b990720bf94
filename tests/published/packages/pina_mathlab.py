"""pina-mathlab: a physics-informed PirateNet on the Poisson equation, through the package's own Trainer."""

from tests.published import reasons
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
    refused={
        "SelectiveBackprop": reasons.DERIVATIVES,
        "DataPruning": reasons.NO_DATA_LOADER,
        "DifficultyPacing": reasons.NO_DATA_LOADER,
        "RMSNormalization": reasons.NO_LAYER_NORM,
        "Mixup": reasons.DERIVATIVES,
        "LabelSmoothing": reasons.DERIVATIVES,
        "LayerScale": reasons.NOT_PROBED,
        "SwapActivation": reasons.NO_ACTIVATION,
        "ActivationCompression": reasons.NOTHING_LARGE,
    },
    known=dict.fromkeys(
        ("LoRA", "INT8Precision"),
        "The package's LabelTensor has no to() without labels, and what a layer returns has none.",
    ),
)
