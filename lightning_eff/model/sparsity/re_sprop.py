"""ReSprop: reuse the parts of a layer's output gradient that changed little since the last step (Goli & Aamodt 2020)."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_eff._core._arguments.kinds import Either, Fraction, Number, OneOf
from lightning_eff._core._stack.compiled import compiled_around
from lightning_eff._core._stack.unfreezing import thawing
from lightning_eff._core.patches import hook_behind
from lightning_eff._core.search_space import RunProfile, SearchSpace, Uniform
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Stage, Step, looking
from lightning_eff._core.technique import Control, Technique
from lightning_eff.model.sparsity._masks.arguments import Dense, Sparsity, Weights
from lightning_eff.model.sparsity._masks.finding import Weight, chosen

WHO = "ReSprop"


def hybrid(g: Tensor, previous: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor]:
    """The gradient to propagate, and where it is the previous one.

    ``g~ = h + T(g - h)`` with ``T(d) = d`` where ``|d| > theta`` and 0 elsewhere: ``g`` where they differ, and ``h``
    elsewhere.

    Args:
        g: the gradient at a layer's output, (B, ...).
        previous: ``h``, of one sample of the previous step, (...).
        threshold: ``theta`` >= 0. Infinity gives ``h`` everywhere, and 0 gives ``g``.
    """
    # g̃ = h + T(g − h)
    reused = (g - previous).abs() <= threshold
    return torch.where(reused, previous, g), reused


def next_threshold(threshold: Tensor, reused: Tensor, sparsity: Tensor | float) -> Tensor:
    """``2 theta`` if the reused fraction is below ``sparsity``, else ``theta / 2``."""
    return torch.where(reused < sparsity, 2.0 * threshold, 0.5 * threshold)


def gains_nothing(profile: RunProfile) -> str | None:
    """Why a search for a faster recipe need not try it."""
    return "products with reused gradients take as long as others, so it saves no time"


class ReSprop(Technique):
    """Reuse most of the previous step's gradient at the output of each linear layer and convolution.

    In each backward pass, the gradient ``g`` at each layer's output is compared with ``h``, the gradient of one random sample
    of the previous pass. Where they differ by no more than a threshold, ``h`` replaces ``g`` in the gradients of the weight,
    the bias and the input. Products with ``h`` are the same for all samples, so special hardware could compute them once and
    skip the reused part of the others. Each layer's threshold is found by doubling and halving, so that about a fraction
    ``sparsity`` of the elements is reused. This fraction rises linearly from 0 during ``warmup``.

    Use it for research on such hardware, to see the effect on training. **It saves no time, and costs some**: CPUs and GPUs
    compute all products as before, and the comparisons in addition. It keeps one sample's gradients of all layers between
    steps, as much memory as one sample's activations. The paper leaves the biases' gradients unchanged, and changes only
    convolutions.

    **It can undo training.** A byte-level GPT at a learning rate of 0.01 with ``sparsity=0.5`` reaches a loss of 2.4 in 100
    steps, compared with 2.2 without. Its loss then rises, and ends at 2.8 instead of 1.6 (one seed). Zeros instead of reused
    gradients, or a head that is left alone, do not help. At a tenth of that learning rate it ends at 2.2 instead of 2.0. With
    ``sparsity=0.1``, weight gradients equal the batch's (cosine 1.000). A small ViT learns with 0.5, and almost nothing with
    0.9.

    It applies to ``nn.Linear``, transformers' ``Conv1D`` and convolutions that are called as modules and have a trainable
    weight. It skips ``nn.MultiheadAttention``, recurrent layers, experts in one tensor, a head whose logits are never
    computed (``FusedLinearCrossEntropy``), and a call whose output has another shape than in the previous pass, as with
    sequences of other lengths. If a layer is called several times in a pass, each call is compared with the same call of the
    previous pass. A sample is an index of the output's first dimension. Each rank compares with its own gradients. It logs
    ``reused`` (the fraction of the elements), ``maps`` (compared calls of layers) and ``held_mb`` (MB of gradients that are
    kept for the next pass).

    Args:
        sparsity: the fraction of the gradient to reuse. 0 is plain training. The paper has at most 0.9.
        warmup: the fraction of the budget over which the reused fraction rises. The paper's is 8 of 90 epochs.
        threshold: a fixed threshold for all layers and steps, possibly ``math.inf``. None finds one for each layer.
        names: dotted paths of weights or of modules that hold them, their last parts, or patterns, such as
            ``["layers.*.mlp.*"]``. None takes all, ``[]`` is plain training.
        dense: patterns of weights whose layers are left alone.

    Raises:
        ValueError: for a value out of range. At setup, if there is no such layer, a name matches nothing, a layer is in
            compiled code, or the precision has a gradient scaler. After the first step, if no layer was called.

    Example:
        >>> trainer = L.Trainer(max_epochs=10, callbacks=[ReSprop(0.5, dense=["head"])])

    References: Goli & Aamodt 2020, "ReSprop: Reuse Sparsified Backpropagation", CVPR,
        https://openaccess.thecvf.com/content_CVPR_2020/html/Goli_ReSprop_Reuse_Sparsified_Backpropagation_CVPR_2020_paper.html.
    """

    saves = "no time: products of the backward pass on hardware that can skip reused ones"
    paper = "Goli & Aamodt 2020, CVPR"
    constraints = "layers that are called as modules, outside compiled code; no fp16 scaler"
    search_space = SearchSpace({"sparsity": Uniform(0.1, 0.9)}, gains_nothing)
    control = Control("the baseline with the full gradient for as many steps")
    conflicts: ClassVar = {
        **dict.fromkeys(
            ("BitFit", "PrefixTuning", "PromptTuning", "VeRA", "VisualPromptTuning"),
            "it freezes the weights of the layers whose gradients are reused",
        ),
        "RegionalCompilation": "gradients inside compiled blocks cannot be changed",
        "KFAC": "its factors would use gradients that are not those of the batch",
        "SequencePacking": "padding would get other samples' gradients, and it finds the tokens that count by their gradients",
    }
    needs_budget: ClassVar[bool] = True

    def __init__(
        self,
        sparsity: Sparsity = 0.9,
        *,
        warmup: Annotated[float, Fraction()] = 0.1,
        threshold: Annotated[float | None, Either(Number(at_least=0), OneOf(math.inf))] = None,
        names: Weights = None,
        dense: Dense = (),
    ) -> None:
        self.sparsity, self.warmup, self.threshold = float(sparsity), float(warmup), threshold
        self.names, self.dense = None if names is None else list(names), list(dense)

    def _reset(self) -> None:
        self._maps: dict[str, nn.Module] = {}
        self._calls: Counter[str] = Counter()  # of each layer, in the current pass
        self._previous: dict[str, Tensor] = {}  # by call, "path#number": of a sample of the previous pass
        self._next: dict[str, Tensor] = {}
        self._thresholds: dict[str, Tensor] = {}
        self._drawn: dict[str, float] = {}  # by layer: which sample is kept of this pass, in [0, 1)
        self._shares: dict[str, Tensor] = {}  # the fractions that were reused in this pass
        self._handles: list[RemovableHandle] = []
        # whether a layer's output had a gradient, and whether all ranks know
        self._met = self._looked = False

    @property
    @override
    def neutral(self) -> bool:
        return (self.sparsity == 0.0 and self.threshold is None) or self.names == []

    # -- the run

    @override
    def check(self, session: Session) -> None:
        if getattr(session.trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                f"{WHO}: the gradient scaler of precision={session.trainer.precision!r} scales the gradients of two steps"
                " differently. Use precision='bf16-mixed'."
            )

    @override
    def attach(self, session: Session) -> None:
        session.chain.add(Stage.JOIN, self._link, order=-1)  # all passes of a step share these hooks
        session.chain.add(Stage.SAVE, self._pass)

    @override
    def on_optimizers(self, session: Session) -> None:
        # by now all other techniques and precision plugins have changed the module
        module = session.module
        weights: dict[str, Weight] = thawing(lambda: self._chosen(module), session._stacks)()
        owners = {name.rpartition(".")[0] for name in weights}
        found: dict[str, nn.Module] = {
            path: m for path, m in module.named_modules() if path in owners and _is_called(m)
        }
        if not found:
            raise ValueError(
                f"{WHO}: the weights {', '.join([*weights][:4])} of {type(module).__name__} belong to no layer that is called"
                " as a module. Name weights of nn.Linear, Conv1D or convolutions, or remove the callback."
            )
        if compiled_around(module, found.values()):
            raise ValueError(
                f"{WHO}: layers of {type(module).__name__} are in compiled code, where their gradients cannot be changed. Do"
                " not compile them, or remove the callback."
            )
        if left := sorted(owners - found.keys()):
            rank_zero_info(
                f"{WHO}: skips {len(left)} modules that do not use their weights as a layer, such as {left[0]}."
            )
        self._maps = found

    def _chosen(self, module: nn.Module) -> dict[str, Weight]:
        use = "reused"
        return chosen(module, self.names, self.dense, (1, 1), who=WHO, use=use)

    @override
    def on_batch_start(self, session: Session, batch: Any, batch_idx: int) -> None:
        generator = session.generator(WHO, session.rank, session.trainer.global_step, batch_idx)
        drawn = torch.rand(len(self._maps), generator=generator, dtype=torch.float64).tolist()
        self._drawn, self._shares = dict(zip(self._maps, drawn, strict=True)), {}

    def _link(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._unhook()
        self._handles = [hook_behind(m, self._at(path)) for path, m in self._maps.items()]
        self.session.when_step_ends(self._unhook)  # checkpointed parts may run again until then
        return proceed(batch)

    def _pass(self, step: Step, batch: Any, proceed: Proceed) -> Any:
        self._calls.clear()
        return proceed(batch)

    def _at(self, path: str) -> Callable[..., None]:
        def see(owner: nn.Module, args: Any, output: Any) -> None:
            # stand-ins for logits are not plain tensors, and measuring passes need the batch's own gradients
            if torch.is_grad_enabled() and type(output) is Tensor and output.requires_grad and not looking():
                call = f"{path}#{self._calls[path]}"
                self._calls[path] += 1
                output.register_hook(lambda g: self._backward(path, call, g))

        return see

    @torch.no_grad()
    def _backward(self, path: str, call: str, g: Tensor) -> Tensor:
        """The gradient to propagate, given the gradient at a layer's output."""
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
                f"{WHO}: none of the {len(self._maps)} layers of {type(session.module).__name__}, such as"
                f" {next(iter(self._maps))}, had a gradient at its output in the first step. Name layers that are called as"
                " modules with names=[...], or remove the callback."
            )

    @override
    def detach(self, session: Session) -> None:
        self._unhook()
        self._maps = {}

    # -- reports and state

    @override
    def report(self) -> dict[str, float | int | Tensor]:
        shares = [*self._shares.values()]
        held = sum(h.numel() * h.element_size() for h in self._previous.values())
        return {"reused": torch.stack(shares).mean() if shares else 0.0, "maps": len(shares), "held_mb": held / 2**20}

    @override
    def summary(self) -> str:
        last = self.report()
        return (
            f"reused {float(last['reused']):.0%} of the gradients at {last['maps']} layers in the last pass; this saved no"
            " time"
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
                f"{WHO}: the checkpoint is from {len(ranks)} processes and this run has {session.replicas.count}, so the first"
                " step reuses no gradients."
            )
            return
        own, device = ranks[session.rank], session.trainer.strategy.root_device
        self._previous = {path: h.to(device) for path, h in own["previous"].items()}
        self._thresholds = {path: torch.tensor(value, device=device) for path, value in own["thresholds"].items()}


def _is_called(m: nn.Module) -> bool:
    """Whether a module that holds a weight applies it when it is called."""
    return not isinstance(m, nn.MultiheadAttention | nn.RNNBase | NonDynamicallyQuantizableLinear) and hasattr(
        m, "weight"
    )
