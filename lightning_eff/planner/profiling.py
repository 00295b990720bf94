"""The profile of a module for a plan: parameters, FLOPs, bytes moved and bytes kept of each block.

The profiler runs a training step at two batch sizes and fits each count as a line in the number of samples. The tensors are
fake (shapes without data), so it can profile a module of any size on any machine.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from lightning_eff._core._stack.chains import Feeding, watched
from lightning_eff._core.batches import num_samples, num_tokens
from lightning_eff._core.blocks import BlockStack, Candidate, find_stack, hidden_of, repeated, split_output
from lightning_eff.planner._launch.abilities import carries_pairs, fp8_share, widths
from lightning_eff.planner._launch.arguments import check_precision
from lightning_eff.planner.counting import Counter, Work, storage_key

_SIZES = (2, 4)  # with one sample, normalization over the batch has no variance


@dataclass(frozen=True)
class Precision:
    """The bytes and the matmul type of a Trainer's precision.

    Attributes:
        name: the Trainer's name.
        compute_bytes: bytes per element of a matmul's input.
        weight_bytes: bytes per parameter.
        grad_bytes: bytes per gradient element.
        fp8: linear layers multiply in FP8.
        tf32: matmuls run as TF32, at half the BF16 speed.
    """

    name: str
    compute_bytes: int
    weight_bytes: int
    grad_bytes: int
    fp8: bool = False
    tf32: bool = False


def precision_of(name: str | int | None, *, fp8: bool = False) -> Precision:
    """Return the precision for ``Trainer(precision=name)``; ``fp8`` means that a plugin multiplies in FP8.

    Raises:
        ValueError: if plans do not support the setting.
    """
    text = check_precision(name)
    if text in ("bf16-mixed", "16-mixed"):
        return Precision(text, 2, 4, 4, fp8)
    if text in ("bf16-true", "16-true"):
        return Precision(text, 2, 2, 2, fp8)
    # an FP8 plugin wraps another precision; the default assumes 16-bit activations between layers
    return Precision(text, 2, 4, 4, True) if fp8 else Precision(text, 4, 4, 4, tf32=True)


@dataclass(frozen=True)
class Line:
    """A count that grows with the samples: ``fixed + slope * samples``."""

    fixed: Work
    slope: Work

    def at(self, samples: float) -> Work:
        """Return the count at ``samples``."""
        return self.fixed.combined(self.slope, lambda fixed, slope: fixed + slope * samples)


@dataclass(frozen=True)
class Part:
    """A block, or the part of the module before or after the blocks.

    Attributes:
        forward: work of the forward pass.
        backward: work of the backward pass.
        parameters: number of parameters that no other part has.
    """

    forward: Line
    backward: Line
    parameters: int


@dataclass(frozen=True)
class ModuleProfile:
    """The profile of a module.

    Attributes:
        name: the module's class.
        stack: dotted path of the blocks, or None.
        blocks: each block.
        before: the part before the first block.
        after: the part after the last block, including the loss.
        shared_parameters: parameters used before and after the blocks (tied embeddings), also in ``before.parameters``.
        hidden_bytes: bytes of one sample's hidden state between two blocks.
        tokens: tokens per sample, or 0 if the batch has no token ids.
        widths: numbers that a tensor parallel size must divide: heads, and dimensions of the blocks' matrices.
        precision: the precision of the profile.
        state_bytes: bytes of optimizer state per parameter.
        notes: assumptions to report.
        stream_bytes: like ``hidden_bytes``, in the type between blocks (FP32 in mixed precision); 0 means the same.
        paired: tensor parallelism divides attention and MLP as pairs, with one exchange after each. Otherwise it divides each
            linear layer and gathers its output on all ranks.
        fp8_share: fraction of the FLOPs of the blocks' linear layers that FP8 makes faster.
    """

    name: str
    stack: str | None
    blocks: tuple[Part, ...]
    before: Part
    after: Part
    shared_parameters: int
    hidden_bytes: float
    tokens: int
    widths: tuple[int, ...]
    precision: Precision
    state_bytes: float
    notes: tuple[str, ...] = ()
    stream_bytes: float = 0.0
    paired: bool = True
    fp8_share: float = 1.0

    @property
    def stream(self) -> float:
        """Bytes of one sample's hidden state in the type between blocks."""
        return self.stream_bytes or self.hidden_bytes

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return self.before.parameters + self.after.parameters + sum(block.parameters for block in self.blocks)

    def model_flops(self, samples: float) -> float:
        """Return the FLOPs of a forward and a backward pass without recomputation."""
        parts = (self.before, *self.blocks, self.after)
        return sum(p.forward.at(samples).flops + p.backward.at(samples).flops for p in parts)

    def record(self) -> dict[str, Any]:
        """Return sums and the first block as plain values for JSON."""
        first = self.blocks[0] if self.blocks else self.after
        return {
            "module": self.name,
            "stack": self.stack,
            "num_blocks": len(self.blocks),
            "parameters": self.parameters,
            "shared_parameters": self.shared_parameters,
            "model_flops_per_sample": self.model_flops(1.0),
            "hidden_bytes_per_sample": self.hidden_bytes,
            "stream_bytes_per_sample": self.stream,
            "tensor_parallel_pairs": self.paired,
            "fp8_share": self.fp8_share,
            "tokens_per_sample": self.tokens,
            "precision": asdict(self.precision),
            "optimizer_state_bytes_per_parameter": self.state_bytes,
            "first_block": {
                "parameters": first.parameters,
                "forward_flops_per_sample": first.forward.slope.flops,
                "backward_flops_per_sample": first.backward.slope.flops,
                "activation_bytes_per_sample": first.forward.slope.saved_bytes,
            },
            "notes": list(self.notes),
        }


def profile_module(
    module: LightningModule,
    batch: Any,
    *,
    precision: Precision,
    fake_mode: FakeTensorMode | None,
    state_bytes: float = 8.0,
    layers: str | Sequence[str] | None = None,
    notes: tuple[str, ...] = (),
) -> ModuleProfile:
    """Profile a training step of ``module``.

    Args:
        module: the module, built under ``fake_mode`` or with real tensors.
        batch: a real batch of the train loader.
        precision: the recipe's precision.
        fake_mode: the mode of the module's parameters; None runs the step with real data.
        state_bytes: bytes of optimizer state per parameter.
        layers: the blocks, as a dotted path, a pattern or a list of paths; None searches for them.
        notes: assumptions so far.

    Raises:
        ValueError: if the step fails, or the stack is ambiguous.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"plan: {type(module).__name__} optimizes manually, and a plan needs one forward and one backward pass per step."
            " Set automatic_optimization = True."
        )
    if precision.weight_bytes == 2:
        with fake_mode or nullcontext():
            _halve(module)
    found = _stack(module, layers, _fitted(batch, _SIZES[0], precision, fake_mode), fake_mode)
    stack = BlockStack(found) if found else None
    blocks = stack.blocks if stack else []
    counted = [_count(module, blocks, batch, _SIZES[0], precision, fake_mode)]
    like = _likes(counted[0], blocks)
    counted.append(_second(module, stack, like, batch, precision, fake_mode))
    sizes = {storage_key(p): p.numel() for p in module.parameters()}
    low = counted[0].regions
    high = {at: counted[1].regions[like[at] if isinstance(at, int) else at] for at in low}
    owners: dict[int, set[int | str]] = {}
    for at, region in low.items():
        for key in region.parameters:
            owners.setdefault(key, set()).add(at)
    for i, block in enumerate(blocks):  # includes parameters that the step did not read, as in experts without tokens
        for p in block.parameters():
            owners.setdefault(storage_key(p), set()).add(i)
    outside = {key for key in sizes if not all(isinstance(at, int) for at in owners.get(key, {"before"}))}
    shared = {key for key in outside if {"before", "after"} <= owners.get(key, set())}

    def part(at: int | str) -> Part:
        if isinstance(at, int):
            mine = [key for key, where in owners.items() if key not in outside and min(where, key=str) == at]
        else:
            mine = [k for k in outside if ("after" if owners.get(k) == {"after"} else "before") == at]
        return Part(
            _line(low[at].forward, high[at].forward),
            _line(low[at].backward, high[at].backward),
            sum(sizes[key] for key in mine),
        )

    hidden = counted[1].hidden
    tokens = num_tokens(batch) // max(1, num_samples(batch))
    return ModuleProfile(
        name=type(module).__name__,
        stack=stack.path if stack else None,
        blocks=tuple(part(i) for i in range(len(blocks))),
        before=part("before"),
        after=part("after"),
        shared_parameters=sum(sizes[key] for key in shared),
        hidden_bytes=0.0 if hidden is None else hidden.numel() * precision.compute_bytes / _SIZES[1],
        tokens=tokens,
        widths=widths(blocks, module),
        precision=precision,
        state_bytes=state_bytes,
        notes=notes,
        stream_bytes=0.0 if hidden is None else hidden.numel() * hidden.element_size() / _SIZES[1],
        paired=carries_pairs(module, blocks),
        fp8_share=fp8_share(blocks),
    )


def _stack(
    module: LightningModule, layers: str | Sequence[str] | None, batch: Any, fake_mode: FakeTensorMode | None
) -> Candidate | None:
    """Return the stack to divide, or None if a step on ``batch`` shows that the blocks of every list run in parallel."""
    found = repeated(module)
    feeding = {c.path: Feeding() for c in found}
    with fake_mode or nullcontext(), ExitStack() as scope, suppress(Exception):  # _count raises the same error
        for c in found:
            scope.enter_context(watched(c.named_blocks.values(), feeding[c.path].seen))
        _step(module)(batch)
    apart = {c.path for c in found if (told := feeding[c.path].verdict) is False or (c.by_name and not told)}
    if not layers and apart.issuperset(feeding):
        return None
    return find_stack(module, layers, who="plan", without=lambda: apart, named=True)


def _halve(module: nn.Module) -> None:
    """Convert the module to bfloat16; ``module.to`` cannot convert fake parameters that have two names."""
    halves: dict[int, Tensor] = {}

    def half(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if id(tensor) not in halves:
            copy = tensor.detach().to(torch.bfloat16)
            is_parameter = isinstance(tensor, nn.Parameter)
            halves[id(tensor)] = nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_parameter else copy
        return halves[id(tensor)]

    keep = list(module.parameters())  # the id of a freed tensor can be used again
    for m in module.modules():
        for tensors in (m._parameters, m._buffers):
            found: dict[str, Any] = dict(tensors)
            tensors.update({name: half(tensor) for name, tensor in found.items()})  # pyright: ignore[reportCallIssue, reportArgumentType]
    del keep


def _line(low: Work, high: Work) -> Line:
    a, b = _SIZES
    slope = low.combined(high, lambda at_a, at_b: max(0.0, (at_b - at_a) / (b - a)))
    return Line(low.combined(slope, lambda at_a, s: max(0.0, at_a - a * s)), slope)


def _likes(counter: Counter, blocks: list[nn.Module]) -> list[int]:
    """Return, for each block, the index of the first block with the same work and parameter shapes."""
    kinds: dict[object, int] = {}
    likes: list[int] = []
    for i, block in enumerate(blocks):
        region = counter.regions[i]
        key = (astuple(region.forward), astuple(region.backward), tuple(p.shape for p in block.parameters()))
        likes.append(kinds.setdefault(key, i))
    return likes


def _second(
    module: LightningModule,
    stack: BlockStack | None,
    like: list[int],
    batch: Any,
    precision: Precision,
    fake_mode: FakeTensorMode | None,
) -> Counter:
    """Count at the second batch size, with only the blocks up to the last new kind if the module allows it."""
    if stack is None:
        return _count(module, [], batch, _SIZES[1], precision, fake_mode)
    few = max(like) + 1
    if few <= len(like) // 2:
        stack.active = few
        try:
            with stack.view(training=True):
                counter = _count(module, stack.blocks[:few], batch, _SIZES[1], precision, fake_mode)
            if all(counter.regions[i].forward.flops for i in range(few)):
                return counter
        except (ValueError, TypeError):  # the module relies on its depth, so run all blocks
            pass
        finally:
            stack.active = len(stack)
    return _count(module, stack.blocks, batch, _SIZES[1], precision, fake_mode)


def _fitted(batch: Any, size: int, precision: Precision, fake_mode: FakeTensorMode | None) -> Any:
    """Return ``batch`` with ``size`` samples, in the types of the step."""

    def fitted(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim:
            value = value[torch.arange(size) % value.shape[0]]
        if value.is_floating_point() and precision.weight_bytes == 2:
            value = value.to(torch.bfloat16)
        return value if fake_mode is None else fake_mode.from_tensor(value)

    with fake_mode or nullcontext():
        return tree_map(fitted, batch)


def _count(
    module: LightningModule,
    blocks: list[nn.Module],
    batch: Any,
    size: int,
    precision: Precision,
    fake_mode: FakeTensorMode | None,
) -> Counter:
    counter = Counter(module, blocks, hidden_of, lambda output: split_output(output)[0])
    mixed = torch.autocast("cpu", torch.bfloat16) if "mixed" in precision.name else nullcontext()
    module.train()
    step = _step(module)
    with fake_mode or nullcontext(), torch.enable_grad():
        inputs = _fitted(batch, size, precision, fake_mode)
        try:
            with counter.counting():
                with mixed:
                    output = step(inputs)
                loss = output["loss"] if isinstance(output, dict) else output
                if not isinstance(loss, Tensor):
                    raise TypeError(
                        f"training_step returned {type(output).__name__}; expected the loss, or a dict with it"
                    )
                counter.backward(loss)
        except Exception as error:
            way_out = (
                "Pass --profile real to run it on real tensors, on a machine where it fits"
                if fake_mode is not None
                else "Fix the training step, which the plan runs on the CPU"
            )
            raise ValueError(
                f"plan: a training step of {type(module).__name__} on {size} samples failed"
                f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). {way_out}."
            ) from error
        finally:
            module.zero_grad(set_to_none=True)
    return counter


def _step(module: LightningModule) -> Callable[[Any], Any]:
    """Return the training step as a function of the batch, with logging muted."""
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def run(batch: Any) -> Any:
        before = {name: module.__dict__.get(name) for name in ("log", "log_dict")}
        module.__dict__.update(log=lambda *args, **kwargs: None, log_dict=lambda *args, **kwargs: None)
        try:
            return module.training_step(batch, 0) if takes_index else module.training_step(batch)
        finally:
            for name, value in before.items():
                module.__dict__.pop(name)
                module.__dict__.update({} if value is None else {name: value})

    return run
