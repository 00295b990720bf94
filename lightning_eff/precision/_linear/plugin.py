"""The base class of plugins that run linear layers in low precision."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Names
from lightning_eff._core._lightning.names import is_a
from lightning_eff._core.patches import Patches
from lightning_eff._core.wrapping import WrappingPrecision, is_unrounded
from lightning_eff.precision._linear.maps import LinearMap, Rule, block_of, linear_maps, sort_out
from lightning_eff.precision._linear.products import Arithmetic

Skip = Annotated[Collection[str], Names("keywords or dotted paths", hint="Write a tuple, such as skip=('head',).")]


class _Swapped:
    """Replace the class's ``forward`` on one linear layer's instance."""

    def __init__(self, module: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        self._module, self._run = module, run

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if is_unrounded():
            return type(self._module).forward(self._module, *args, **kwargs)
        (x,) = (*args, *kwargs.values())  # nn.Linear calls it input, Conv1D x
        return self._run(x)


class LinearPrecision(WrappingPrecision):
    """Replace the ``forward`` of linear layers during a run; parameters, names and checkpoints stay unchanged.

    The low precision applies to training and evaluation. The inner plugin computes everything else. The layers that stay
    unchanged are logged once, with the reason. A warning names the layers that the first training step did not call, because
    code that uses their weights without ``forward`` bypasses the plugin.

    Attributes:
        words: the keywords of ``skip``.

    Args:
        base: the inner plugin, or its name.
        skip: the layers to leave unchanged, see :func:`.maps.sort_out`.

    Raises:
        ValueError: at setup, if there is no linear layer to replace, ``skip`` names no module, or the strategy is DeepSpeed's.
            At the first call, if parameters are sharded over a mesh (DTensor).
    """

    words: ClassVar[tuple[str, ...]] = ("head",)

    @declared
    def __init__(self, base: str | Precision, *, skip: Skip) -> None:
        super().__init__(base, argument="base")
        self.skip = tuple(skip)
        self._patches = Patches()
        self._maps: list[LinearMap] = []
        self._block: dict[str, str] = {}
        self._called: set[str] = set()
        self._draws: Counter[str] = Counter()

    @abstractmethod
    def arithmetic(self, m: LinearMap) -> Arithmetic:
        """Return the function that computes the layer ``m`` during the run."""

    def rules(self) -> Sequence[Rule]:
        """Return further reasons to leave a layer unchanged."""
        return ()

    def generator(self, path: str, device: torch.device) -> torch.Generator:
        """Return a new generator for one use in the layer at ``path``; a resumed run gets the same ones."""
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
            found = "; ".join(f"{path}: {reason}" for path, reason in list(kept.items())[:5])
            raise ValueError(
                f"{who}(skip={self.skip}): found no linear layer to run in low precision"
                f" ({found or 'the module has no nn.Linear or Conv1D'}{', ...' if len(kept) > 5 else ''})."
                " Shorten skip, or remove the plugin."
            )
        for m in self._maps:
            self._patches.set(m.module, "forward", _Swapped(m.module, self._forward(m)))
        self._block = {m.path: block_of(m.path, module) for m in self._maps}
        self._called = set()
        self._log(kept)
        return module

    def _check(self, module: nn.Module) -> None:
        who = type(self).__name__
        if is_a(getattr(getattr(module, "_trainer", None), "strategy", None), DeepSpeedStrategy):
            raise ValueError(
                f"{who}: DeepSpeedStrategy casts tensors and steps by its own rules. Use a single device, strategy='ddp' or"
                " ModelParallelStrategy, or remove the plugin."
            )
        paths = {path for path, _ in module.named_modules()}
        unknown = [word for word in self.skip if word not in self.words and word not in paths]
        if unknown:
            layers = [m.path for m in linear_maps(module)]
            raise ValueError(
                f"{who}(skip={self.skip}): {', '.join(map(repr, unknown))} names no module. Use"
                f" {', '.join(map(repr, self.words))} or a dotted path, such as {', '.join(layers[:5])}."
            )

    def _forward(self, m: LinearMap) -> Callable[[Tensor], Tensor]:
        compute = self.arithmetic(m)

        def forward(x: Tensor) -> Tensor:
            self._called.add(m.path)
            weight, bias = m.module.weight, m.module.bias
            assert isinstance(weight, Tensor)
            if hasattr(weight, "device_mesh"):
                raise ValueError(
                    f"{type(self).__name__}: the weight of {m} is a {type(weight).__name__}, not a plain tensor. Do not shard"
                    " linear layers with tensor parallelism under this plugin."
                )
            device = x.device.type
            if not torch.is_autocast_enabled(device):
                return compute(x, weight.t() if m.transposed else weight, bias)  # pyright: ignore[reportArgumentType]
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                x = x.to(dtype) if x.is_floating_point() else x
                return compute(x, weight.t() if m.transposed else weight, bias)  # pyright: ignore[reportArgumentType]

        return forward

    def _log(self, kept: dict[str, str]) -> None:
        lines = [f"{type(self).__name__}: {len(self._maps)} linear layers run in {self.describe()}"]
        reasons: dict[str, list[str]] = {}
        for path, reason in kept.items():
            reasons.setdefault(reason, []).append(path)
        lines += [f"  unchanged, {reason}: {', '.join(paths)}" for reason, paths in reasons.items()]
        rank_zero_info("\n".join(lines))

    @abstractmethod
    def describe(self) -> str:
        """Describe the number format in a few words, for the log."""

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
        ran = {self._block[path] for path in self._called}  # a block that does not run yet calls none of its layers
        missing = [m.path for m in self._maps if m.path not in self._called and self._block[m.path] in ran]
        if missing:
            rank_zero_warn(
                f"{type(self).__name__}: the first training step did not call {', '.join(missing)}. Code that uses their"
                " weights without calling the layers bypasses the plugin; call the layers instead."
            )

    @override
    def teardown(self) -> None:
        self._patches.restore()
        self._maps = []
        super().teardown()
