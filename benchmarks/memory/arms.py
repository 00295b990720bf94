"""The ways of training that are compared."""

from benchmarks.memory.measure import Arm
from lightning_eff import ActivationCompression, ActivationOffload, OptimizerOffload, Rematerialization

BUDGETS = (0.75, 0.5, 0.35)


def arms(*, tiny: bool = False) -> dict[str, Arm]:
    """All of them, by name. ``compile 1.0`` is torch's compiler with no budget, to set its others against."""
    min_bytes = 2**10 if tiny else 2**20
    found = [
        Arm("plain"),
        Arm("full", lambda layers: [Rematerialization(layers=layers)]),
        Arm("sqrt", lambda layers: [Rematerialization(policy="sqrt", layers=layers)]),
        Arm("selective", lambda layers: [Rematerialization(policy="selective", layers=layers)]),
        *(within(budget) for budget in BUDGETS),
        *(within(budget, offload=True) for budget in BUDGETS),
        *(compiled(budget) for budget in (1.0, *BUDGETS)),
        Arm("offload", lambda layers: [ActivationOffload(min_bytes=min_bytes)]),
        Arm("compress 8", lambda layers: [ActivationCompression(bits=8)]),
        Arm("compress 4", lambda layers: [ActivationCompression(bits=4)]),
        Arm("compress 2", lambda layers: [ActivationCompression(bits=2)]),
        Arm("compress auto", lambda layers: [ActivationCompression(bits="auto")]),
        Arm(
            "compress 4, sqrt",
            lambda layers: [ActivationCompression(bits=4), Rematerialization(policy="sqrt", layers=layers)],
        ),
        Arm("optimizer offload", lambda layers: [OptimizerOffload()]),
    ]
    return {arm.name: arm for arm in found}


def within(budget: int | float, *, offload: bool = False, name: str = "") -> Arm:
    """The optimal plan for a budget, in bytes (int) or as a fraction (float) of what storing all takes."""

    def techniques(layers: str | None) -> list[Rematerialization]:
        return [Rematerialization(policy="optimal", memory_budget=budget, offload=offload, layers=layers)]

    return Arm(name or f"optimal{' offload' if offload else ''} {budget}", techniques)


def compiled(budget: float, *, name: str = "") -> Arm:
    """torch.compile of the whole model under its ``activation_memory_budget``: inductor on a GPU, aot_eager on a CPU."""
    return Arm(name or f"compile {budget}", compiled=budget)
