"""DiffAugment: the discriminator of a GAN sees real and generated images through one differentiable T (Zhao et al. 2020)."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._needs.needs import DIFFERS, Need, Part, Reasons
from lightning_eff._core._run.ranks import on_all_ranks
from lightning_eff._core.patches import hook_before
from lightning_eff._core.search_space import Choice, RunProfile, SearchSpace, Survey
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control, Technique
from lightning_eff.data.augmentation._arguments import check_number
from lightning_eff.data.augmentation._boxes import inside

WHO = "DiffAugment"
_DISCRIMINATOR = re.compile(r"(.*_)?(discriminator|critic|disc|net_?d|d)", re.IGNORECASE)


def _uniform(x: Tensor, generator: Generator, low: float, high: float) -> Tensor:
    """A number for each image, (B, 1, 1, 1)."""
    u = torch.rand(len(x), 1, 1, 1, generator=generator, dtype=torch.float32)
    return (u * (high - low) + low).to(x.device, x.dtype)


def color(x: Tensor, generator: Generator, span: float) -> Tensor:
    """Brightness ``x + u span / 2``, then saturation and contrast ``mean + v (x - mean)``, over channels and over all.

    ``u`` is even in [-0.5, 0.5], ``v`` in [0, 2] and in [0.5, 1.5].
    """
    x = x + _uniform(x, generator, -0.5, 0.5) * (span / 2)
    mean = x.mean(dim=1, keepdim=True)
    x = mean + _uniform(x, generator, 0.0, 2.0) * (x - mean)
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return mean + _uniform(x, generator, 0.5, 1.5) * (x - mean)


def translation(x: Tensor, generator: Generator, span: float) -> Tensor:
    """A shift by up to an eighth of each side, in whole pixels; what comes from outside is 0."""
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
    """A box of half of each side becomes 0; its centre is any pixel, and it ends at the border."""
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
    """``T(x)``, each image by its own draws; differentiable in ``x``, as often as wanted.

    Args:
        x: images, (B, C, H, W) of floating point.
        policy: names of :data:`TRANSFORMS`, done in this order.
        generator: of the draws, on the CPU.
        span: the value of white minus that of black, 2 for images from -1 to 1.
    """
    for name in policy:
        x = TRANSFORMS[name](x, generator, span)
    return x


def find_discriminator(module: nn.Module, path: str | None) -> str:
    """The path of the discriminator: the one named, or the only submodule that is called so.

    Raises:
        ValueError: if there is none, or several; with those that there are.
    """
    named = {name: m for name, m in module.named_modules() if name}
    listed = ", ".join(name for name, _ in module.named_children()) or "none"
    if path is not None:
        if path not in named:
            raise ValueError(
                f"{WHO}(discriminator={path!r}): {type(module).__name__} has no such submodule; it has {listed}."
            )
        return path
    found = [name for name in named if _DISCRIMINATOR.fullmatch(name.rpartition(".")[2])]
    outer = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outer) != 1:
        told = f"several submodules, {', '.join(outer)}, are" if outer else "no submodule is"
        raise ValueError(
            f"{WHO}: {told} called a discriminator or critic in {type(module).__name__}, which has {listed}. Say by"
            " discriminator= which network judges images, such as discriminator='judge', or take the technique out."
        )
    return outer[0]


def _pointless(profile: RunProfile) -> str | None:
    return "samples are no images" if profile.image_side is None else None


class DiffAugment(Technique):
    """Let the discriminator of a GAN see real and generated images through one random, differentiable transform ``T``.

    Whatever ``training_step`` hands to the discriminator, in its own step and in the generator's, becomes ``T(x)`` first, by
    fresh draws for each image of each call. So the discriminator cannot learn few real images by heart, the generator is
    trained through ``T`` and gets its gradient, and ``T`` does not leak into what it generates, as it would where real images
    alone were changed. Modules with several optimizers and manual optimization are left as they are; validation and sampling
    see no ``T``. A gradient penalty is one on images as they were handed over. Two-pass methods draw the same in both passes.

    The discriminator is the only submodule called so (``discriminator``, ``critic``, ``netD``), or the one that is named: it is
    called as a module, with one tensor of images (B, C, H, W) among its arguments. What else it is handed stays as it is.

    It pays where a GAN has few images, some thousands of them, by the paper; it costs a little time at each call.

    Logged: ``calls``, of the discriminator in the last step, and ``milliseconds``, what ``T`` took of the host in it.

    Args:
        policy: of "color", "translation" and "cutout", those that ``T`` is made of, in this order; the paper has all three for
            small data sets, and "translation" and "cutout" for CIFAR-10 with all of its images. None of them is plain training.
        span: the value of white minus that of black: 2 for images from -1 to 1, 1 for those from 0. The brightness moves by up
            to a quarter of it.
        discriminator: the dotted path of the network that judges images; None looks for it by name.
        until: the share of the budget in [0, 1] from which on images are left alone; 0 is plain training.

    Raises:
        ValueError: if an argument is out of its range; at setup, for ``until`` below 1 in a run without an end, if no
            discriminator is found, or if it is compiled; in the first step, if it is called on no images or on several, or, as
            that step ends, if it was not called.

    Sources:
        Zhao et al. 2020, arXiv:2006.10738.
    """

    saves: ClassVar[str] = (
        "nothing of a step: a GAN trains on fewer images without its discriminator learning them by heart"
    )
    paper: ClassVar[str] = "Zhao et al. 2020, arXiv:2006.10738"
    constraints: ClassVar[str] = "a discriminator that is a submodule, called on images (B, C, H, W) of a known range"
    needs: ClassVar[Need] = Need.CALLS
    refuses: ClassVar[Reasons] = {
        Part.TENSOR: DIFFERS,
        Part.PIPELINE: "the technique draws for all images that the network takes at once",
    }
    survey: ClassVar[Survey | None] = Survey("data augmentation (DiffAugment)", shen="3.1")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"policy": Choice((("color", "translation", "cutout"), ("translation", "cutout"), ("translation",)))},
        _pointless,
    )
    control: ClassVar[Control] = Control("no augmentation: the baseline for as many seconds")
    conflicts: ClassVar[Mapping[str, str]] = {}
    needs_automatic_optimization: ClassVar[bool] = False

    def __init__(
        self,
        policy: Sequence[str] = ("color", "translation", "cutout"),
        *,
        span: float = 2.0,
        discriminator: str | None = None,
        until: float = 1.0,
    ) -> None:
        if isinstance(policy, str) or not isinstance(policy, Sequence) or len(set(policy)) < len(policy):
            raise ValueError(f"{WHO}({policy=}): expected a list, each once, of {', '.join(map(repr, TRANSFORMS))}.")
        for name in policy:
            if name not in TRANSFORMS:
                raise ValueError(
                    f"{WHO}({policy=}): there is no {name!r}; expected {', '.join(map(repr, TRANSFORMS))}."
                )
        check_number(span, who=WHO, name="span", low=0, high=float("inf"), what="above 0, white minus black")
        if span == 0:
            raise ValueError(f"{WHO}({span=}): expected a number above 0, the value of white minus that of black.")
        if discriminator is not None and not (isinstance(discriminator, str) and discriminator):
            raise ValueError(
                f"{WHO}({discriminator=}): expected the dotted path of a submodule, or None to look for it."
            )
        check_number(until, who=WHO, name="until", low=0, high=1, what="the share of the budget from which on it rests")
        self.policy = tuple(policy)
        self.span = span
        self.discriminator = discriminator
        self.until = until
        self._reset()

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
        if self.until < 1.0 and not session.progress.limits():
            raise ValueError(
                f"{WHO}(until={self.until}): the Trainer has no end (max_steps=-1, max_epochs=-1, max_time=None) that it"
                " could be a fraction of. Set one of them, or until=1.0."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.REWEIGHT, self._link, order=2)  # each pass of a two-pass method begins its draws anew

    @override
    def on_model(self, session: Session) -> None:
        if not session.fitting:
            return
        self._path = find_discriminator(session.module, self.discriminator)
        found = session.module.get_submodule(self._path)
        if found._compiled_call_impl is not None or hasattr(found, "_orig_mod"):
            raise ValueError(
                f"{WHO}: the discriminator {self._path!r} is compiled as a whole, with what is drawn in it; expected one that"
                " is not. Compile submodules of it instead, or take the technique out."
            )
        rank_zero_info(f"{WHO}: the discriminator is {self._path!r}, of the class {type(found).__name__}")

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._calls, self._milliseconds = 0, 0.0
        self._over()  # of a two-pass method's first pass, which stays to the step's end
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
        self.session.when_step_ends(self._over)  # gradient checkpointing may run it again in the backward pass
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
                f"{WHO}: training_step did not call {self._path!r} as a module on images in its first step, so nothing would"
                " be transformed. Say by discriminator= which network judges images, or take the technique out."
            )

    def _transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[int, ...]) -> Any:
        """The discriminator's arguments, with ``T`` of the images in their place."""
        held = [*args, *kwargs.values()]
        images = [t for t in held if isinstance(t, Tensor) and t.ndim == 4 and t.is_floating_point()]
        if len(images) != 1:
            told = ", ".join(str(tuple(t.shape)) for t in held if isinstance(t, Tensor)) or "no tensors"
            raise ValueError(
                f"{WHO}: {self._path!r} was called on {told}; expected one tensor (B, C, H, W) of floating point among its"
                " arguments, the images that it judges. Say by discriminator= which network does so, or take the technique out."
            )
        start = time.perf_counter()
        (x,) = images
        self._calls += torch._C._current_graph_task_id() == -1  # not one that a backward pass runs again
        # as dropout: what runs a call again puts torch's state back to what it was in it
        at = int(torch.randint(2**31, ()))
        generator = self.session.generator(WHO, *key, at)
        made = diff_augment(x, self.policy, generator, self.span)
        self._milliseconds += 1000 * (time.perf_counter() - start)
        return (
            tuple(made if value is x else value for value in args),
            {name: made if value is x else value for name, value in kwargs.items()},
        )

    # -- what it tells and keeps

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {"calls": self._calls, "milliseconds": self._milliseconds}

    @override
    def summary(self) -> str:
        return (
            f"transformed the images of {self._total:,} calls of the discriminator {self._path or '(not yet found)'!r}"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls, "milliseconds": self._milliseconds, "total": self._total, "called": self._called}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._calls, self._milliseconds = state_dict["calls"], state_dict["milliseconds"]
        self._total, self._called = state_dict["total"], state_dict["called"]
