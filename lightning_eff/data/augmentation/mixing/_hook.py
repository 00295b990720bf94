"""Hooks that change the output of a block, and the mixing of its rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_eff._core.patches import Patches, hook_behind
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed, Step, looking
from lightning_eff.data.augmentation.mixing._convex import mixup

#: Techniques that cannot be combined with mixing inside the network, and why.
CHOOSERS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "EfficientSAM",
            "ImportanceSampling",
            "KSAM",
            "LossBiasedSampling",
            "OrderedSGD",
            "ProxySelection",
            "RandomSubset",
            "RHOLoss",
            "SelectiveBackprop",
        ),
        "the other sample of a mixture is needed inside the network, but may not be among the chosen ones",
    ),
    "AutoAssist": "it first computes losses in a pass of its own, in which nothing inside the network is mixed",
}


def mixed_rows(hidden: Tensor, partner: Tensor, share: Tensor, versions: int = 1, *, who: str = "mixed_rows") -> Tensor:
    """Return ``lambda h_i + (1 - lambda) h_j`` of the hidden states of a batch, in the shape of ``hidden``.

    Args:
        hidden: (R, ...). Each sample has the same number of consecutive rows, for example the parts of a long sequence. With
            several versions of the batch, all rows of one version come before those of the next.
        partner: ``j``, (B,), integers.
        share: ``lambda``, (B,) or (1,).
        versions: the number of versions of each sample.
        who: the beginning of messages.

    Raises:
        ValueError: if the number of rows is not a multiple of the number of samples.
    """
    samples = versions * len(partner)
    parts, over = divmod(len(hidden), samples)
    if over or not parts:
        raise ValueError(
            f"{who}: the hidden states have {len(hidden)} rows for a batch of {samples} samples, so not all samples are there"
            f" to be mixed. Let every step compute all samples at once, or remove {who.partition(':')[0]}."
        )
    if len(hidden) > len(partner):
        each = torch.arange(parts)
        partner = torch.cat([partner + k * len(partner) for k in range(versions)])
        partner = (partner[:, None] * parts + each).flatten()
        share = share if len(share) == 1 else share.repeat(versions).repeat_interleave(parts)
    return mixup(hidden, partner, share)


class OutputHook:
    """Replaces the output of a block, compiled or not, outside of all other wrappers of its forward pass.

    Args:
        block: the module.
        change: a function of the output that returns the new output, or None to keep it.

    Attributes:
        calls: the number of calls of the block in the last pass that :meth:`around` ran.
    """

    def __init__(self, block: nn.Module, change: Callable[[Any], Any]) -> None:
        self.block, self.change = block, change
        self.calls = 0
        self._passing = False
        self._lasting = False  # whether it is on for a whole step
        self._handle: RemovableHandle | None = None
        self._patches = Patches()

    def around(self, run: Proceed, batch: Any) -> Any:
        """Return ``run(batch)`` with the hook on. It stays on for what the backward pass recomputes."""
        self.on()
        self.calls, self._passing, self._lasting = 0, True, True
        try:
            return run(batch)
        except BaseException:
            self.off()
            raise
        finally:
            self._passing = False

    def on(self) -> "OutputHook":
        self.off()
        compiled = self.block._compiled_call_impl
        if compiled is None:
            self._handle = hook_behind(self.block, lambda block, args, output: self._changed(output))
        else:  # the compiler would trace a hook into its graph
            self._patches.set(
                self.block, "_compiled_call_impl", lambda *args, **kwargs: self._instead(compiled(*args, **kwargs))
            )
        return self

    def off(self) -> None:
        self._patches.restore()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _changed(self, output: Any) -> Any:
        if looking() and self._lasting:  # a pass without training, on the unmixed batch
            return None
        self.calls += self._passing
        return self.change(output)

    def _instead(self, output: Any) -> Any:
        changed = self._changed(output)
        return output if changed is None else changed


def standing_around(step: Step, session: Session, hooks: Sequence[OutputHook], batch: Any, proceed: Proceed) -> Any:
    """Return ``proceed(batch)`` with the hooks on in each pass of the step and in what the backward pass recomputes."""

    def off() -> None:
        for hook in hooks:
            hook.off()

    before = step.around
    around: Around | None = before
    for hook in hooks:
        around = _inside(around, hook)
    step.around = around
    try:
        output = proceed(batch)
    except BaseException:
        off()
        raise
    finally:
        step.around = before
    session.when_step_ends(off)  # before other techniques remove their wrappers of these modules
    return output


def _inside(outer: Around | None, hook: OutputHook) -> Around:
    """Return the wrapper of a pass that turns the hook on, inside the existing wrapper."""
    if outer is None:
        return hook.around
    return lambda run, given: outer(lambda inner: hook.around(run, inner), given)
