"""RepOptimizer: SGD that trains one convolution as if it were a sum of branches (Ding et al. 2023, arXiv:2205.15242).

A block computes ``s (W3 * x) + t (W1 * x) + e x``. The constants s and t have one number per output channel. The weights W3
(3 x 3), W1 (1 x 1) and e (one number per channel) are trained. One 3 x 3 convolution computes the same, with
``W = s W3 + pad(t W1) + pad(diag(e))``. SGD moves this W as it moves the block, if the gradient of W is multiplied by

    M = s^2 + t^2 [center of the kernel] + 1 [center, and the same input channel as output channel]
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from typing_extensions import override

from lightning_eff._core._architecture.naming import by_reason, check_met, meets
from lightning_eff._core._arguments.kinds import Each, Either, Names, Number
from lightning_eff._core._arguments.objects import FilePath, Table
from lightning_eff._core._needs.needs import UNTRIED, Part, Reasons
from lightning_eff._core._optim.combined import CombinedOptimizer
from lightning_eff._core._optim.external_rates import after_closure
from lightning_eff._core.search_space import SearchSpace, needs_images
from lightning_eff._core.session import Session
from lightning_eff._core.technique import Control
from lightning_eff.model.initialization._maps import SAME_WEIGHTS, listed
from lightning_eff.model.initialization._once import Initialization, Turn

WHO = "RepOptimizer"
#: The names of the scales beside each convolution, in the files of the authors' search.
_IN_FILES = ("scale_conv", "scale_1x1", "scale_identity")


class Scales(NamedTuple):
    """The scales of a block's branches, each (out,) on the CPU.

    Attributes:
        kernel: ``s``, of the 3 x 3 convolution.
        point: ``t``, of the 1 x 1 convolution.
        identity: the first ``e``; None for a block without the identity.
    """

    kernel: Tensor
    point: Tensor
    identity: Tensor | None


def scale_at(index: int) -> float:
    """Return s and t of the block with so many blocks before it in its stage, with which the authors' search starts."""
    return (2.0 / index) ** 0.5 if index else 1.0


def _diagonal(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places (output, input) at which an output channel meets itself, also in the groups of a convolution."""
    rows = torch.arange(weight.shape[0], device=weight.device)
    return rows, rows % weight.shape[1]


def merge(weight: Tensor, point: Tensor, scales: Scales) -> None:
    """Set ``W <- s W + pad(t W1) + pad(diag(e))`` in place.

    Args:
        weight: ``W3``, (out, in / groups, 3, 3).
        point: ``W1``, (out, in / groups).
        scales: of the branches.
    """
    s, t = scales.kernel.to(weight), scales.point.to(weight)
    weight.mul_(s[:, None, None, None])
    weight[:, :, 1, 1] += t[:, None] * point.to(weight)
    if scales.identity is not None:
        rows, columns = _diagonal(weight)
        weight[rows, columns, 1, 1] += scales.identity.to(weight)


class Multiplier:
    """Multiplies the gradient of a convolution's weight by M.

    Args:
        weight: the weight.
        scales: of the branches.
    """

    def __init__(self, weight: Tensor, scales: Scales) -> None:
        # M without the identity's part, (out, 1, 3, 3)
        fine = torch.promote_types(weight.dtype, torch.float32)
        factors = scales.kernel.to(fine).square()[:, None, None, None].repeat(1, 1, 3, 3)
        factors[:, 0, 1, 1] += scales.point.to(fine).square()
        self.factors = factors.to(weight)
        self.diagonal = None if scales.identity is None else _diagonal(weight)

    def apply(self, gradient: Tensor) -> None:
        """Multiply ``gradient`` in place."""
        if self.diagonal is None:
            gradient.mul_(self.factors)
            return
        rows, columns = self.diagonal
        own = gradient[rows, columns, 1, 1]
        gradient.mul_(self.factors)
        gradient[rows, columns, 1, 1] += own


class RepOptimizer(Initialization):
    """Train plain 3 x 3 convolutions with SGD as if each were a block with two more branches: 1 x 1 and identity.

    RepVGG trains such blocks, and merges each into one convolution at the end. Here the network is plain from the start.
    Each 3 x 3 convolution begins with the merged weight of a random block, and its gradients are multiplied by constants
    before each optimizer step. With SGD, with or without momentum and weight decay, the weights are then those of the merged
    block. There are no additional layers, parameters or statistics, so the step cost hardly changes.

    Use it to train VGG-like networks, stacks of 3 x 3 convolutions with norms and without shortcuts, from scratch. The
    constants are the scales of the branches, one for each output channel. The paper searches them: it trains blocks with
    trainable scales on a small data set, which the authors' code does and this package does not. Give the file of such a
    search, or numbers, in ``scales``. By default each scale has the value with which the authors' search starts. This is 1
    for the first block of a stage, and sqrt(2 / i) for the i-th one after it. A stage starts at a convolution without an
    identity. **The paper's results are with searched scales.** Its effect is not measured here.

    A convolution has an identity if it keeps the number of channels and its stride is 1. Grouped and depthwise convolutions
    are blocks too. Convolutions with another kernel size or padding are skipped, and other layers train as usual. The
    equivalence holds for SGD only, so other optimizers are refused. Gradient clipping comes before the multiplication. The
    equivalence does not cover it, and the authors advise against it.

    Weights are set once, before the first step of a fresh fit, and checkpoints hold the scales. If a run resumes from a
    checkpoint without them, or the module was trained before, the weights stay and the gradients are still multiplied.

    Logged: ``convolutions``, how many there are, and ``numbers``, how many numbers were set.

    Args:
        scales: a file of the authors' search, or a mapping. A file has ``scale_conv``, ``scale_1x1`` and ``scale_identity``
            for each block, in the order of the module's convolutions. A mapping leads from paths or patterns of
            convolutions to ``[s, t]`` or ``[s, t, e]``, such as ``{"stage1.*": [1.0, 0.5, 1.0]}``. The first match counts,
            and e is 1 if it is not given. None, and convolutions without a match, take the default by depth.
        names: dotted paths of convolutions, their last parts, or patterns. None takes all that fit, and ``[]`` is plain
            training.
        force: whether to also set weights that were loaded or trained before.

    Raises:
        ValueError: for a wrong value. At setup, if no 3 x 3 convolution is trained, or a name or pattern matches none. At
            setup, if the scales in the file do not fit the convolutions, or their optimizer is not ``torch.optim.SGD``.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[RepOptimizer()])
        >>> searched = RepOptimizer("RepOpt-VGG-B1-scales.pth")

    References:
        Ding et al. 2023, "Re-parameterizing Your Optimizers rather than Architectures", ICLR, arXiv:2205.15242.
    """

    saves = "the additional branches of RepVGG's blocks during training"
    paper = "Ding et al. 2023, arXiv:2205.15242"
    constraints = "3 x 3 convolutions trained by torch.optim.SGD; no sharding, tensor or pipeline parallelism"
    search_space = SearchSpace({}, needs_images)
    control = Control(
        "the baseline for as many seconds with its learning rate decayed to zero: a step costs the same. Tune its learning"
        " rate too, because the multiplication also makes steps larger"
    )
    turn: ClassVar[Turn] = Turn.MAPS
    neutral_at: ClassVar[Mapping[str, Any]] = {"names": ()}
    checkpointed = ("_scales",)
    refuses: ClassVar[Reasons] = {
        **Initialization.refuses,
        **dict.fromkeys((Part.SHARD, Part.TENSOR, Part.ITSELF, Part.PIPELINE), UNTRIED),
    }
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("LSUV", "OrthogonalInit", "ZerO"), SAME_WEIGHTS),
        **dict.fromkeys(
            ("BitFit", "HoulsbyAdapters", "LoRA", "PrefixTuning", "PromptTuning", "VeRA", "VisualPromptTuning"),
            "it freezes the convolutions",
        ),
        "ReplaceOptimizer": "another optimizer would train the convolutions, and multiplied gradients fit SGD only",
    }

    def __init__(
        self,
        scales: Annotated[
            str | Path | Mapping[str, Sequence[float]] | None,
            Either(FilePath("the path of a file of scales"), Table("patterns of convolutions", Each(Number()))),
        ] = None,
        *,
        names: Annotated[Sequence[str] | None, Names("dotted paths or patterns")] = None,
        force: bool = False,
    ) -> None:
        if isinstance(scales, Mapping):
            for pattern, values in scales.items():
                if len(values) not in (2, 3):
                    raise ValueError(
                        f"{WHO}(scales={{{pattern!r}: {[*values]}}}): expected [s, t] or [s, t, e], the scales of the 3 x 3"
                        " convolution, of the 1 x 1 convolution, and of the identity."
                    )
        self.scales, self.force = scales, force
        self.names = None if names is None else tuple(names)

    def _reset(self) -> None:
        self._scales: dict[str, list[Tensor]] = {}  # as a checkpoint holds them
        self._multipliers: dict[int, Multiplier] = {}  # by the id of the weight
        self._hooks: list[Any] = []

    # -- what is trained so

    @override
    def on_optimizers(self, session: Session) -> None:
        chosen = self._chosen(session)
        if not self._scales:
            self._scales = {
                path: [x for x in scales if x is not None] for path, scales in self._scaled(session, chosen).items()
            }
        elif self._scales.keys() != chosen.keys():
            other = sorted(self._scales.keys() ^ chosen.keys())
            raise ValueError(
                f"{WHO}: the checkpoint has the scales of {len(self._scales)} convolutions, but the module trains"
                f" {len(chosen)} (differing in {', '.join(other[:5])}). Resume with the same module and names."
            )
        for path, m in chosen.items():
            self._multipliers[id(m.weight)] = Multiplier(m.weight, self._of(path))
        for optimizer in session.optimizers:
            if any(id(p) in self._multipliers for group in optimizer.param_groups for p in group["params"]):
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def _of(self, path: str) -> Scales:
        kernel, point, *identity = self._scales[path]
        return Scales(kernel, point, identity[0] if identity else None)

    def _chosen(self, session: Session) -> dict[str, nn.Conv2d]:
        """Return the convolutions to train so, in the module's order.

        Raises:
            ValueError: if there are none, a name matches none, or an optimizer is not SGD.
        """
        module = session.module
        owners = {
            id(p): optimizer
            for optimizer in session.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        every = {path: m for path, m in module.named_modules() if isinstance(m, nn.Conv2d)}
        if self.names is not None:
            check_met(self.names, every, who=WHO, what="convolutions", root=type(module).__name__)
        chosen, left, weights = dict[str, nn.Conv2d](), dict[str, str](), set[int]()
        for path, m in every.items():
            if self.names is not None and not any(meets(path, name) for name in self.names):
                continue
            reason = _unfit(m) or ("no optimizer trains it" if id(m.weight) not in owners else "")
            if reason:
                left[path] = reason
            elif id(m.weight) not in weights:
                weights.add(id(m.weight))
                chosen[path] = m
        if not chosen or (self.names is not None and left):
            raise ValueError(
                f"{WHO}: found no 3 x 3 convolution to train in {type(module).__name__}.{by_reason(left)} Name others, or"
                f" remove {WHO}."
                if not chosen
                else f"{WHO}(names={[*(self.names or ())]}):{by_reason(left)} Leave {'it' if len(left) == 1 else 'them'} out."
            )
        for path, m in chosen.items():
            owner = owners[id(m.weight)]
            part = owner.part_of(m.weight) if isinstance(owner, CombinedOptimizer) else owner
            if type(part) is not SGD:
                raise ValueError(
                    f"{WHO}: {type(part).__name__} trains {path}.weight, but only under SGD do multiplied gradients train it as"
                    f" a sum of branches. Return torch.optim.SGD from configure_optimizers, or remove {WHO}."
                )
        if left:
            rank_zero_info(f"{WHO}: left out:{by_reason(left)}")
        return chosen

    # -- their scales

    def _scaled(self, session: Session, chosen: Mapping[str, nn.Conv2d]) -> dict[str, Scales]:
        if isinstance(self.scales, str | Path):
            return _from_file(self.scales, chosen)
        given = self.scales or {}
        root = type(session.module).__name__
        check_met([*given], chosen, who=WHO, what="convolutions to train", root=root, argument="scales")
        found: dict[str, Scales] = {}
        index = 0  # of the block in its stage
        for path, m in chosen.items():
            index = index + 1 if _keeps(m) else 0
            values = next((values for pattern, values in given.items() if meets(path, pattern)), [scale_at(index)] * 2)
            if len(values) == 3 and not _keeps(m):
                raise ValueError(
                    f"{WHO}(scales=...): it gives {path} a scale of the identity, but this convolution has another number of"
                    " outputs than inputs, or a stride. Give it [s, t]."
                )
            s, t, *e = (torch.full((m.out_channels,), float(value)) for value in values)
            found[path] = Scales(s, t, (e[0] if e else torch.ones(m.out_channels)) if _keeps(m) else None)
        return found

    # -- the run

    @override
    def initialize(self, session: Session, batch: Any, batch_idx: int) -> int | None:
        numbers = 0
        for path in self._scales:
            weight = session.module.get_parameter(f"{path}.weight")
            bound = weight.shape[1] ** -0.5  # as nn.Conv2d draws a 1 x 1 convolution
            drawn = torch.rand(weight.shape[:2], generator=session.generator(WHO, path), dtype=torch.float32)
            merge(weight, (2 * drawn - 1) * bound, self._of(path))
            numbers += weight.numel()
        rank_zero_info(f"{WHO}: merged branches into {len(self._scales)} convolutions: {listed([*self._scales])}.")
        return numbers

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        act = partial(self._multiply, optimizer)
        changed = after_closure(args, kwargs, act)
        if changed is None:
            act()
        return changed

    @torch.no_grad()
    def _multiply(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and id(p) in self._multipliers:
                    self._multipliers[id(p)].apply(p.grad)

    @override
    def detach(self, session: Session) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._multipliers = [], {}

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "convolutions": len(self._scales)}

    @override
    def summary(self) -> str:
        return f"trained {len(self._scales)} convolutions as sums of branches"


def _keeps(m: nn.Conv2d) -> bool:
    """Return whether a block around ``m`` has an identity."""
    return m.in_channels == m.out_channels and m.stride == (1, 1)


def _unfit(m: nn.Conv2d) -> str:
    if m.kernel_size != (3, 3):
        return f"its kernel is {' x '.join(map(str, m.kernel_size))}"
    if m.padding not in ("same", m.dilation):
        return "the center of its kernel is not at the pixel that a 1 x 1 convolution would see (padding differs from dilation)"
    if not isinstance(m._parameters.get("weight"), nn.Parameter):
        return "a parametrization computes its weight"
    if type(m).forward is not nn.Conv2d.forward or type(m)._conv_forward is not nn.Conv2d._conv_forward:
        return "it is a subclass of nn.Conv2d with its own forward"
    return ""


def _from_file(path: str | Path, chosen: Mapping[str, nn.Conv2d]) -> dict[str, Scales]:
    """Return the scales in a file of the authors' search, whose blocks are in the order of ``chosen``.

    Raises:
        ValueError: if there is no such file, or its scales do not fit.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"{WHO}(scales={str(path)!r}): there is no such file. Give the path of a file, or leave it out."
        )
    saved: Any = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("model", "state_dict"):
        saved = saved.get(key, saved) if isinstance(saved, Mapping) else {}
    blocks: dict[str, list[Tensor | None]] = {}
    for key, value in saved.items():
        block, _, name = key.removesuffix(".weight").rpartition(".")
        if name in _IN_FILES and isinstance(value, Tensor) and value.ndim == 1:
            blocks.setdefault(block, [None] * 3)[_IN_FILES.index(name)] = value.float()
    if len(blocks) != len(chosen):
        raise ValueError(
            f"{WHO}(scales={str(path)!r}): the file has the scales of {len(blocks)} blocks ({', '.join([*blocks][:3])}), and"
            f" the module has {len(chosen)} convolutions to train ({', '.join([*chosen][:3])}). Give the file of the same"
            " architecture, or names=[...]."
        )
    found: dict[str, Scales] = {}
    for (block, (s, t, e)), (name, m) in zip(blocks.items(), chosen.items(), strict=True):
        sizes = [x.shape[0] for x in (s, t, e) if x is not None]
        if s is None or t is None or set(sizes) != {m.out_channels} or (e is not None) != _keeps(m):
            raise ValueError(
                f"{WHO}(scales={str(path)!r}): the scales of {block or 'the first block'} (of {sizes} channels,"
                f" {'with' if e is not None else 'without'} an identity) do not fit {name}, which has {m.out_channels} outputs"
                f" and {'an' if _keeps(m) else 'no'} identity. Give the file of the same architecture, or names=[...]."
            )
        found[name] = Scales(s, t, e)
    return found
