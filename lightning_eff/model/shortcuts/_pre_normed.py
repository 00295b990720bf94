"""Post-norm blocks that compute pre-norm: how they are recognised, and how their own code runs.

A block's code computes ``h_j = N_j(h_{j-1} + F_j(h_{j-1}))`` for j = 1 to k, from its input h_0. To compute

    s_j = s_{j-1} + F_j(N_j(s_{j-1}))

from the same input s_0, it gets ``N_1(s_0)`` instead. Its j-th sum is replaced by s_j, its j-th call of a norm returns
``N_{j+1}(s_j)``, and its last call of a norm returns s_k.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_eff._core._architecture.derived import Derived
from lightning_eff._core._branches.sums import Run, Sums, calls_of, replaced
from lightning_eff._core._resume.marks import Marked
from lightning_eff._core.blocks import hidden_of, split_output

WHO = "PreNorm"
FORM = "expected h = N1(x + F(x)), then N2(h + G(h)) as its output, with norms that are modules"
WAY_OUT = "Name another stack with layers=, or remove the callback."
_MOST = 8  # branches of a block


class NotPostNorm(ValueError):
    """A block does not have the form of a post-norm block."""


class Place:
    """Whether a block runs, shared with the hooks of its norms."""

    def __init__(self) -> None:
        self.runs = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.runs = 0


class Within:
    """A pre-hook of a norm, which raises if the norm is called outside of its block.

    The block's code would then compute a part of the post-norm block, as when it recomputes only that part in the backward
    pass.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.place.runs:
            raise RuntimeError(
                f"{WHO}: {type(module).__name__} was called outside of its block, where it is still a post-norm. The block's"
                " code may recompute a part of itself in the backward pass. Recompute whole blocks with Rematerialization,"
                " or remove the callback."
            )


class PreNormBlock(Derived, Marked):
    """A mixin for a class of post-norm blocks, which computes pre-norm with its code and its parameters.

    Attributes:
        norms: the dotted paths of N_1 to N_k in the block.
        place: whether it runs now.
    """

    prefix = "PreNorm"

    norms: tuple[str, ...]
    place: Place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        entered = hidden_of(args, kwargs)
        if entered.is_nested:
            raise RuntimeError(
                f"{WHO}: a block got a nested tensor. Create nn.TransformerEncoder(..., enable_nested_tensor=False)."
            )
        norms = [self.get_submodule(path) for path in self.norms]
        sums: Sums
        stream, calls = entered, 0

        def add(branch: Tensor) -> Tensor:
            nonlocal stream
            stream = stream + branch
            return stream

        def norm(m: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal calls
            if calls == sums.count - 1 and args and args[0] is sums.left and m is norms[calls]:
                calls += 1
                if calls == len(norms):
                    return stream
                sums.left = runs[calls](stream)
                return sums.left
            return run(*args, **kwargs)

        runs: list[Run] = [m._call_impl for m in norms]
        self.place.runs += 1
        try:
            given = runs[0](entered)
            args, kwargs = replaced(args, kwargs, entered, given)
            sums = Sums(given, *[add] * len(norms))
            with calls_of(dict.fromkeys(norms), norm), sums:
                output = super().forward(*args, **kwargs)
        finally:
            self.place.runs -= 1
        hidden, rest = split_output(output)
        if calls != len(norms) or hidden is not stream:
            raise RuntimeError(
                f"{WHO}: {type(self).__name__} ran {calls} of its {len(norms)} norms behind sums in this pass. It may compute"
                f" something else in training, or for other inputs. {WAY_OUT}"
            )
        final = self._modules.get(FINAL)
        if final is None:
            return output
        hidden = final(hidden)
        return hidden if rest is None else type(output)((hidden, *rest))


FINAL = "lightning_eff_final_norm"  #: the name of the norm behind the last block, in that block


class _Trace(NamedTuple):
    """What a call of a plain block did.

    Attributes:
        norms: the modules that were called with its sums.
        branches: the terms that were added.
        totals: the sums.
        last: the output of the last norm, or the last sum without one.
        output: the block's output.
    """

    norms: list[nn.Module]
    branches: list[Tensor]
    totals: list[Tensor]
    last: Tensor
    output: Any


def _trace(
    block: nn.Module,
    run: Run,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    entered: Tensor,
    *,
    follow: bool = True,
    forced: Sequence[Tensor] = (),
) -> _Trace:
    """Run a plain block; with ``follow`` norms are looked for behind sums, and ``forced`` replaces the first sums."""
    norms: list[nn.Module] = []
    branches: list[Tensor] = []
    totals: list[Tensor] = []

    def add(branch: Tensor) -> Tensor:
        branches.append(branch)
        at = len(totals)
        totals.append(forced[at] if at < len(forced) else sums.left + branch)
        return totals[-1]

    def note(m: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = run(*args, **kwargs)
        waits = follow and len(norms) == sums.count - 1 and bool(args) and args[0] is sums.left
        if waits and output is not args[0] and is_norm(m, run, args, kwargs, output):
            norms.append(m)
            sums.left = output
        return output

    sums = Sums(entered, *[add] * _MOST)
    with calls_of([*block.modules()][1:], note), sums:
        output = run(*args, **kwargs)
    return _Trace(norms, branches, totals, sums.left, output)


def is_norm(m: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Return whether a module without matrices has the same output for a multiple of its input."""
    given = args[0]
    if not isinstance(output, Tensor) or output.shape != given.shape or any(p.ndim > 1 for p in m.parameters()):
        return False
    x = torch.randn_like(given)
    one, three = (run(scale * x, *args[1:], **kwargs).detach().float() for scale in (1, 3))
    return _alike(one, three, 1e-2)


def _alike(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, tolerance, tolerance * float(b.abs().max()))


def norms_of(index: int, block: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run a plain block, and return its output and the paths of its norms.

    Raises:
        NotPostNorm: if it does not have the form.
    """
    entered = hidden_of(args, kwargs)
    told = f"{WHO}: block {index} ({type(block).__name__})"
    seen = _trace(block, run, args, kwargs, entered)
    try:
        hidden, _ = split_output(seen.output)
    except TypeError as e:
        raise NotPostNorm(f"{WHO}: {e}") from e
    if not seen.norms or hidden is not seen.last or len(seen.norms) != len(seen.totals):
        plain = _trace(block, run, args, kwargs, entered, follow=False)
        if plain.totals and split_output(plain.output)[0] is plain.last:
            raise NotPostNorm(
                f"{told} has no norm behind its last sum, so it is pre-norm already, or has no norms. {WAY_OUT}"
            )
        raise NotPostNorm(
            f"{told} has {len(seen.totals)} residual sums and {len(seen.norms)} norms behind them; {FORM}. {WAY_OUT}"
        )
    # the same sums for another input: each later branch may depend only on the norm before it
    other = torch.randn_like(entered)
    again = _trace(
        block, run, *replaced(args, kwargs, entered, other), other, forced=[t.detach() for t in seen.totals[:-1]]
    )
    alike = len(again.branches) == len(seen.branches) and all(
        _alike(a.detach(), b.detach(), 1e-3) for a, b in zip(again.branches[1:], seen.branches[1:], strict=True)
    )
    if not alike:
        raise NotPostNorm(f"{told} has a branch that depends on more than the norm before it; {FORM}. {WAY_OUT}")
    paths = {id(m): path for path, m in block.named_modules()}
    return seen.output, tuple(paths[id(m)] for m in seen.norms)
