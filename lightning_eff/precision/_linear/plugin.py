"""The base of plugins that run linear maps in an arithmetic of their own."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._lightning.names import is_a
from lightning_eff._core.patches import Patches
from lightning_eff._core.wrapping import WrappingPrecision, is_unrounded
from lightning_eff.precision._linear.maps import LinearMap, Rule, block_of, linear_maps, sort_out

Arithmetic = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``f(x, weight, bias)`` is ``x weight^T + bias``, of shape (..., N), for ``x`` (..., K) and ``weight`` (N, K)."""


def by_rows(compute: Arithmetic) -> Arithmetic:
    """``compute``, of inputs (B, K), for inputs of any leading dimensions.

    The view is made outside of an autograd Function, whose own views may not be changed in place (``nn.ReLU(inplace=True)``).
    """

    def shaped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return compute(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])

    return shaped


class _Swapped:
    """Stands on a linear map's instance for its class's ``forward``."""

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        self._module, self._run = module, run

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if is_unrounded():
            return type(self._module).forward(self._module, *args, **kwargs)
        (x,) = (*args, *kwargs.values())  # nn.Linear calls it input, Conv1D x
        return self._run(x)


class LinearPrecision(WrappingPrecision):
    """Exchanges the ``forward`` of linear maps for the length of a run; parameters, names and checkpoints stay.

    The arithmetic applies to training and evaluation. Everything else is computed as the inner plugin has it. Maps that
    stay as they are are told with the reason, once; and a warning names maps that no training step has called, since
    code that uses their weights past ``forward`` is not seen.

    Attributes:
        words: those of ``skip`` that are no paths.

    Args:
        base: the inner plugin, or its name.
        skip: what stays as it is, see :func:`.maps.sort_out`.

    Raises:
        ValueError: at setup, if no linear map is left to exchange, ``skip`` names no module, or the strategy is
            DeepSpeed's; at the first call, if parameters are sharded over a mesh (DTensor).
    """

    words: ClassVar[tuple[str, ...]] = ("head",)

    def __init__(self, base: str | Precision, *, skip: Collection[str]) -> None:
        super().__init__(base, argument="base")
        if isinstance(skip, str):
            raise TypeError(f"{type(self).__name__}(skip={skip!r}): expected a tuple of words, such as ({skip!r},).")
        self.skip = tuple(skip)
        self._patches = Patches()
        self._maps: list[LinearMap] = []
        self._block: dict[str, str] = {}
        self._called: set[str] = set()
        self._draws: Counter[str] = Counter()

    @abstractmethod
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        """What computes the map ``m`` from now on."""

    def rules(self) -> Sequence[Rule]:
        """Further reasons for which a map stays as it is."""
        return ()

    def generator(self, path: str, device: torch.device) -> torch.Generator:
        """Random numbers for one use in the map at ``path``, the next one each time; the same in a resumed run."""
        number, self._draws[path] = self._draws[path], self._draws[path] + 1
        return torch.Generator(device).manual_seed(self.seed(path, number))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._patches.restore()
        module = super().convert_module(module)
        who = type(self).__name__
        self._check(module)
        self._maps, kept = sort_out(module, self.skip, self.rules())
        if not self._maps:
            reasons = "".join(f"\n  {path}: {reason}" for path, reason in kept.items()) or " none was found"
            raise ValueError(
                f"{who}: no linear map is left to run in another arithmetic; expected one nn.Linear or Conv1D at least."
                f" What stays as it is:{reasons}\nTake words out of skip, or the plugin out."
            )
        for m in self._maps:
            self._patches.set(m.module, "forward", _Swapped(m.module, self._forward(m)))
        self._block = {m.path: block_of(m.path, module) for m in self._maps}
        self._called = set()
        self._tell(kept)
        return module

    def _check(self, module: nn.Module) -> None:
        who = type(self).__name__
        if is_a(getattr(getattr(module, "_trainer", None), "strategy", None), DeepSpeedStrategy):
            raise ValueError(
                f"{who}: got DeepSpeedStrategy, which casts and steps by its own rules; expected a single device, DDP or"
                " ModelParallelStrategy. Take another strategy, or the plugin out."
            )
        paths = {path for path, _ in module.named_modules()}
        unknown = [word for word in self.skip if word not in self.words and word not in paths]
        if unknown:
            maps = ", ".join(m.path for m in linear_maps(module))
            raise ValueError(
                f"{who}(skip={self.skip}): {', '.join(map(repr, unknown))} names no module; expected"
                f" {', '.join(map(repr, self.words))}, or dotted paths. Linear maps: {maps}."
            )

    def _forward(self, m: LinearMap) -> Callable[[Tensor], Tensor]:
        compute = self.arithmetic(m)

        def forward(x: Tensor) -> Tensor:
            self._called.add(m.path)
            weight, bias = m.module.weight, m.module.bias
            assert isinstance(weight, Tensor)
            if hasattr(weight, "device_mesh"):
                raise ValueError(
                    f"{type(self).__name__}: the weight of {m} is a {type(weight).__name__}; expected a plain tensor when"
                    " the map runs. Do not shard linear maps by tensor parallelism under this plugin."
                )
            device = x.device.type
            if not torch.is_autocast_enabled(device):
                return compute(x, weight.t() if m.transposed else weight, bias)  # pyright: ignore[reportArgumentType]
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                x = x.to(dtype) if x.is_floating_point() else x
                return compute(x, weight.t() if m.transposed else weight, bias)  # pyright: ignore[reportArgumentType]

        return forward

    def _tell(self, kept: dict[str, str]) -> None:
        lines = [f"{type(self).__name__}: {len(self._maps)} linear maps run in {self.describe()}"]
        reasons: dict[str, list[str]] = {}
        for path, reason in kept.items():
            reasons.setdefault(reason, []).append(path)
        lines += [f"  as they are, {reason}: {', '.join(paths)}" for reason, paths in reasons.items()]
        rank_zero_info("\n".join(lines))

    @abstractmethod
    def describe(self) -> str:
        """The arithmetic in a few words, for the log."""

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        self._draws.clear()
        with super().train_step_context():
            try:
                yield
            except RuntimeError as error:
                mixed = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
                if mixed and re.search("dtype|scalar type", str(error)):
                    who = type(self).__name__
                    error.add_note(
                        f"{who} runs the module in mixed precision here. To keep it in float32: {who}('32-true')."
                    )
                raise
        if self._passes:
            return
        ran = {self._block[path] for path in self._called}  # a block that does not run yet calls none of its maps
        missing = [m.path for m in self._maps if m.path not in self._called and self._block[m.path] in ran]
        if missing:
            rank_zero_warn(
                f"{type(self).__name__}: the first training step did not call {', '.join(missing)}: if their weights are"
                " used past forward, that part is computed as without the plugin."
            )

    @override
    def teardown(self) -> None:
        self._patches.restore()
        self._maps = []
        super().teardown()
