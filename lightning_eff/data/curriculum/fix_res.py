"""FixRes: train on small images, then tune only the classifier and norms on full ones (Touvron et al. 2019)."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Count, Fraction, Text
from lightning_eff._core._images.positions import Seen
from lightning_eff._core.search_space import Choice, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step, in_evaluation
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._resolution import ImageKeys, Scale, SmallerImages, no_images

WHO = "FixRes"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its name and because it has no parameter with two or more dimensions."""
    own = [*module.parameters(recurse=False)]
    return "norm" in type(module).__name__.lower() and not [*module.children()] and all(p.ndim < 2 for p in own)


def last_layer(seen: Seen) -> nn.Module | None:
    """The linear or convolutional layer called last, if it returns logits per sample (N, K) or per pixel (N, K, H, W)."""
    layers = [(module, ndim) for module, ndim in seen.called if isinstance(module, _LAYERS)]
    return layers[-1][0] if layers and layers[-1][1] in (2, 4) else None


def _arms(technique: "FixRes") -> Mapping[str, Callback]:
    """Train on small images throughout, and tune all parameters on full images for as long."""
    if technique.neutral or technique.tune_all:
        return {}
    same = {"scale": technique.scale, "tune_all": True, "multiple_of": technique.multiple_of, "keys": technique.keys}
    return {
        f"{technique.scale:.3g} of the side throughout": FixRes(**same, until=1.0),
        "all parameters tuned on full images": FixRes(**same, until=technique.until),
    }


class FixRes(SmallerImages):
    """Train on small images, then tune only the classifier and the norms on full images.

    Training crops are enlarged, so objects look larger in training than in validation, and the statistics of a network's last
    layers change with the image size. The paper therefore trains at a small size and cheaply adapts these layers to the full
    one. It tests at 1.15 to 1.7 times the training size.

    From the fraction ``until`` of the budget on, images are full, and only the classifier and the norms have gradients. Every
    other parameter stays the same bit for bit, whatever weight decay, momentum and state the optimizer has for it. The running
    statistics of tuned norms adapt to full images, and those of other norms stay fixed.

    Use it to save most of the compute of a run on full images. Learning rates are the module's own: a schedule that has decayed
    to almost zero at ``until`` leaves nothing to tune with.

    The classifier is the linear or convolutional layer that was called last in a trial with the first batch.

    The images in the batch are found, other tensors of their size are resized with them, and positions are interpolated. Every
    size is tried before any weight has changed. :class:`ProgressiveResizing` documents the details.

    It logs ``side`` (the height of the last step's images in pixels), ``share`` (its fraction of the full height) and ``tuned``
    (the number of trained values from ``until`` on, 0 before).

    Args:
        scale: the fraction of the full height and width before ``until``. 1 is plain training, which needs no fixing.
        until: the fraction of the budget from which on only the classifier and norms are tuned. At 1 they never are.
        norms: the norms to tune: ``"all"``, or only the one that was called ``"last"``, as in the paper's scripts.
        classifier: the dotted path of the classifier. None takes the layer that was called last.
        tune_all: whether to tune every parameter from ``until`` on, as a control. No classifier is needed then.
        multiple_of: the number of pixels that smaller sides are multiples of.
        keys: the tensors (N, C, H, W) that are images, by name (dict, dataclass) or position (tuple, list). Give them if the
            images are not found by their shape.

    Raises:
        ValueError: for a value out of range. At the first batch, before any weight has changed, if it has no images, no size of
            the run is smaller, the module cannot process that size, or no classifier is found.

    Example:
        >>> trainer = L.Trainer(max_epochs=30, callbacks=[FixRes(scale=0.7, until=0.9)])

    References:
        Touvron et al. 2019, "Fixing the train-test resolution discrepancy", arXiv:1906.06423.
    """

    saves = "compute and activations: small images for most of the run, and short backward passes at the end"
    paper = "Touvron et al. 2019, arXiv:1906.06423"
    constraints = (
        "needs automatic optimization, batches with images (N, C, H, W), a module for images of any size whose classifier is"
        " called last or named by classifier=, and a learning rate above zero at until"
    )
    search_space = SearchSpace(
        {"scale": Uniform(0.5, 0.85), "until": Uniform(0.7, 0.95), "norms": Choice(("all", "last"))}, no_images
    )
    control = Control(
        "small images throughout, validated at full size; and all parameters tuned on full images for as long", _arms
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveResizing": "both set the size of each step's images",
        "EfficientTrain": "both set the size of each step's images",
    }
    checkpointed = ("_tuned", "_adapting", "_tuning")

    def __init__(
        self,
        scale: Scale = 0.7,
        *,
        until: Annotated[float, Fraction(above=0)] = 0.85,
        norms: Literal["all", "last"] = "all",
        classifier: Annotated[str, Text("a dotted path of a module")] | None = None,
        tune_all: bool = False,
        multiple_of: Annotated[int, Count()] = 4,
        keys: ImageKeys = None,
    ) -> None:
        self.scale = scale
        self.until = until
        self.norms: Literal["all", "last"] = norms
        self.classifier = classifier
        self.tune_all = tune_all
        super().__init__(multiple_of=multiple_of, keys=keys)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._tuned: list[str] = []  # names of parameters, after the first batch
        self._adapting: list[str] = []  # names of their norms
        self._tuning = False
        self._frozen: list[tuple[nn.Parameter, bool]] = []
        self._evaluating: list[nn.Module] = []  # fixed norms that were in training mode
        self._numbers = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.scale == 1.0  # training at the full size needs no fixing

    @property
    @override
    def changes_shapes(self) -> bool:
        return not self.neutral and self.until < 1.0

    @override
    def share_of(self, u: float) -> float:
        return self.scale if u < self.until else 1.0

    @override
    def shares(self) -> Iterable[float]:
        return [self.scale]

    @override
    def _on_full_pass(self, step: Step, seen: Seen) -> None:
        if self.tune_all:
            self._tuned = [name for name, _ in step.module.named_parameters()]
            self._adapting = [name for name, m in step.module.named_modules() if is_norm(m)]
            return
        names = {id(m): name for name, m in step.module.named_modules()}
        if self.classifier is not None:
            head = dict(step.module.named_modules()).get(self.classifier)
            if head is None or not [*head.parameters()]:
                layers = [name for name, m in step.module.named_modules() if isinstance(m, _LAYERS)]
                raise ValueError(
                    f"{WHO}(classifier={self.classifier!r}): {type(step.module).__name__} has no module with parameters at this"
                    f" path. Choose a dotted path such as one of {layers[-4:]}."
                )
        else:
            head = last_layer(seen)
        if head is None:
            last = [f"{names.get(id(m), '?')} ({ndim}-D)" for m, ndim in seen.called if isinstance(m, _LAYERS)][-3:]
            raise ValueError(
                f"{WHO}: found no classifier, a last layer that returns (N, K) or (N, K, H, W). The layers called last were"
                f" {', '.join(last) or 'none'}. Name the classifier with classifier=, a dotted path."
            )
        norms = [m for m in step.module.modules() if is_norm(m)]
        if self.norms == "last":
            norms = [m for m, _ in seen.called if is_norm(m)][-1:]
        tuned = {id(p) for m in (head, *norms) for p in m.parameters()}
        self._tuned = [name for name, p in step.module.named_parameters() if id(p) in tuned]
        self._adapting = [names[id(m)] for m in norms]

    # -- tuning

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        if self._tuning and self._frozen:
            return
        begins = session.progress.u >= self.until and batch_idx % session.trainer.accumulate_grad_batches == 0
        if not self._tuned or not (self._tuning or begins):
            return
        self._freeze(session)  # also in a resumed run that was tuning, within a window too
        session.rewrap()
        if not self._tuning:
            self._tuning = True
            rank_zero_info(
                f"{WHO}: tuning only {len(self._tuned)} parameter tensors from step {session.trainer.global_step} on"
            )
            session.blocks_changed(self)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self._tuning:
            self._freeze(session)

    def _freeze(self, session: Session) -> None:
        """Freeze all but the tuned parameters. Parameters that the user froze stay frozen."""
        self._thaw(session.module)
        tuned = set(self._tuned)
        for name, p in session.module.named_parameters():
            if name in tuned:
                continue
            self._frozen.append((p, p.requires_grad))
            p.requires_grad_(False)
            p.grad = None  # an optimizer skips parameters without a gradient, with their decay and momentum
        self._numbers = sum(p.numel() for name, p in session.module.named_parameters() if name in tuned)
        self._evaluating = [m for m in self._fixed(session.module) if m.training]
        for m in self._evaluating:  # between steps too, because averages recompute the statistics of training norms
            m.training = False

    def _fixed(self, module: nn.Module) -> list[nn.Module]:
        """The norms that are not tuned."""
        adapting = set(self._adapting)
        return [m for name, m in module.named_modules() if is_norm(m) and name not in adapting]

    def _thaw(self, module: nn.Module) -> None:
        while self._frozen:
            p, flag = self._frozen.pop()
            p.requires_grad_(flag)
        for m in self._evaluating:
            m.training = module.training
        self._evaluating = []

    @override
    def detach(self, session: Session) -> None:
        super().detach(session)
        self._thaw(session.module)

    @override
    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        if not self._tuning:
            return super()._link(step, batch, proceed)
        fixed = self._fixed(step.module)
        if not torch.is_grad_enabled():
            with in_evaluation(fixed):
                return super()._link(step, batch, proceed)
        modes = ExitStack()
        modes.enter_context(in_evaluation(fixed))
        self.session.when_step_ends(modes.close)  # blocks may run again in the backward pass
        return super()._link(step, batch, proceed)

    # -- report and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "tuned": self._numbers}

    @override
    def summary(self) -> str:
        of = "" if self.tune_all else " of classifier and norms"
        tuned = f"; tuned {len(self._tuned)} parameter tensors{of}" if self._tuning else ""
        return super().summary() + tuned
