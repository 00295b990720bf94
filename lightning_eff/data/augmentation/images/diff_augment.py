"""DiffAugment: transform real and generated images before the discriminator of a GAN (Zhao et al. 2020)."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Number, SomeOf, Text
from lightning_eff._core._needs.needs import DIFFERS, Need, Part, Reasons
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, SearchSpace, needs_images
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Technique
from lightning_eff.data.augmentation._arguments import Until
from lightning_eff.data.augmentation._boxes import inside
from lightning_eff.data.augmentation._engine import BASELINE, check_until

WHO = "DiffAugment"
_DISCRIMINATOR = re.compile(r"(.*_)?(discriminator|critic|disc|net_?d|d)", re.IGNORECASE)


def _uniform(x: Tensor, generator: Generator, low: float, high: float) -> Tensor:
    """Draw a number for each image, (B, 1, 1, 1)."""
    u = torch.rand(len(x), 1, 1, 1, generator=generator, dtype=torch.float32)
    return (u * (high - low) + low).to(x.device, x.dtype)


def color(x: Tensor, generator: Generator, span: float) -> Tensor:
    """Change brightness, ``x + u span / 2``, then saturation and contrast, ``mean + v (x - mean)``.

    The mean is over channels for saturation, and over the image for contrast. ``u`` is uniform in [-0.5, 0.5], ``v`` in [0, 2]
    for saturation and in [0.5, 1.5] for contrast.
    """
    x = x + _uniform(x, generator, -0.5, 0.5) * (span / 2)
    mean = x.mean(dim=1, keepdim=True)
    x = mean + _uniform(x, generator, 0.0, 2.0) * (x - mean)
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + _uniform(x, generator, 0.5, 1.5) * (x - mean)


def translation(x: Tensor, generator: Generator, span: float) -> Tensor:
    """Shift by up to an eighth of each side, in whole pixels. Pixels from outside are 0."""
    for dim in (2, 3):
        size = x.shape[dim]
        most = int(size / 8 + 0.5)
        shift = torch.randint(-most, most + 1, (len(x), 1), generator=generator).to(x.device)
        source = torch.arange(size, device=x.device) + shift
        shape = (len(x), 1, size, 1) if dim == 2 else (len(x), 1, 1, size)
        index = source.clamp(0, size - 1).view(shape)
        x = x.gather(dim, index.expand(x.shape)) * ((source >= 0) & (source < size)).view(shape)
    return x


def cutout(x: Tensor, generator: Generator, span: float) -> Tensor:
    """Set a box of half of each side to 0. Its centre is any pixel, and it is clipped at the border."""
    count, (height, width) = len(x), x.shape[2:]
    boxes: list[Tensor] = []
    for size in (height, width):
        length = int(size * 0.5 + 0.5)
        centre = torch.randint(0, size + (1 - length % 2), (count,), generator=generator)
        boxes += [centre - length // 2, torch.full((count,), length)]
    top, rows, left, columns = boxes
    return x.masked_fill(inside(top, left, rows, columns, (height, width), x.device)[:, None], 0.0)


TRANSFORMS: dict[str, Callable[[Tensor, Generator, float], Tensor]] = {
    "color": color,
    "translation": translation,
    "cutout": cutout,
}


def diff_augment(x: Tensor, policy: Sequence[str], generator: Generator, span: float = 2.0) -> Tensor:
    """Return ``T(x)`` with separate draws for each image. It is differentiable in ``x``, any number of times.

    Args:
        x: floating-point images, (B, C, H, W).
        policy: names of :data:`TRANSFORMS`, applied in this order.
        generator: makes the draws, on the CPU.
        span: the value of white minus that of black, 2 for images from -1 to 1.
    """
    for name in policy:
        x = TRANSFORMS[name](x, generator, span)
    return x


def find_discriminator(module: nn.Module, path: str | None) -> str:
    """Return the path of the discriminator: the given one, or the only submodule with such a name.

    Raises:
        ValueError: if there is none, or if there are several.
    """
    named = {name: m for name, m in module.named_modules() if name}
    listed = ", ".join([name for name, _ in module.named_children()][:5]) or "none"
    if path is not None:
        if path not in named:
            raise ValueError(
                f"{WHO}(discriminator={path!r}): {type(module).__name__} has no such submodule. Name another one (it has"
                f" {listed})."
            )
        return path
    found = [name for name in named if _DISCRIMINATOR.fullmatch(name.rpartition(".")[2])]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outer) != 1:
        told = f"several submodules, {', '.join(outer)}, are" if outer else "no submodule is"
        raise ValueError(
            f"{WHO}: {told} called a discriminator or critic in {type(module).__name__}, which has {listed}. Name the"
            f" network that judges images, such as discriminator='judge', or remove {WHO}."
        )
    return outer[0]


class DiffAugment(Technique):
    """Show real and generated images to the discriminator of a GAN through the same random, differentiable transforms.

    All images that ``training_step`` passes to the discriminator, in its own step and in that of the generator, become ``T(x)``
    first. Each image of each call has its own draws. So the discriminator cannot memorise a small number of real images. The
    generator is trained through ``T``, and so it does not learn to generate transformed images, as it would if only real images
    were transformed.

    Use it for GANs with few images (some thousands, in the paper). It costs a little time per call of the discriminator.

    Several optimizers and manual optimization work unchanged. Validation and sampling do not use ``T``. A gradient penalty is
    taken at the images before ``T``. Two-pass methods draw the same in both passes.

    The discriminator is the only submodule with such a name (``discriminator``, ``critic``, ``netD``), or the one that you
    name. It must be called as a module, with one tensor of images (B, C, H, W) among its arguments. Other arguments are
    unchanged.

    It logs ``calls``, the number of calls of the discriminator in the last step, and ``milliseconds``, the host time of ``T``.

    Args:
        policy: the transforms, in the order in which they are applied. The paper uses all three for small data sets, and
            "translation" and "cutout" for CIFAR-10 with all its images. An empty list is plain training.
        span: the value of white minus that of black. It is 2 for images from -1 to 1, and 1 for images from 0 to 1. Brightness
            changes by up to a quarter of it.
        discriminator: the dotted path of the network that judges images. None looks for it by name.
        until: the fraction of the budget after which images are left unchanged. 0 is plain training.

    Raises:
        ValueError: for a value out of range. At setup, if ``until`` is below 1 and the run has no end, if no discriminator is
            found, or if it is compiled. In the first step, if it is called on no or several tensors of images, or not at all.

    Example:
        >>> trainer = L.Trainer(max_epochs=1000, callbacks=[DiffAugment(["color", "translation", "cutout"])])

    References:
        Zhao et al. 2020, "Differentiable Augmentation for Data-Efficient GAN Training", arXiv:2006.10738.
    """

    saves = "real images: a GAN trains on fewer of them without its discriminator memorising them"
    paper = "Zhao et al. 2020, arXiv:2006.10738"
    constraints = "needs a discriminator that is a submodule, called on images (B, C, H, W) of a known range"
    needs: ClassVar[Need] = Need.CALLS
    refuses: ClassVar[Reasons] = {
        Part.TENSOR: DIFFERS,
        Part.PIPELINE: "the technique draws for all images of a batch at once",
    }
    search_space = SearchSpace(
        {"policy": Choice((("color", "translation", "cutout"), ("translation", "cutout"), ("translation",)))},
        needs_images,
    )
    control = BASELINE
    needs_automatic_optimization: ClassVar[bool] = False
    checkpointed = ("_calls", "_milliseconds", "_total", "_called")
    stage = Stage.REWEIGHT
    order = 2  # each pass of a two-pass method repeats its draws

    def __init__(
        self,
        policy: Annotated[Sequence[str], SomeOf(tuple(TRANSFORMS), once=True)] = ("color", "translation", "cutout"),
        *,
        span: Annotated[float, Number(above=0)] = 2.0,
        discriminator: Annotated[str | None, Text("a dotted path of a submodule")] = None,
        until: Until = 1.0,
    ) -> None:
        self.policy = tuple(policy)
        self.span = span
        self.discriminator = discriminator
        self.until = until

    def _reset(self) -> None:
        self._path = ""
        self._called = False  # whether some step has called it
        self._calls, self._milliseconds, self._total = 0, 0.0, 0
        self._handle: RemovableHandle | None = None

    @property
    @override
    def neutral(self) -> bool:
        return not self.policy or self.until == 0.0

    # -- the run

    @override
    def check(self, session: Session) -> None:
        check_until(session, who=WHO, until=self.until)

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self._path = find_discriminator(session.module, self.discriminator)
        found = session.module.get_submodule(self._path)
        if found._compiled_call_impl is not None or hasattr(found, "_orig_mod"):
            raise ValueError(
                f"{WHO}: the discriminator {self._path!r} is compiled as a whole, so its input cannot be changed. Compile"
                f" submodules of it instead, or remove {WHO}."
            )
        rank_zero_info(f"{WHO}: the discriminator is {self._path!r}, of the class {type(found).__name__}")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._calls, self._milliseconds = 0, 0.0
        self._over()  # the hook of the first pass of a two-pass method is still on
        if self.until < 1.0 and self.session.progress.u >= self.until:
            return proceed(batch)
        found = step.module.get_submodule(self._path)
        key = (step.global_step, step.batch_idx, self.session.rank)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return None if looking() else self._transformed(args, kwargs, key)

        self._handle = hook_before(found, before, prepend=True, with_kwargs=True)
        try:
            output = proceed(batch)
        except BaseException:
            self._over()
            raise
        self.session.when_step_ends(self._over)  # gradient checkpointing may recompute the call in the backward pass
        if not self._called:
            on_all_ranks(self.session, self._check_called)
            self._called = True
        self._total += self._calls
        return output

    def _over(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _check_called(self) -> None:
        if not self._calls:
            raise ValueError(
                f"{WHO}: training_step did not call {self._path!r} as a module in its first step, so nothing would be"
                f" transformed. Name the network that judges images with discriminator=, or remove {WHO}."
            )

    def _transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[int, ...]) -> Any:
        """Return the discriminator's arguments with ``T(x)`` in place of the images."""
        held = [*args, *kwargs.values()]
        images = [t for t in held if isinstance(t, Tensor) and t.ndim == 4 and t.is_floating_point()]
        if len(images) != 1:
            told = ", ".join(str(tuple(t.shape)) for t in held if isinstance(t, Tensor)) or "no tensors"
            raise ValueError(
                f"{WHO}: {self._path!r} was called on {told}, and not on exactly one floating-point tensor of images"
                f" (B, C, H, W). Name the network that judges images with discriminator=, or remove {WHO}."
            )
        start = time.perf_counter()
        (x,) = images
        self._calls += torch._C._current_graph_task_id() == -1  # calls that the backward pass recomputes do not count
        # as for dropout, gradient checkpointing restores torch's random state when it recomputes a call
        at = int(torch.randint(2**31, ()))
        generator = self.session.generator(WHO, *key, at)
        made = diff_augment(x, self.policy, generator, self.span)
        self._milliseconds += 1000 * (time.perf_counter() - start)
        return (
            tuple(made if value is x else value for value in args),
            {name: made if value is x else value for name, value in kwargs.items()},
        )

    # -- what is logged and saved

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"calls": self._calls, "milliseconds": self._milliseconds}

    @override
    def summary(self) -> str:
        return (
            f"transformed the images of {self._total:,} calls of the discriminator {self._path or '(not yet found)'!r}"
        )
