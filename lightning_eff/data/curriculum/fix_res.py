"""FixRes: train on small images, then tune classifier and norms alone on full ones (Touvron et al. 2019, arXiv:1906.06423)."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff._core._images.positions import Seen
from lightning_eff._core.search_space import Choice, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step, in_evaluation
from lightning_eff._core.technique import Control
from lightning_eff.data.curriculum._resolution import SmallerImages, check_share, no_images

WHO = "FixRes"
_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises: it is called so, and holds no parameter of two dimensions or more."""
    own = [*module.parameters(recurse=False)]
    return "norm" in type(module).__name__.lower() and not [*module.children()] and all(p.ndim < 2 for p in own)


def last_map(seen: Seen) -> nn.Module | None:
    """The map that was called last, where it gives each sample, or each pixel, its logits: (N, K) or (N, K, H, W)."""
    maps = [(module, ndim) for module, ndim in seen.called if isinstance(module, _MAPS)]
    return maps[-1][0] if maps and maps[-1][1] in (2, 4) else None


def _arms(technique: "FixRes") -> Mapping[str, Callback]:
    """Small images throughout, and as long on full images with all parameters."""
    if technique.neutral or technique.tune_all:
        return {}
    same = {"scale": technique.scale, "tune_all": True, "multiple_of": technique.multiple_of, "keys": technique.keys}
    return {
        f"{technique.scale:.3g} of the side throughout": FixRes(**same, until=1.0),
        "all parameters tuned on full images": FixRes(**same, until=technique.until),
    }


class FixRes(SmallerImages):
    """Train on images of ``scale`` times their height and width, then tune classifier and norms alone on full ones.

    Objects look larger in training, where crops are enlarged, than in validation, and what a network's last layers see
    changes with the size of images: so the paper trains at a small size and adapts these layers to the full one, which costs
    little. From the share ``until`` of the budget on, ``training_step`` gets the loader's own batch, and only the classifier
    and the norms have gradients: every other parameter keeps its bits, whatever decay, momentum and state the optimizer has
    for it. Running statistics of the norms that are tuned go on to adapt, at the size that validation has; those of others
    stay as they are.

    The classifier is the map that was called last in a trial with the first batch. Images are found, other tensors of their
    size go along, positions are interpolated, and the size is tried before any weight has changed, as
    :class:`ProgressiveResizing` documents. Learning rates are the module's: a schedule that has decayed to almost nothing at
    ``until`` leaves nothing to tune with. The paper tests at 1.15 to 1.7 times the training size.

    Logged: ``side``, the height of the last step's images in pixels, ``share``, its share of the full one, and ``tuned``, the
    parameters (numbers) that are trained from ``until`` on; 0 before.

    Args:
        scale: share of the full height and width until then, in (0, 1]; 1 is plain training, which needs no fixing.
        until: share of the budget in (0, 1] from which on classifier and norms alone are tuned; at 1 they never are.
        norms: ``"all"`` tunes every norm; ``"last"`` the one that was called last alone, as the paper's scripts do it.
        classifier: dotted path of the module that is the classifier; None takes the map that was called last.
        tune_all: tune every parameter from ``until`` on, which needs no classifier: the control.
        multiple_of: pixels, >= 1; sides below the full ones are multiples of it.
        keys: names (dict, dataclass) or positions (tuple, list) of the tensors (N, C, H, W) that are images, where looking at
            shapes does not tell.

    Raises:
        ValueError: if an argument is out of its range; at the first batch, before any weight has changed, if it holds no
            images, none would be smaller, the module cannot do with images of that size, or no classifier is found.

    Sources:
        Touvron et al. 2019, arXiv:1906.06423.
    """

    saves: ClassVar[str] = (
        "compute and activations: small images nearly throughout, and short backward passes at the end"
    )
    paper: ClassVar[str] = "Touvron et al. 2019, arXiv:1906.06423"
    constraints: ClassVar[str] = (
        "automatic optimization; batches with images (N, C, H, W); modules for images of any size, with a classifier called"
        " last or named by classifier=; a learning rate that is not yet zero at until"
    )
    survey: ClassVar[Survey | None] = Survey("train-test resolution (FixRes)", shen="3.3")
    search_space: ClassVar[SearchSpace | None] = SearchSpace(
        {"scale": Uniform(0.5, 0.85), "until": Uniform(0.7, 0.95), "norms": Choice(("all", "last"))}, no_images
    )
    control: ClassVar[Control] = Control(
        "small images throughout, validated at full size; and all parameters tuned on full images for as long", _arms
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "ProgressiveResizing": "both say at each step how large its images are",
        "EfficientTrain": "both say at each step how large its images are",
    }
    needs_budget: ClassVar[bool] = True
    sparse_gradients: ClassVar[bool] = True

    def __init__(
        self,
        scale: float = 0.7,
        *,
        until: float = 0.85,
        norms: Literal["all", "last"] = "all",
        classifier: str | None = None,
        tune_all: bool = False,
        multiple_of: int = 4,
        keys: Sequence[str | int] | None = None,
    ) -> None:
        check_share(scale, who=WHO, name="scale", of="a share of the full height and width")
        check_share(until, who=WHO, name="until", of="the share of the budget from which on few parameters are tuned")
        for name, value in (("scale", scale), ("until", until)):
            if value == 0:
                raise ValueError(f"{WHO}({name}={value!r}): expected a number above 0.")
        if norms not in ("all", "last"):
            raise ValueError(f"{WHO}({norms=}): expected 'all' or 'last'.")
        self.scale = scale
        self.until = until
        self.norms: Literal["all", "last"] = norms
        self.classifier = classifier
        self.tune_all = tune_all
        super().__init__(multiple_of=multiple_of, keys=keys)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._tuned: list[str] = []  # names of parameters, once the first batch was looked at
        self._adapting: list[str] = []  # names of the norms among their modules
        self._tuning = False
        self._frozen: list[tuple[nn.Parameter, bool]] = []
        self._evaluating: list[nn.Module] = []  # fixed norms, which were in training mode
        self._numbers = 0

    @property
    @override
    def neutral(self) -> bool:
        return self.scale == 1.0  # what is trained at the full size needs no fixing

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
                maps = [name for name, m in step.module.named_modules() if isinstance(m, _MAPS)]
                raise ValueError(
                    f"{WHO}(classifier={self.classifier!r}): {type(step.module).__name__} has no such module with parameters;"
                    f" expected a dotted path, such as one of {maps[-4:]}."
                )
        else:
            head = last_map(seen)
        if head is None:
            last = [f"{names.get(id(m), '?')} ({ndim}-D)" for m, ndim in seen.called if isinstance(m, _MAPS)][-3:]
            raise ValueError(
                f"{WHO}: found no classifier: the maps called last were {', '.join(last) or 'none'}; expected one that returns"
                " (N, K) or (N, K, H, W). Name it by classifier=, a dotted path."
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
        self._freeze(session)  # in a resumed run that was tuning, too, also within a window
        session.rewrap()
        if not self._tuning:
            self._tuning = True
            rank_zero_info(
                f"{WHO}: from step {session.trainer.global_step} on, {len(self._tuned)} parameters are tuned"
            )
            session.blocks_changed(self)

    @override
    def on_blocks_changed(self, session: Session) -> None:
        if self._tuning:
            self._freeze(session)

    def _freeze(self, session: Session) -> None:
        """Take all but the tuned parameters out of training; what the user froze stays so."""
        self._thaw(session.module)
        tuned = set(self._tuned)
        for name, p in session.module.named_parameters():
            if name in tuned:
                continue
            self._frozen.append((p, p.requires_grad))
            p.requires_grad_(False)
            p.grad = None  # an optimizer leaves what has none alone: its decay, momentum and state, too
        self._numbers = sum(p.numel() for name, p in session.module.named_parameters() if name in tuned)
        self._evaluating = [m for m in self._fixed(session.module) if m.training]
        for m in self._evaluating:  # between steps too: averages recompute the statistics of norms that train
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
        self.session.when_step_ends(modes.close)  # blocks may be run again in the backward pass
        return super()._link(step, batch, proceed)

    # -- what it tells

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        return {**super().report(), "tuned": self._numbers}

    @override
    def summary(self) -> str:
        of = "" if self.tune_all else " of classifier and norms"
        tuned = f"; {len(self._tuned)} parameters{of} tuned" if self._tuning else ""
        return super().summary() + tuned

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {"tuned": list(self._tuned), "adapting": list(self._adapting), "tuning": self._tuning}
        return {**super().state_dict(), **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._tuned, self._adapting = list(state_dict["tuned"]), list(state_dict["adapting"])
        self._tuning = state_dict["tuning"]
