"""The stacks of blocks that the techniques of one run use: found once, shared, and verified while they run."""

import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from lightning_eff._core import rng
from lightning_eff._core._branches.side_by_side import side_by_side
from lightning_eff._core._stack.verifying import Verifying
from lightning_eff._core.blocks import BlockStack, Candidate, Layers, find_stack, find_stages
from lightning_eff._core.steps import looking_on, silent

_OURS = Path(__file__).parents[2]


class Stacks:
    """The part of a session that manages stacks of blocks."""

    def take_module(self, module: LightningModule, *, sizes: dict[str, tuple[int, int]], fitting: bool) -> None:
        """Start with a module, without any stack."""
        self.module, self.sizes, self.fitting = module, sizes, fitting
        self._stacks: dict[str, BlockStack] = {}
        self._askers: dict[str, list[str]] = {}

    def stack(
        self, layers: Layers, *, who: str, chain: bool = True, parts: bool = False, copies: bool = False
    ) -> BlockStack:
        """Return the stack of blocks at ``layers`` (or the longest), one object for all techniques that use it.

        Args:
            layers: the blocks, as in :func:`find_stack`; None finds them automatically.
            who: the technique's name, for messages.
            chain: whether each block must feed the next one, which the first training steps verify. Otherwise any list is
                accepted.
            parts: whether the first steps may run a single block, so that this must be checked before.
            copies: whether blocks must be copies of others, for messages.

        Raises:
            ValueError: if there is no such stack, or its blocks run side by side.
        """
        ties = functools.partial(side_by_side, self.module, always=parts)
        without = ties if chain else functools.partial(side_by_side, self.module, by_name=True)
        named = parts and self.fitting
        found = find_stack(
            self.module, layers, who=who, in_runs=True, copies=copies, without=without, ties=ties, named=named
        )
        return self._stack(found, who, chain=chain)

    def stages(self, layers: Layers, *, who: str) -> list[BlockStack]:
        """Return the stacks that ``layers`` names (or all of the most frequent block class), in order."""
        without = functools.partial(side_by_side, self.module)
        return [self._stack(found, who) for found in find_stages(self.module, layers, who=who, without=without)]

    def _stack(self, found: Candidate, who: str, *, chain: bool = True) -> BlockStack:
        self._refuse_shared(found, who)
        if found.path not in self._stacks:
            self._stacks[found.path] = BlockStack(found, self.module, who=who)
            rank_zero_info(f"{who}: blocks found at {found}")
        stack = self._stacks[found.path]
        self._askers.setdefault(found.path, []).append(who)
        if chain and self.fitting and stack.verifying is None:
            stack.verifying = Verifying(found, self.module, who=who, adds=stack.scales)
        return stack

    def _refuse_shared(self, found: Candidate, who: str) -> None:
        """Raise ``ValueError`` if blocks that were named individually are also in a stack of another technique."""
        ids = {id(block) for block in found.blocks}
        for path, stack in self._stacks.items():
            if path != found.path and (found.by_name or stack.by_name) and not ids.isdisjoint(map(id, stack.blocks)):
                first = " and ".join(dict.fromkeys(self._askers[path]))
                raise ValueError(
                    f"{who}: some blocks of {found} are also in {stack}, which {first} uses. Give both techniques the same"
                    f" layers=, such as layers={path!r}."
                )

    def thaw_blocks(self) -> None:
        """Show what the module itself trains, because techniques and model summaries look for it."""
        for stack in self._stacks.values():
            stack.thaw()

    def freeze_blocks(self) -> None:
        """Freeze the blocks that do not run or train yet."""
        for stack in self._stacks.values():
            stack.freeze_inactive()

    def release_blocks(self) -> None:
        """Restore all blocks, and forget the stacks."""
        for stack in self._stacks.values():
            stack.release()
        self._stacks.clear()

    def verify(self, output: Any) -> None:
        """Raise ``ValueError`` if a training step, which returned ``output``, showed that a stack is not one."""
        for stack in self._stacks.values():
            stack.verify(output)

    def verifying_whole(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a pipeline's ``training_step``, which runs on the whole module only at setup, to verify the stacks there."""

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            stacks = [s for s in self._stacks.values() if s.verifying is not None and s.verifying.fresh]
            if not stacks or not torch.is_grad_enabled():
                return step(*args, **kwargs)
            for stack in stacks:
                stack.verifying.begin(frozenset())  # pyright: ignore[reportOptionalMemberAccess]
            output = step(*args, **kwargs)
            self.verify(output)
            return output

        return training_step

    def check_verified(self, strategy: Any) -> None:
        """Raise ``ValueError`` if a pipeline was cut before its whole module ran; other open checks are dropped."""
        for path, stack in self._stacks.items():
            if stack.verifying is not None and stack.verifying.fresh:
                who = " and ".join(dict.fromkeys(self._askers[path]))
                raise ValueError(
                    f"{who}: {type(strategy).__name__} cut {stack} before its blocks ran, so it is not known whether one can be"
                    f" left out. Make the weights on all ranks (init_on='all'), or remove {who}."
                )
            stack.verifying = None

    def missing_blocks(self) -> str | None:
        """Return which blocks do not run in the current step, and which technique skips them; None if all run."""
        for path, stack in self._stacks.items():
            runs = len(stack.running())
            if runs < len(stack):
                return f"{' and '.join(dict.fromkeys(self._askers[path]))}: {runs} of the {len(stack)} blocks of {stack} run"
        return None

    def explain(self, error: Exception, missing: str | None, step: Callable[[], Any]) -> None:
        """Raise ``ValueError`` if a training step failed because some blocks do not run.

        To find out, the step runs again with all blocks, without a trace. This package's own errors are not changed.

        Args:
            error: the step's error.
            missing: the result of :meth:`missing_blocks` during the step.
            step: the module's own step, on the same batch.
        """
        frames = traceback.extract_tb(error.__traceback__)
        if missing is None or not frames or Path(frames[-1].filename).is_relative_to(_OURS):
            return
        if not self.module.automatic_optimization:  # the step itself updates weights, so it cannot run again
            error.add_note(
                f"{missing} in this step. If the module needs all of them, remove {missing.partition(':')[0]}."
            )
            return
        try:
            with torch.no_grad(), rng.fork(), silent(self.module), looking_on():
                step()
        except Exception:  # it also fails with all blocks
            return
        raise ValueError(
            f"{missing} in this step, where training_step raised {type(error).__name__} ({error}). With all blocks it works,"
            f" so the module needs what every block computes. Remove {missing.partition(':')[0]}."
        ) from error

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Return the blocks that the network runs now: (path, running blocks, running blocks that take gradients).

        There is one entry per stack in use, by path, then one for each of ``sizes``. Within ``training_step`` it counts the
        blocks of this step, without dropped ones; elsewhere the active blocks.
        """
        return (*_running(self._stacks), *((name, *size) for name, size in sorted(self.sizes.items())))


def _running(stacks: dict[str, BlockStack]) -> Iterator[tuple[str, int, int]]:
    """Yield for each stack, by path, how many of its blocks run, and how many of those take gradients."""
    for path, stack in sorted(stacks.items()):
        run = stack.running()
        yield path, len(run), sum(any(p.requires_grad for p in block.parameters()) for block in run)
