"""What a block returns, seen and changed from outside; and rows of it, mixed as a batch's samples are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_eff._core.patches import Patches, hook_behind
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Around, Proceed, Step, looking
from lightning_eff.data.augmentation.mixing._convex import mixup

#: What cannot stand beside a mixture that is made within the network, and why.
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
        "the other sample of a mixture may not be among those that are chosen, and is needed within the network",
    ),
    "AutoAssist": "it first looks at losses in a pass of its own, in which nothing within the network is mixed",
}


def mixed_rows(hidden: Tensor, partner: Tensor, share: Tensor, versions: int = 1, *, who: str = "mixed_rows") -> Tensor:
    """``lambda h_i + (1 - lambda) h_j`` of what a network computed for a batch's samples, of the shape of ``hidden``.

    Args:
        hidden: (R, ...), in which each sample has as many rows, one behind the other, such as the parts of a long sequence;
            and, with several versions of the batch, the whole of it as often.
        partner: ``j``, (B,), of integers.
        share: ``lambda``, (B,) or (1,).
        versions: of each sample.
        who: begins messages.

    Raises:
        ValueError: if the rows are no multiple of the samples.
    """
    samples = versions * len(partner)
    parts, over = divmod(len(hidden), samples)
    if over or not parts:
        raise ValueError(
            f"{who}: what is mixed within the network was computed for {len(hidden)} of a batch's {samples} samples; expected"
            " all of them, as in the first batch. Let every step compute all samples at once, or take the technique out."
        )
    if len(hidden) > len(partner):
        each = torch.arange(parts)
        partner = torch.cat([partner + k * len(partner) for k in range(versions)])
        partner = (partner[:, None] * parts + each).flatten()
        share = share if len(share) == 1 else share.repeat(versions).repeat_interleave(parts)
    return mixup(hidden, partner, share)


class OutputHook:
    """Lets ``change`` say what a block returns, outside of whatever stands around its forward pass, compiled or not.

    Args:
        block: the module.
        change: of its output, what it returns instead; None leaves it.

    Attributes:
        calls: of the block, in the last pass that :meth:`around` ran.
    """

    def __init__(self, block: nn.Module, change: Callable[[Any], Any]) -> None:
        self.block, self.change = block, change
        self.calls = 0
        self._passing = False
        self._lasting = False  # it stands around a step
        self._handle: RemovableHandle | None = None
        self._patches = Patches()

    def around(self, run: Proceed, batch: Any) -> Any:
        """``run(batch)`` with the hook on, which stays on for what the backward pass runs again."""
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
        else:  # the compiler would take a hook into its graph
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
        if looking() and self._lasting:  # a pass that only looks, of the plain batch
            return None
        self.calls += self._passing
        return self.change(output)

    def _instead(self, output: Any) -> Any:
        changed = self._changed(output)
        return output if changed is None else changed


def standing_around(step: Step, session: Session, hooks: Sequence[OutputHook], batch: Any, proceed: Proceed) -> Any:
    """``proceed(batch)`` with the hooks on in each pass of the training chain, and in what its backward pass runs again."""

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
    session.when_step_ends(off)  # before others that stand around these modules take out theirs
    return output


def _inside(outer: Around | None, hook: OutputHook) -> Around:
    """What stands around a pass with the hook on, within what stood around it before."""
    if outer is None:
        return hook.around
    return lambda run, given: outer(lambda inner: hook.around(run, inner), given)
