"""What a technique may need, how a strategy may divide a run, and which needs each division leaves unmet."""

from collections.abc import Iterable, Mapping
from enum import Enum, Flag, auto


class Part(Enum):
    """One way in which a strategy divides a run over processes. DDP has none: each process trains a whole module."""

    COPIES = "averages the gradients of whole modules by itself"
    COMPRESSED = "averages compressed gradients of whole modules"
    SHARD = "keeps each parameter in pieces on several processes"
    TENSOR = "splits linear layers over several processes"
    ITSELF = "expects a module that divides itself in configure_model"
    PIPELINE = "runs each block in one process only, and on parts of the batch"
    CONTEXT = "divides the tokens of each sequence over processes inside the blocks"
    FLAT = "joins parameters into flat tensors before it cuts them into pieces"
    ENGINE = "leaves parameters, backward passes and optimizer steps to DeepSpeed's engine"
    UNKNOWN = "may divide the module in a way that lightning_eff does not know"


class Need(Flag):
    """What a technique needs of each process; see :data:`WORDS`."""

    BATCH = auto()
    MODULE = auto()
    SAVED = auto()
    STEP = auto()
    CALLS = auto()
    BLOCKS = auto()
    LAYERS = auto()
    PIECES = auto()
    WHOLE = auto()
    DDP = auto()


WORDS: Mapping[Need, str] = {
    Need.BATCH: "changes batches, their order or the settings of optimizers only",
    Need.MODULE: "changes the module before it is divided",
    Need.SAVED: "decides what is kept between forward and backward passes",
    Need.STEP: "runs training_step itself, or changes its loss",
    Need.CALLS: "changes what training_step calls, or looks at it",
    Need.BLOCKS: "decides which blocks run",
    Need.LAYERS: "changes what single layers compute",
    Need.PIECES: "computes with each element of the weights separately",
    Need.WHOLE: "computes with whole weights or gradients",
    Need.DDP: "takes the place of DDP's exchange of gradients",
}

#: The parts with which each process has the whole module, as plain tensors.
PLAIN = frozenset({Part.COPIES, Part.COMPRESSED})
_FOREIGN = frozenset({Part.FLAT, Part.ENGINE, Part.UNKNOWN})
_UNTRIED = _FOREIGN | {Part.CONTEXT}
#: The divisions under which each need is not met.
UNMET: Mapping[Need, frozenset[Part]] = {
    Need.BATCH: _FOREIGN,
    Need.MODULE: frozenset({Part.ENGINE, Part.UNKNOWN}),
    Need.SAVED: frozenset({Part.UNKNOWN, Part.CONTEXT}),
    Need.STEP: _FOREIGN,
    Need.CALLS: _UNTRIED,
    Need.BLOCKS: _UNTRIED,
    Need.LAYERS: _UNTRIED | {Part.TENSOR},
    Need.PIECES: _FOREIGN,
    Need.WHOLE: frozenset(Part) - PLAIN,
    Need.DDP: frozenset(Part),
}

Reasons = Mapping[Part, str]
UNTRIED = "the technique is not tested there"
#: For a technique that runs the module in evaluation mode before or between steps, while FSDP2 has sharded parameters.
APART: Reasons = {Part.SHARD: "the technique runs the module apart from training steps"}
#: For a technique that mixes the network's hidden states of samples.
WITHIN: Reasons = {Part.PIPELINE: "the technique mixes hidden states of samples that are in different micro-batches"}
#: For a technique that computes gradients with respect to the batch in a separate pass.
BACKWARD: Reasons = {**APART, Part.PIPELINE: "the technique takes gradients apart from training steps"}
DIFFERS = "the technique's steps there were found to differ from those of a whole module"
#: Needs that an untested division might meet.
_UNKNOWN_OF = Need.BATCH | Need.STEP | Need.CALLS | Need.BLOCKS | Need.PIECES | Need.SAVED


def refused(needs: Need, reasons: Reasons, parts: Iterable[Part]) -> dict[Part, str]:
    """Return the parts of a layout under which a technique cannot train, each with the reason.

    Args:
        needs: the technique's needs.
        reasons: its own reasons by part, whatever it needs; "" lifts a refusal that follows from its needs.
        parts: the parts of the layout.
    """
    found: dict[Part, str] = {}
    for part in parts:
        unmet = next((need for need in needs if part in UNMET[need]), None)
        why = ""
        if unmet is not None:
            why = (
                UNTRIED
                if part is Part.CONTEXT or (part in _FOREIGN and unmet in _UNKNOWN_OF)
                else f"the technique {WORDS[unmet]}"
            )
        why = reasons.get(part, why)
        if why:
            found[part] = why
    return found
