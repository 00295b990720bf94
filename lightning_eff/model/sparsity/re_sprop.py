"""ReSprop: of a map's output gradient, only what differs much from the previous step's is new (Goli & Aamodt 2020)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._architecture.naming import check_names
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._stack.thawing import thawing
from lightning_eff._core.patches import hook_behind
from lightning_eff._core.search_space import RunProfile, SearchSpace, Survey, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.sparsity._masks.finding import Weight, chosen

WHO = "ReSprop"


def hybrid(g: Tensor, previous: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor]:
    """The gradient that goes backward, and where it is the previous one.

    ``g~ = h + T(g - h)`` with ``T(d) = d`` where ``|d| > theta`` and 0 elsewhere, which is ``g`` there and ``h`` elsewhere.

    Args:
        g: the gradient at a map's output, (B, ...).
        previous: ``h``, of one sample of the previous step, (...).
        threshold: ``theta`` >= 0. At infinity all of it is ``h``; at 0 all of it is ``g``.
    """
    # g̃ = h + T(g − h)
    reused = (g - previous).abs() <= threshold
    return torch.where(reused, previous, g), reused


def next_threshold(threshold: Tensor, reused: Tensor, sparsity: Tensor | float) -> Tensor:
    """``2 theta`` where the share that was reused is below ``sparsity``, else ``theta / 2``."""
    return torch.where(reused < sparsity, 2.0 * threshold, 0.5 * threshold)


def gains_nothing(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it, in words."""
    return "products with a gradient of which most is known take as long as others, so that no second is saved"


class ReSprop(Technique):
    """Let the gradient at the output of each linear map and convolution be mostly that of the previous step.

    In each backward pass, of each map, the gradient ``g`` at its output is compared with ``h``, that of one sample, drawn at
    random, of the pass before. Where they differ by no more than a threshold, ``h`` goes on in the place of ``g``, into the
    gradient of the weight and of the bias and to the map's input. Products with ``h`` are the same for all samples, so that
    hardware could make them once and skip the reused part of the others. Thresholds are found for each map by doubling and
    halving, so that about ``sparsity`` of the numbers is reused; this share rises evenly from 0 during ``warmup``.

    **It saves no time, and costs some**: on CPUs and GPUs all products are made as before, and comparisons with them. It is the
    algorithm of an accelerator that its authors simulated, for what it does to a training's course. A sample's gradients of all
    maps are held from step to step, which is as much as the activations of one sample. The paper leaves the biases' gradients
    as they are, and changes convolutions only.

    **A network may lose by it what it has learnt.** A GPT on bytes at a rate of 0.01, of which half is reused, comes to a loss
    of 2.4 in a hundred steps, where it comes to 2.2 without; then it climbs back, and ends at 2.8 for 1.6 (one seed). Zeros in
    the place of what is reused do no better, nor does a head that is left alone: what tells is what is missing, not what
    stands there. At a tenth of that rate it holds, and ends at 2.2 for 2.0. Where a tenth is reused, gradients of weights are
    the batch's: their cosine is 1.000. A small ViT learns with half, and with 0.9 as good as nothing.

    Maps are those that are called as modules: ``nn.Linear``, transformers' ``Conv1D`` and convolutions, with a weight that
    trains. Those that are not, in ``nn.MultiheadAttention``, recurrent layers and experts in one tensor, are left alone, as is
    a head whose logits are never made (``FusedLinearCrossEntropy``), and a call whose output has another shape than that of the
    pass before, as with sequences of other lengths. A map that is called several times in a pass compares each call with the
    same call of the pass before. A sample is a place in the output's first dimension. Each rank compares with gradients of its
    own.

    Logged: ``reused`` (the share of the numbers), ``maps`` (calls of maps whose gradients were compared),
    ``held_mb`` (MB of gradients that are kept for the next pass).

    Args:
        sparsity: the share that is reused, in [0, 1). 0 is plain training. The paper has 0.9 and less.
        warmup: the share of the budget over which it is reached, in [0, 1]. The paper's is 8 of 90 epochs.
        threshold: a fixed one for all maps and steps, in the place of those that are found, >= 0 and possibly infinite.
        names: dotted paths of weights or of modules that hold them, their last parts or patterns; None for all.
        dense: patterns of weights among these whose maps are left alone.

    Raises:
        ValueError: for other values; at setup, if there is no such map, a name means nothing, a map is in compiled code, or the
            precision has a gradient scaler, under which gradients of two steps are of other scales; after the first step, if no
            map was called.

    Sources:
        Goli & Aamodt 2020, CVPR, https://openaccess.thecvf.com/content_CVPR_2020/html/Goli_ReSprop_Reuse_Sparsified_Backpropagation_CVPR_2020_paper.html.
    """

    saves: ClassVar[str] = "no time: products of the backward pass, on hardware that skips what it knows"
    paper: ClassVar[str] = "Goli & Aamodt 2020, CVPR"
    constraints: ClassVar[str] = "maps that are called as modules, outside of compiled code; no fp16 scaler"
    survey: ClassVar[Survey | None] = Survey("ReSprop", zhuang="2.1", shen="4.2")
    search_space: ClassVar[SearchSpace | None] = SearchSpace({"sparsity": Uniform(0.1, 0.9)}, gains_nothing)
    control: ClassVar[Control] = Control("the baseline for as many steps, of which the whole gradient is computed")
    conflicts: ClassVar = {
        **dict.fromkeys(
            ("BitFit", "PromptTuning", "VeRA", "VisualPromptTuning"),
            "it freezes the weights of the maps at whose outputs gradients are reused",
        ),
        "RegionalCompilation": "gradients at maps inside of compiled blocks cannot be met",
        "KFAC": "its factors would be of gradients that are not those of the batch",
        "SequencePacking": "padding would have gradients of other samples' tokens, by which it sees what the loss reads",
    }
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        sparsity: float = 0.9,
        *,
        warmup: float = 0.1,
        threshold: float | None = None,
        names: Sequence[str] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0.0 <= sparsity < 1.0:
            raise ValueError(f"{WHO}({sparsity=}): expected the share that is reused, in [0, 1); 0 is plain training.")
        if not 0.0 <= warmup <= 1.0:
            raise ValueError(f"{WHO}({warmup=}): expected a share of the budget, in [0, 1].")
        if threshold is not None and (isinstance(threshold, bool) or not threshold >= 0.0):
            raise ValueError(f"{WHO}({threshold=}): expected a difference of gradients >= 0, or None to have it found.")
        self.sparsity, self.warmup, self.threshold = float(sparsity), float(warmup), threshold
        self.names = check_names(
            names, who=WHO, what="weights, or of the modules that hold them", example="layers.*.mlp.*"
        )
        self.dense = check_names(dense, who=WHO, what="weights whose maps are left alone", example="lm_head") or []
        self._reset()

    def _reset(self) -> None:
        self._maps: dict[str, nn.Module] = {}
        self._calls: Counter[str] = Counter()  # of each map, in the pass that is under way
        self._previous: dict[str, Tensor] = {}  # by the call, "path#number": of a sample of the pass before
        self._next: dict[str, Tensor] = {}
        self._thresholds: dict[str, Tensor] = {}
        self._drawn: dict[str, float] = {}  # by the map: which sample is kept of this pass, in [0, 1)
        self._shares: dict[str, Tensor] = {}  # that were reused in this pass
        self._handles: list[RemovableHandle] = []
        self._met = self._looked = (
            False  # whether a map's output had a gradient, and whether that is known of all ranks
        )

    @property
    @override
    def neutral(self) -> bool:
        return (self.sparsity == 0.0 and self.threshold is None) or self.names == []

    # -- the run

    @override
    def check(self, session: Session) -> None:
        if getattr(session.trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{WHO}: got precision {session.trainer.precision!r}, whose gradient scaler gives gradients of two steps other"
                " scales; expected a precision without one. Use precision='bf16-mixed'."
            )

    @override
    def attach(self, session: Session) -> None:
        self._reset()
        session.chain.add(Stage.JOIN, self._link, order=-1)  # all passes of a step have these hooks, once
        session.chain.add(Stage.SAVE, self._pass)

    @override
    def on_optimizers(self, session: Session) -> None:
        # all others have changed the module by now, in whatever order they are given, and precision plugins have too
        module = session.module
        weights: dict[str, Weight] = thawing(lambda: self._chosen(module), session._stacks)()
        owners = {name.rpartition(".")[0] for name in weights}
        found: dict[str, nn.Module] = {
            path: m for path, m in module.named_modules() if path in owners and _is_called(m)
        }
        if not found:
            raise ValueError(
                f"{WHO}: the weights {', '.join([*weights][:4])} of {type(module).__name__} are of no map that is called as a"
                " module; expected nn.Linear, transformers' Conv1D or a convolution. Take the technique out."
            )
        if compiled_around(module, found.values()):
            raise ValueError(
                f"{WHO}: maps of {type(module).__name__} are in compiled code, in which gradients at them cannot be met;"
                " expected plain modules. Do not compile them, or take the technique out."
            )
        if left := sorted(owners - found.keys()):
            rank_zero_info(
                f"{WHO}: {len(left)} modules are left alone, since their weights are used otherwise, as {left[0]}."
            )
        self._maps = found

    def _chosen(self, module: nn.Module) -> dict[str, Weight]:
        use = "compared with those of the step before"
        return chosen(module, self.names, self.dense, (1, 1), who=WHO, use=use)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        generator = session.generator(WHO, session.rank, session.trainer.global_step, batch_idx)
        drawn = torch.rand(len(self._maps), generator=generator, dtype=torch.float64).tolist()
        self._drawn, self._shares = dict(zip(self._maps, drawn, strict=True)), {}

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._unhook()
        self._handles = [hook_behind(m, self._at(path)) for path, m in self._maps.items()]
        self.session.when_step_ends(self._unhook)  # parts that are checkpointed may run again until then
        return proceed(batch)

    def _pass(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._calls.clear()
        return proceed(batch)

    def _at(self, path: str) -> Callable[..., None]:
        def see(owner: nn.Module, args: Any, output: Any) -> None:
            # what stands in for logits is no plain tensor, and passes that only look at gradients are to see those of the batch
            if torch.is_grad_enabled() and type(output) is Tensor and output.requires_grad and not looking():
                call = f"{path}#{self._calls[path]}"
                self._calls[path] += 1
                output.register_hook(lambda g: self._backward(path, call, g))

        return see

    @torch.no_grad()
    def _backward(self, path: str, call: str, g: Tensor) -> Tensor:
        """The gradient at a map's output has come: what goes on."""
        self._met = True
        if g.ndim < 2 or not len(g):
            return g
        h, out = self._previous.get(call), g
        if h is not None and h.shape == g.shape[1:] and h.dtype == g.dtype:
            out = self._mixed(call, g, h)
        self._next[call] = g[int(self._drawn[path] * len(g))].clone()
        return out

    def _mixed(self, call: str, g: Tensor, h: Tensor) -> Tensor:
        if self.threshold is not None:
            out, reused = hybrid(g, h, self.threshold)
            self._shares[call] = reused.float().mean()
            return out
        threshold = self._thresholds.get(call)
        if threshold is None:
            threshold = (g - h).abs().float().mean()
        out, reused = hybrid(g, h, threshold)
        share = self._shares[call] = reused.float().mean()
        wanted = self.sparsity * min(1.0, self.session.progress.u / self.warmup if self.warmup else 1.0)
        self._thresholds[call] = next_threshold(threshold, share, wanted)
        return out if wanted else g

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @override
    def on_batch_end(self, session: Session, batch_idx: int) -> None:
        self._previous.update(self._next)
        self._next = {}
        if self._looked or not session.trainer.global_step:
            return
        trained = any(
            weight.grad is not None for m in self._maps.values() if isinstance(weight := m.weight, nn.Parameter)
        )
        ranks = session.gather((trained, self._met))
        self._looked = any(trained for trained, _ in ranks)
        if self._looked and not any(met for _, met in ranks):
            raise ValueError(
                f"{WHO}: none of the {len(self._maps)} maps of {type(session.module).__name__}, such as"
                f" {next(iter(self._maps))}, had a gradient at its output in the first step, so that nothing would be reused;"
                " expected maps that are called as modules. Name others by names=, or take the technique out."
            )

    @override
    def detach(self, session: Session) -> None:
        self._unhook()
        self._maps = {}

    # -- what is told and kept

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        shares = [*self._shares.values()]
        held = sum(h.numel() * h.element_size() for h in self._previous.values())
        return {"reused": torch.stack(shares).mean() if shares else 0.0, "maps": len(shares), "held_mb": held / 2**20}

    @override
    def summary(self) -> str:
        last = self.report()
        return (
            f"{float(last['reused']):.0%} of the last pass's gradients at {last['maps']} maps were those of the pass before;"
            " that saved no time"
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        session = self._session or self._past
        own = {
            "previous": {path: h.cpu() for path, h in self._previous.items()},
            "thresholds": {path: float(threshold) for path, threshold in self._thresholds.items()},
        }
        return {"ranks": [own] if session is None else session.gather(own), "looked": self._looked}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ranks, session = state_dict["ranks"], self._session
        if session is None or not session.fitting:
            return
        self._looked = state_dict["looked"]
        if len(ranks) != session.replicas.count:
            rank_zero_info(
                f"{WHO}: the checkpoint is of {len(ranks)} processes and this run has {session.replicas.count}, so that the"
                " first step has no gradients to compare with."
            )
            return
        own, device = ranks[session.rank], session.trainer.strategy.root_device
        self._previous = {path: h.to(device) for path, h in own["previous"].items()}
        self._thresholds = {path: torch.tensor(value, device=device) for path, value in own["thresholds"].items()}


def _is_called(m: nn.Module) -> bool:
    """Whether a module that holds a weight computes its map when it is called."""
    return not isinstance(m, nn.MultiheadAttention | nn.RNNBase | NonDynamicallyQuantizableLinear) and hasattr(
        m, "weight"
    )
