"""List the exported techniques."""

from typing import Any

from lightning_eff._exports import public


def technique_classes() -> list[Any]:
    """Return the classes of all exported techniques, sorted by name: callbacks, precision plugins and strategies."""
    from lightning.pytorch.strategies import Strategy

    from lightning_eff._core._lightning.names import is_subclass
    from lightning_eff._core.technique import Technique
    from lightning_eff._core.wrapping import WrappingPrecision

    exported = (public.found(name) for name in sorted(public.HOMES))
    how = (Technique, WrappingPrecision, Strategy)
    return [cls for cls in exported if isinstance(cls, type) and is_subclass(cls, *how)]
