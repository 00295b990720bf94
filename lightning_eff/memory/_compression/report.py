"""Report the bytes that a pass held."""

import torch

from lightning_eff.memory._compression.engine import Engine
from lightning_eff.memory._compression.ledger import Ledger
from lightning_eff.memory._compression.saved import COMPRESSED, SMALL


def report(engine: Engine | None, *, offload: bool) -> dict[str, float | int]:
    """Return the quantities of an engine's last pass, all zero before there is one.

    Args:
        engine: the engine, or None before there is one.
        offload: whether to include the bytes in host memory.
    """
    ledger = Ledger() if engine is None else engine.ledger
    of, saved = ledger.by_category, ledger.saved_bytes
    found: dict[str, float | int] = {
        "saved_bytes": saved,
        "exact_bytes": ledger.exact_bytes,
        "ratio": ledger.exact_bytes / saved if saved else 1.0,
        "bits": ledger.bits,
        "unfit": ledger.unfit,
        **{f"{category}_bytes": of[category] for category in COMPRESSED},
        "kept_bytes": sum(count for category, count in of.items() if category not in COMPRESSED),
    }
    if offload:
        found["host_bytes"] = ledger.host_bytes
    if torch.cuda.is_available():
        found["allocated_bytes"] = ledger.allocated_bytes
    return found


def refuse_idle(who: str, ledger: Ledger) -> None:
    """Check that a pass compressed at least one of the tensors that it saved.

    Args:
        who: the class's name, for the message.
        ledger: the ledger of the pass.

    Raises:
        ValueError: if none could be compressed.
    """
    acted = any(ledger.by_category[category] for category in COMPRESSED) or ledger.host_bytes or ledger.unfit
    if ledger.exact_bytes and not acted:
        kept = ", ".join(f"{category} {count:,}" for category, count in ledger.by_category.items() if count)
        raise ValueError(
            f"{who}: none of the {ledger.exact_bytes:,} bytes that the first step saves could be compressed (kept: {kept};"
            f" tensors of fewer than {SMALL} elements are too small). Remove {who}."
        )
