"""A zoo of ordinary modules: twelve steps of AdamW in float64 equal the single process's on whole batches, or are refused."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from lightning_eff.strategies._pipeline.batch import split
from tests.models import LENGTH, VOCAB, HuggingFace, make_batch
from tests.runs import largest
from tests.strategies.pipeline_compare import Logs, pipeline, steps, worst_of
from tests.strategies.pipeline_hazards import CLASSES, DIM, Layer, Plain

STEPS = 12

# -- residuals in the caller


class Branch(Layer):
    """A block without a residual of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x


class Residual(Plain):
    """``x = x * s + block(x)``."""

    block = Branch

    def __init__(self, num_layers: int = 8) -> None:
        super().__init__(num_layers)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, num_layers))

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = h * self.scale[i] + block(h)
        return h


class PostNorm(Residual):
    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = F.layer_norm(h * self.scale[i] + block(h), (DIM,))
        return h


class InPlaceResidual(Residual):
    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            added = block(h)
            h = h.mul(self.scale[i]).add_(added)
        return h


class CheckpointedResidual(Residual):
    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = checkpoint(lambda x, i=i, block=block: x * self.scale[i] + block(x), h, use_reentrant=False)
        return h


class Prompted(Residual):
    """A learnt value is written into the hidden state between blocks, in place."""

    block = Layer

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = block(h)
            h[:, 0] += self.scale[i]
        return h


class Modes(Residual):
    """The caller computes otherwise in training than in evaluation."""

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = h * (self.scale[i].abs() + 0.1 if self.training else self.scale[i]) + block(h)
        return h

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["x"])


class NormedResidual(Residual):
    """The block gets another tensor than the one that the caller adds to."""

    def through(self, h: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            h = h * self.scale[i] + block(F.layer_norm(h, (DIM,)))
        return h


# -- what goes to every block


class Modulated(Layer):
    """Shifted and scaled by a condition, as in a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 2 * DIM))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale, shift = self.modulation(condition)[:, None].chunk(2, -1)
        return super().forward(x * (1 + scale) + shift)


class AdaLN(Plain):
    """Predicts the noise that is in its input."""

    block = Modulated

    def __init__(self) -> None:
        super().__init__(num_layers=8)
        self.condition = nn.Sequential(nn.Linear(1, DIM), nn.SiLU(), nn.Linear(DIM, DIM))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, t = batch["x"], batch["y"][:, None].to(batch["x"]) / CLASSES
        h, condition = self.enter(x * (1 - t[..., None])), self.condition(t)
        for block in self.blocks:
            h = block(h, condition)
        return F.mse_loss(self.leave(h), x[..., :CLASSES])


class EmbeddingSkip(Plain):
    def __init__(self) -> None:
        super().__init__(num_layers=8)

    def through(self, h: Tensor) -> Tensor:
        first = h = torch.tanh(h)
        for block in self.blocks:
            h = block(h + first)
        return h


# -- losses


class Positions(Plain):
    """Classifies positions; ``loss(logits, batch)``."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.__dict__["loss"] = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.__dict__["loss"](self.leave(self.through(self.enter(batch["x"]))), batch)


def apiece(logits: Tensor, batch: Any) -> Tensor:
    labels = batch["labels"].clamp(min=0)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def ignoring(logits: Tensor, batch: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), **kwargs)


def masked(logits: Tensor, batch: Any) -> Tensor:
    return (apiece(logits, batch) * batch["mask"]).sum() / batch["mask"].sum()


def of_samples(logits: Tensor, batch: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.mean(1), batch["y"], **kwargs)


def two_means(logits: Tensor, batch: Any) -> Tensor:
    return masked(logits, batch) + of_samples(logits, batch)


def contrastive(logits: Tensor, batch: Any) -> Tensor:
    z = F.normalize(logits.mean(1), dim=-1)
    return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(z)))


CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=torch.float64)


def by_class(logits: Tensor, batch: Any) -> Tensor:
    return of_samples(logits, batch, weight=CLASS_WEIGHTS.to(logits))


def class_weights(part: Any) -> float:
    return float(CLASS_WEIGHTS[part["y"]].sum())


def batches(mark: int = -100) -> list[Any]:
    """The first is whole; of the others samples have all lengths, and labels are ``mark`` beyond them."""
    found = []
    for seed in range(STEPS):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LENGTH + 1, (8, 1), generator=g) if seed else torch.full((8, 1), LENGTH)
        inside = torch.arange(LENGTH) < lengths
        labels = torch.randint(0, CLASSES, (8, LENGTH), generator=g)
        if mark >= 0:
            labels = labels.clamp(min=1)
        found.append(
            {
                "x": torch.randn(8, LENGTH, DIM, generator=g, dtype=torch.float64),
                "y": torch.randint(0, CLASSES, (8,), generator=g),
                "labels": labels.masked_fill(~inside, mark),
                "mask": inside,
            }
        )
    return found


# -- what blocks leave next to the hidden state


class Attributes(Plain):
    """Blocks that keep an auxiliary loss, which the step adds."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.last_aux = y.pow(2).mean()
            return y

    block = Layer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(block.last_aux for block in self.blocks)


class Deleted(Attributes):
    """... which it takes away at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for block in self.blocks:
            del block.last_aux
        return loss


class Listed(Plain):
    """A list that blocks append to, emptied before the step ends."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.store.append(y.pow(2).mean())
            return y

    block = Layer

    def __init__(self) -> None:
        super().__init__()
        self.aux: list[Tensor] = []
        for block in self.blocks:
            block.store = self.aux

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.aux.clear()
        return loss


# -- what is refused


class HookedApart(Plain):
    """Hooks whose list no module has."""

    def __init__(self) -> None:
        super().__init__()
        aux: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda m, args, out: aux.append(out.mean()))
        self.__dict__["_empty"] = aux.clear

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._empty()
        return loss


OUTSIDE: list[Tensor] = []


class Outside(Plain):
    """A list of the file's."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            OUTSIDE.append(y.mean())
            return y

    block = Layer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        OUTSIDE.clear()
        return super().training_step(batch, batch_idx)


class Averaged(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(DIM))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.enter(batch["x"])
        self.average.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
        return F.cross_entropy(self.leave(self.through(h - self.average).mean(1)), batch["y"])


class Counting(Plain):
    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._count = getattr(self, "_count", 0) + 1
        return super().training_step(batch, batch_idx) * 0.99**self._count


class Teacher(Plain):
    """A second network's weights follow the first's, in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.enter).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.data.lerp_(self.enter.weight, 0.1)
        return super().training_step(batch, batch_idx) + self.teacher(batch["x"]).mean()


# -- what looks like it and is not


class Looking(Plain):
    """Blocks keep what they computed, detached; the step keeps its losses, fills a cache, and notes a shape."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.seen = y.detach()
            return y

    block = Layer

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        spectral_norm(self.leave).eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self.enter, "cache"):
            self.enter.cache = torch.arange(5.0)
        self.enter.length = batch["x"].shape[1]  # pyright: ignore[reportAttributeAccessIssue]
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


# -- Hugging Face

_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
_DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert_pretraining() -> HuggingFace:
    config = hf.BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **_SIZES, **_DROPLESS)
    return HuggingFace(hf.BertForPreTraining(config).train())


def mixtral() -> HuggingFace:
    config = hf.MixtralConfig(
        vocab_size=VOCAB,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
        experts_implementation="eager",  # the others take no float64
        **_SIZES,
    )
    return HuggingFace(hf.MixtralForCausalLM(config).train())


def gpt2() -> HuggingFace:
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_head=2, n_layer=4, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return HuggingFace(hf.GPT2LMHeadModel(config).train())


def texts(*, pretraining: bool = False) -> list[Any]:
    found = []
    for seed in range(STEPS):
        batch = {k: v for k, v in make_batch("gpt2", size=8, seed=seed).items() if k in ("input_ids", "labels")}
        lengths = torch.arange(8)[:, None] * (seed + 3) % (LENGTH - 4) + 4 if seed else torch.full((8, 1), LENGTH)
        inside = torch.arange(LENGTH) < lengths
        batch |= {"attention_mask": inside.long(), "labels": batch["labels"].masked_fill(~inside, -100)}
        if pretraining:
            batch["next_sentence_label"] = batch["input_ids"][:, 0] % 2
        found.append(batch)
    return found


# -- how they are tried

Made = tuple[Callable[[], nn.Module], Callable[[], list[Any]]]
RESIDUALS: dict[str, Made] = {
    cls.__name__: (cls, batches) for cls in (Residual, PostNorm, InPlaceResidual, CheckpointedResidual, Prompted)
}
GIVEN: dict[str, Made] = {"AdaLN": (AdaLN, batches), "EmbeddingSkip": (EmbeddingSkip, batches)}
LOSSES: dict[str, Made] = {
    "labels of -100": (partial(Positions, ignoring), batches),
    "labels of -1": (partial(Positions, partial(ignoring, ignore_index=-1)), partial(batches, -1)),
    "padding 0": (partial(Positions, partial(ignoring, ignore_index=0)), partial(batches, 0)),
    "a mask": (partial(Positions, masked), batches),
    "a sum": (partial(Positions, partial(ignoring, reduction="sum")), batches),
    "samples": (partial(Positions, of_samples), batches),
    "kept apart": (Looking, batches),
    "GPT-2": (gpt2, texts),
    "Mixtral": (mixtral, texts),
    **{cls.__name__: (cls, batches) for cls in (Attributes, Deleted, Listed)},
}
WEIGHED: dict[str, tuple[Made, Callable[[Any], float]]] = {
    "class weights": ((partial(Positions, by_class), batches), class_weights),
}
NO_RULE: dict[str, Made] = {
    "two means": (partial(Positions, two_means), batches),
    "contrastive": (partial(Positions, contrastive), batches),
    "class weights": (partial(Positions, by_class), batches),
    "BertForPreTraining": (bert_pretraining, partial(texts, pretraining=True)),
}
SIDEWAYS: dict[str, Made] = {cls.__name__: (cls, batches) for cls in (HookedApart, Outside)}
MOVING: dict[str, Made] = {cls.__name__: (cls, batches) for cls in (Averaged, Counting, Teacher)}


def trained(made: Made, schedule: str = "1F1B", **kwargs: Any) -> dict[str, float]:
    """The largest differences from the single process after each of twelve steps on whole batches, and after all."""
    make, data = made
    torch.manual_seed(0)
    plain = make().double()
    module = copy.deepcopy(plain)
    if "loss" in plain.__dict__:
        module.__dict__["loss"] = plain.__dict__["loss"]
    Logs(plain)
    Logs(module)
    given = data()
    wanted, optimizer = [], torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in given:
        optimizer.zero_grad()
        output = steps(plain)(batch)
        loss = output if isinstance(output, Tensor) else output["loss"]
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    pipe = pipeline(module, schedule, 4, **kwargs)
    pipe.verify(steps(module), given[0])
    pipe.cut()
    found, optimizer = [], torch.optim.AdamW(module.parameters(), lr=1e-2)
    for batch in given:
        optimizer.zero_grad()
        found.append(float(pipe.run(steps(module), batch)))
        optimizer.step()
    values = dict(plain.named_parameters(remove_duplicate=False))
    return worst_of(
        {
            "loss": largest(abs(a - b) for a, b in zip(found, wanted, strict=True)),
            "weights": largest(float((p - values[n]).detach().abs().max()) for n, p in module.named_parameters()),
            "learnt": -abs(wanted[-1] - wanted[0]),  # the largest of the negative is the least
        }
    )


def set_up(made: Made) -> None:
    """As far as the check of the first batch."""
    make, data = made
    module = make().double()
    Logs(module)
    pipeline(module).verify(steps(module), data()[0])


def evaluated() -> dict[str, float]:
    """A step of evaluation whose caller computes otherwise than in training."""
    module, whole = Modes().double(), batches()[0]
    plain = copy.deepcopy(module).eval()
    Logs(module)
    pipe = pipeline(module, "Interleaved1F1B")
    pipe.verify(steps(module), whole)
    pipe.cut()
    module.eval()
    found = {}
    for name, context in (("no_grad", torch.no_grad), ("inference", torch.inference_mode)):
        with context():
            output = pipe.evaluate(lambda b: module.validation_step(b, 0), whole)
            found[name] = float((output - plain.validation_step(whole, 0)).abs().max())
    return found


def in_parts(microbatch_weight: Callable[[Any], float]) -> dict[str, float]:
    """A loss that no rule fits, by a given one: the loss and the first gradient are the weighted mean's."""
    make, data = NO_RULE["two means"]
    plain, given = make().double(), data()[1]
    module = make().double()
    Logs(module)
    pipe = pipeline(module, "1F1B", 4, microbatch_weight=microbatch_weight)
    pipe.verify(steps(module), data()[0])
    pipe.cut()
    loss = float(pipe.run(steps(module), given))
    parts = split(given, 4)
    weights = [microbatch_weight(part) for part in parts]
    total = sum(w * steps(plain)(part) for w, part in zip(weights, parts, strict=True)) / sum(weights)
    assert isinstance(total, Tensor)
    total.backward()
    values = {n: p.grad for n, p in plain.named_parameters()}
    grads = [(p.grad, values[n]) for n, p in module.named_parameters() if p.grad is not None]
    return worst_of(
        {
            "loss": abs(loss - float(total.detach())),
            "grad": largest(float((mine - theirs).abs().max()) for mine, theirs in grads if theirs is not None),
        }
    )
