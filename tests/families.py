"""Model families with random weights of width 32, most of Hugging Face: a table of what each is and where it is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from lightning_eff.strategies.hybrid_parallel import HybridParallelStrategy
from tests.models import LENGTH, VOCAB, HuggingFace, make_batch, trainer

_AUTO = {
    "causal": hf.AutoModelForCausalLM,
    "masked": hf.AutoModelForMaskedLM,
    "seq2seq": hf.AutoModelForSeq2SeqLM,
    "image": hf.AutoModelForImageClassification,
    "speech": hf.AutoModelForAudioClassification,
}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH + 4,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SEQ2SEQ = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": LENGTH + 4,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_heads": 2,
}
_T5 |= {"decoder_start_token_id": 0, "use_cache": False, "pad_token_id": 0, "eos_token_id": 0}
_IMAGE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "num_labels": 5,
}
_SPEECH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": 5,
    "apply_spec_augment": False,
    "feat_extract_norm": "layer",
}


@dataclass(frozen=True)
class Family:
    """A family of models, and what of the package does not train it.

    Attributes:
        kind: which of its heads: "causal", "masked", "seq2seq", "image" or "speech"; "own" is written by hand here.
        settings: of its config.
        refused: by the layout, technique or plugin, what the error must say; all others train it rightly.
        by_batch: whether it normalizes by a batch's own statistics, which in a pipeline are a micro-batch's, as that tells.
        wrong: those that end with weights that are not finite: known defects, which the test holds to until they are mended.
    """

    kind: str
    settings: Mapping[str, Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    wrong: frozenset[str] = frozenset()
    by_batch: bool = False


def _family(name: str, kind: str = "causal", refused: Mapping[str, str] | None = None, /, **settings: Any) -> Family:
    base = {"causal": _GROUPED, "masked": _TEXT, "seq2seq": _SEQ2SEQ, "image": _IMAGE, "speech": _SPEECH}[kind]
    if name in ("t5", "mt5", "umt5"):
        base = _T5
    elif "moe" in name or name == "mixtral":
        base = _EXPERTS
    images = {}
    if kind != "image":
        images = {
            "MaskGuidedTokens": _NO_IMAGES,
            "PatchDropout": _NO_IMAGES,
            "TokenMerging": _NOT_MERGED,
            "PartialTokenTraining": _NO_TUBES,
            "GatedPositionalAttention": _NO_PATCHES,
            "ChannelsLast": "has no nn.Conv2d or nn.Conv3d",
            "DiffAugment": "not on exactly one floating-point tensor of images",
            **_NOT_SMALLER,
            **dict.fromkeys(
                (
                    "CoMixup",
                    "CutMix",
                    "Cutout",
                    "RandomCrop",
                    "RandomErasing",
                    "RandomFlip",
                    "SaliencyMix",
                    "StyleMix",
                    "SuperMix",
                    "TokenMix",
                    "TransMix",
                    "RandAugment",
                    "AutoAugment",
                    "AugMix",
                ),
                "found no images in the batch|come into the loss by torch's",
            ),
        }
    if kind not in ("image", "speech"):  # a wave is of floating point
        mixed = "found no images in the batch, and no other tensor|come into the loss by torch's"
        images |= dict.fromkeys(("ManifoldMixup", "Mixup"), mixed)
    fewer = dict.fromkeys(("RandomLTD", "TokenDropping"), _NOT_FEWER) if name in _BY_PLACES else {}
    if name == "gemma2":
        refused = {**(refused or {}), "LogitSoftcap": "caps its logits at 30.0 already"}
    at_ends = ("ZeroProjections", "ReZero", "SkipInit", "LayerScale", "Fixup") if name == "gemma2" else ()
    norms = dict.fromkeys(at_ends, "ends in a norm after .*, or one to which 1 is added")
    if kind in ("image", "speech"):
        fewer = {"TokenDropping": "no nn.Embedding was called on the ids"}
    begun: dict[str, str] = {}
    if kind == "speech" or name == "rembert":  # whose head reads another width than its embedding has
        begun["DataDrivenInit"] = "is neither a language model"
    if name in ("mamba", "rwkv"):
        begun["TFixup"] = "needs some of both"
    begun |= dict.fromkeys(("GhostNorm", "SeqNorm"), "has no BatchNorm to act on")
    if name in ("esm", "squeezebert"):  # whose loss leaves a pooler, or another head, unused
        begun |= dict.fromkeys(("SNIP", "GraSP"), "1 weights have no gradient on these batches")
    if kind != "image":
        begun["LowRankConv"] = "found no convolution in"
    if name in _OWN_ATTENTION.split():
        begun["QKNorm"] = _NOT_NORMED
    if (kind == "causal" and name not in _BIASED) or name in ("roformer", "modernbert", "squeezebert", "t5"):
        begun["RemoveQKVBias"] = _NO_BIAS
    if name in _WITHOUT_BIASES.split():
        begun["BitFit"] = "has no bias to train"
    if name in _NO_MLP.split():
        begun["QuantizedBase"] = _NO_NAMED
    if name in _RMS.split():
        begun["RMSNormalization"] = "no LayerNorm"
    if name in _RELU2:
        begun["SwapActivation"] = "has no activation module to act on"
    masks = {"SequencePacking": _NO_MASK, "MaskRateSchedule": _NO_IDS if kind in ("image", "speech") else _NOT_MASKED}
    if name in ("mamba", "squeezebert"):
        begun["EarlyBird"] = "found no units to prune"
    if name == "mamba":
        begun["VeRA"] = "uses .*dt_proj.base_layer.weight directly .* and does not call"
    if kind != "image":
        begun["VisualPromptTuning"] = _NOT_OF_IMAGES
    if kind == "seq2seq":
        begun["PromptTuning"] = "looks up tokens 2 times in a pass"
    if name == "mpnet":
        begun["PromptTuning"] = "takes texts of 32 tokens, and not of 3 more"
    if kind != "seq2seq":
        masks["SpanMasking"] = _NO_DECODER
    if kind not in ("causal", "seq2seq"):
        masks["MultiTokenPrediction"] = "depend on later tokens" if kind == "masked" else _NO_TOKENS_AHEAD
    windows = {}
    if kind == "seq2seq" or name in ("mamba", "rwkv"):
        windows = {"AttentionWindowWarmup": "is an encoder-decoder" if kind == "seq2seq" else _NO_ATTENTION}
    return Family(
        kind,
        {**base, **settings},
        images
        | fewer
        | norms
        | masks
        | windows
        | begun
        | attention_of(name, kind)
        | blocks_of(name)
        | {**(refused or {})},
        _NOT_FINITE.get(name, frozenset()),
    )


# Attention that is written as a softmax of scores, or none.
_BY_HAND = "bloom deberta-v2 gemma2 mpnet mpt openai-gpt rembert roformer squeezebert mamba resnet rwkv"
_REPLACED = ("MemoryEfficientAttention", "SangerAttention", "A3Attention", "ELSAAttention", "Performer", "Reformer")
_INSIDE = ("DOTAAttention", "Linformer", "Fastformer")  # which have parameters in the modules that attend
_OF_BLOCKS = ("ValueEmbeddings", "ValueResiduals", "WindowPattern")  # which also need a chain of blocks


def attention_of(name: str, kind: str) -> dict[str, str]:
    """Which techniques of attention a family refuses, by whether it is causal, and by its masks."""
    if name in _BY_HAND.split():
        found = dict.fromkeys((*_REPLACED, *_INSIDE, *_OF_BLOCKS), "found no attention")
        return found | ({"ValueEmbeddings": _NO_LOOK_UP} if kind == "own" else {})
    found: dict[str, str] = {}
    if name == "albert":  # one layer that is run several times
        return dict.fromkeys(_INSIDE, "attends several times in a pass")
    if kind == "speech":
        return dict.fromkeys((*_INSIDE, *_OF_BLOCKS), "has hooks")
    if name in ("t5", "swin"):
        found = dict.fromkeys(("Performer", "Reformer", *_INSIDE[1:]), "contains more than padding and causality")
    elif kind in ("causal", "seq2seq"):
        found = dict.fromkeys(_INSIDE[1:], "it is causal")
    elif kind == "masked":
        found["Linformer"] = "give length=32"
    if kind == "seq2seq":
        found |= dict.fromkeys(("ValueEmbeddings", "WindowPattern"), "attend at several places")
    return found


# Residual sums with a norm behind each, a head of several layers, and biases in blocks.
_POST_NORM = "openai-gpt bert roberta electra camembert deberta-v2 mpnet xlm-roberta roformer rembert ernie bart marian"
_POST_NORM += " wav2vec2 hubert unispeech"
_LONG_HEAD = "bert roberta camembert deberta-v2 mpnet xlm-roberta roformer ernie modernbert squeezebert"
_NO_BIASES = "llama mistral qwen3 gemma gemma2 phi3 mpt olmo2 cohere granite helium nemotron smollm3 ernie4_5 exaone4"
_NO_BIASES += " arcee olmo mixtral olmoe qwen3_moe mamba modernbert albert squeezebert t5 resnet"
_NO_PREFIX = (
    "gemma2 bloom mpt openai-gpt mamba rwkv deberta-v2 mpnet roformer rembert albert squeezebert wav2vec2 hubert"
)
_NO_PREFIX += " unispeech resnet"
# One residual sum per block, or more after the second one.
_NOT_REVERSIBLE = (
    f"{_POST_NORM} phi gpt_neox cohere opt mamba rwkv albert squeezebert mbart pegasus m2m_100 t5 swin resnet"
)
_NOT_SHARED = "rwkv modernbert albert t5 swin"
_NO_EXPERTS = "bloom mixtral olmoe qwen3_moe mamba albert squeezebert resnet"


def blocks_of(name: str) -> dict[str, str]:
    """Which techniques of blocks and heads a family refuses."""
    found = {"DisableDropout": "has no dropout to disable"}
    found["MuP"] = "differ in the parameters"
    found["RepOptimizer"] = "found no 3 x 3 convolution|only under SGD do multiplied gradients"
    stack = "found no stack of repeated blocks|returned dict|are equally long|could not check that the blocks"
    if name not in _LONG_HEAD.split():
        found["LinearHead"] = "found no nonlinear layers before an output layer|found no output layer"
    if name not in _POST_NORM.split():
        found["PreNorm"] = f"it is pre-norm already|residual sums and 0 norms|{stack}"
    if name in _NO_BIASES.split():
        found["RemoveBias"] = "found no such layer with a bias|no layer with a bias of|tests the layer's class"
    if name in _NO_PREFIX.split():
        found["PrefixTuning"] = "found no attention|has hooks|attends several times"
    if name in _NOT_REVERSIBLE.split():
        found["ReversibleLayers"] = f"computes (one|no) residual sum|more after two sums|do not follow from|{stack}"
    if name in _NOT_SHARED.split():
        found["ParameterSharing"] = f"differ in the shapes of their parameters|{stack}"
    if name in _NO_EXPERTS.split():
        found["SparseUpcycling"] = "found no feed-forward network"
    if name == "albert":
        found["LISA"] = stack
    return found


# Two bits of activations leave these without a finite gradient.
_NOT_FINITE = dict.fromkeys(("gemma2", "glm4", "helium"), frozenset({"ActivationCompression", "ACTPrecision"}))
# A padding token's embedding is zero here, its place included, and so is what post-norm blocks that add nothing make of it:
# the gradient of a norm of zeros is 1e6 times as large, eight times on end. Only where padding counts in the loss, as here.
_NOT_FINITE["mpnet"] = frozenset({"ZeroProjections", "ZerO"})


# Blocks of these go by where tokens stand, or hand on attention weights of them.
_BY_PLACES = ("bloom", "mpt", "mamba", "rwkv", "roformer", "rembert", "squeezebert")
# Normed queries and keys, attention that is written by hand, or none.
_OWN_ATTENTION = (
    "qwen3 gemma2 bloom mpt olmo2 persimmon exaone4 openai-gpt olmoe qwen3_moe mamba rwkv deberta-v2 mpnet roformer"
)
_OWN_ATTENTION += " rembert squeezebert"
_NOT_NORMED = "a norm follows|receive normalised queries and keys|found no attention"
# Biases of keys and values, and no rotary embeddings.
_BIASED = ("gpt2", "bloom", "biogpt", "openai-gpt")
_NO_BIAS = "have no bias to remove|cannot move to|would compute|are 16, but|found no attention|no nn.Linear"
# No bias anywhere.
_WITHOUT_BIASES = (
    "llama mistral qwen3 gemma gemma2 phi3 mpt olmo2 cohere granite helium smollm3 ernie4_5 exaone4 arcee olmo"
)
_WITHOUT_BIASES += " mixtral olmoe qwen3_moe t5"
# No map that the pattern of QuantizedBase's case means.
_NO_MLP = "mpt mixtral olmoe qwen3_moe biogpt opt rwkv albert squeezebert bart mbart marian pegasus m2m_100 t5 wav2vec2"
_NO_MLP += " hubert unispeech"
_NO_NAMED = "(means|matches) none of the .* linear layers"
# Norms of their own.
_RMS = "llama mistral qwen2 qwen3 gemma gemma2 phi3 olmo olmo2 cohere granite glm4 helium nemotron smollm3 mamba t5"
_RMS += " ernie4_5 exaone4 arcee seed_oss mixtral olmoe qwen3_moe"
# Squared ReLU by themselves, or activations that are functions.
_RELU2 = ("nemotron", "persimmon", "arcee", "bloom", "rwkv", "esm")
_NOT_BEHIND = "ends in nn.Linear or Conv1D"
_NO_DECODER = "holds no encoder-decoder"
_NO_ATTENTION = "found no self-attention in training_step"
_NOT_FEWER = "cannot be given fewer of its tokens"
_ON_IMAGES = ("ProgressiveResizing", "EfficientTrain", "FixRes")
_NOT_SMALLER = dict.fromkeys(_ON_IMAGES, "found no images in the batch")
_NOT_OF_IMAGES = "did not each get tokens|found no stack of repeated blocks"
_NO_IMAGES = f"found no images in the batch|called none of the blocks|{_NOT_FEWER}"
_NO_PATCHES = "does not attend to the patches of an image"
_NO_TOKENS_AHEAD = r"are no tokens \(B, T\)"
_NO_LOOK_UP = "has no token embedding"
_NO_TUBES = r"holds no nn\.Conv3d or nn\.Conv2d whose stride is its kernel"
_NOT_MERGED = f"{_NO_IMAGES}|cannot merge tokens"
_NO_MASK = "found no mask of padding in the batch"
_NOT_MASKED, _NO_IDS = "all of the labels 'labels' count", "found no tokens 'input_ids' and labels 'labels'"
_PLAIN = "gpt2 llama mistral qwen2 qwen3 gemma gemma2 phi phi3 gpt_neox bloom mpt stablelm starcoder2 olmo2 cohere"
_PLAIN += " granite glm4 helium nemotron persimmon smollm3 biogpt gpt_bigcode ernie4_5 exaone4 arcee seed_oss"
_MASKED = "bert roberta electra camembert deberta-v2 mpnet xlm-roberta roformer rembert ernie esm"
_SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 2, "image_size": 8, "patch_size": 2}
_SWIN |= {"num_channels": 1, "num_labels": 5}
_ON_BLOCKS = ("pp2", "ProgressiveLayerDropping", "ProgressiveStacking", "Rematerialization")
_ON_BLOCKS += ("PartialTokenTraining", "RandomLTD", "PatchDropout", "TokenDropping", "TokenMerging", "SequencePacking")
_ON_BLOCKS += ("MaskGuidedTokens",)
_SAY_LAYERS = dict.fromkeys(_ON_BLOCKS, "layers=")
_NO_SEQUENCE = {
    "SequenceLengthWarmup": "no integer tensor of shape .* keys=",
    "MaskRateSchedule": _NO_IDS,
    "NgramEmbedding": _NO_LOOK_UP,
    "MultiTokenPrediction": _NO_TOKENS_AHEAD,
    "PromptTuning": _NO_LOOK_UP,
    "ValueEmbeddings": _NO_LOOK_UP,
}
_NO_SEQUENCE |= dict.fromkeys(("EDA", "SeqMix", "TokenNoise"), "found no tokens in the batch")
_NO_SEQUENCE |= {"TokenBudgetBatches": "found no sequence of integers in a sample"}
_OTHER_BLOCKS = dict.fromkeys(
    ("ProgressiveStacking", "ShallowToDeep", "CompoundGrowth"),
    r"block \d of .* cannot copy block 0, because their parameters",
)
_NO_STACK = "found no stack of repeated blocks"
_NO_FFN = dict.fromkeys(("CompoundGrowth", "ApproximateRandomDropout"), "found no feed-forward network")
_GROWN = ("ShallowToDeep", "CompoundGrowth", "DropIn", "AutoProg", "ResIST")  # techniques of one stack
_CONNECTED = ("EmbeddingShortcuts", "UShapedSkips", *_OF_BLOCKS)  # techniques of one chain
_ALBERT = dict.fromkeys(
    (
        *_ON_BLOCKS,
        *_GROWN,
        *_CONNECTED,
        "ManifoldMixup",
        "ProxySelection",
        "StochasticDepth",
        "LayerFreezing",
        "GreedyLayerwise",
        "RegionalCompilation",
    ),
    _NO_STACK,
)
_NO_LINEAR = dict.fromkeys(
    ("FP8Precision", "INT8Precision", "S2FP8Precision", "Wang2018FP8Precision"), "found no linear layer to run"
)
_SQUEEZEBERT = {"pp2": "A block returned dict", "Rematerialization": r"in the order \[\]; expected each", **_NO_LINEAR}
_SQUEEZEBERT |= {"RegionalCompilation": "called none of the blocks", **_NO_FFN}
_SQUEEZEBERT |= {"ButterflyLinear": "found no linear layer in"}
_SQUEEZEBERT |= {"LowRankLinear": "found no linear layer in", "LoRA": "to adapt"}
_SQUEEZEBERT |= {"VeRA": "to adapt"}
_SQUEEZEBERT |= {"HoulsbyAdapters": _NOT_BEHIND}
_SQUEEZEBERT |= dict.fromkeys(
    ("AutoProg", "DropIn", "ProgressiveLayerDropping", "ResIST", "StochasticDepth"), "without calling its blocks"
)
_SQUEEZEBERT |= dict.fromkeys(_CONNECTED, "could not check that the blocks")
_NO_TOKENS = dict.fromkeys(
    ("RandomLTD", "MaskGuidedTokens", "PatchDropout", "TokenDropping", "TokenMerging"), _NOT_FEWER
)
_NO_TOKENS |= {"SequencePacking": _NO_MASK, "PartialTokenTraining": _NO_TUBES}
_FLOAT_BUFFERS = {"StochasticRoundingBF16": r"an operation was given different dtypes .* stays? float32\. Write"}
FAMILIES: dict[str, Family] = {
    **{name: _family(name) for name in _PLAIN.split()},
    # the gradient of a key's bias is rounding alone, of which Adam makes whole steps: other ones in each layout
    "opt": _family("opt", enable_bias=False, ffn_dim=64, word_embed_proj_dim=32),
    "openai-gpt": _family("openai-gpt", "causal", _FLOAT_BUFFERS),
    "olmo": _family(
        "olmo",
        "causal",
        {
            "ReplaceOptimizer": r"group_lr='vector'\): no parameter .* is of this kind",
            "FusedNorms": "norms of OlmoLayerNorm",  # whose forward takes no gain, and has no parameters to be told by
        },
    ),
    "mixtral": _family("mixtral", "causal", _NO_FFN),
    "olmoe": _family("olmoe", "causal", _NO_FFN),
    "qwen3_moe": _family("qwen3_moe", "causal", _NO_FFN),
    "mamba": _family("mamba", "causal", {**_NO_FFN, "Fixup": "conv1d.bias directly"}),
    "rwkv": _family(
        "rwkv", "causal", {"pp2": "writes to a parameter that another pipeline rank holds", **_OTHER_BLOCKS}
    ),
    **{name: _family(name, "masked") for name in _MASKED.split()},
    "modernbert": _family("modernbert", "masked"),
    "albert": _family("albert", "masked", _ALBERT, embedding_size=32),
    "squeezebert": _family("squeezebert", "masked", _SQUEEZEBERT, embedding_size=32),
    **{name: _family(name, "seq2seq") for name in ["bart", "mbart", "marian", "pegasus"]},
    "m2m_100": _family("m2m_100", "seq2seq", _FLOAT_BUFFERS),
    "t5": _family(
        "t5", "seq2seq", {"pp2": "relative_attention_bias.* depends on more results of earlier blocks", **_OTHER_BLOCKS}
    ),
    **{name: _family(name, "image", _NO_SEQUENCE) for name in ["vit", "beit", "dinov2", "vit_msn"]},
    "swin": Family(
        "image",
        _SWIN,
        _NO_SEQUENCE
        | _SAY_LAYERS
        | dict.fromkeys((*_GROWN, "ManifoldMixup"), "layers=")
        | {
            "AttentionWindowWarmup": "has only 4 tokens",
            "ProxySelection": "are equally long",
            "SpanMasking": _NO_DECODER,
        }
        | {"TransMix": "which are no grid of square patches"}
        | {"GatedPositionalAttention": _NO_PATCHES}
        | {"GatedPositionalAttention": _NO_PATCHES, "VisualPromptTuning": "layers="}
        | dict.fromkeys(("GhostNorm", "SeqNorm"), "has no BatchNorm to act on")
        | attention_of("swin", "image")
        | blocks_of("swin")
        | dict.fromkeys(_CONNECTED, "layers="),
    ),
    **{name: _family(name, "speech", _NO_SEQUENCE) for name in ["wav2vec2", "hubert", "unispeech"]},
    "resnet": Family(
        "own",
        {},
        _NO_SEQUENCE
        | _NO_LINEAR
        | _NO_FFN
        | _NO_TOKENS
        | {"TFixup": "needs some of both", "AttentionWindowWarmup": _NO_ATTENTION, "SpanMasking": _NO_DECODER}
        | {"TransMix": "saw no attention in training_step"}
        | {"GatedPositionalAttention": _NO_PATCHES}
        | {"GatedPositionalAttention": _NO_PATCHES, "VisualPromptTuning": _NOT_OF_IMAGES}
        | {
            "GatedPositionalAttention": _NO_PATCHES,
            "TokenMix": "holds no nn.Conv2d of 1 channels whose stride is its kernel",
        }
        | {"LoRA": "to adapt", "QuantizedBase": _NO_NAMED}
        | dict.fromkeys(("LoRA", "VeRA"), "to adapt")
        | {"QuantizedBase": _NO_NAMED}
        | {"HoulsbyAdapters": _NOT_BEHIND}
        | {"LowRankLinear": "found no linear layer in", "RMSNormalization": "has no LayerNorm"}
        | {"ButterflyLinear": "found no linear layer in", "FusedNorms": "has no LayerNorm or RMSNorm"}
        | {"QKNorm": _NOT_NORMED, "RemoveQKVBias": _NO_BIAS}
        | attention_of("resnet", "own")
        | blocks_of("resnet"),
        by_batch=True,
    ),
}


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside an identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(x + inner)


class ResNet(nn.Module):
    """A residual network of two stages on (B, 1, 8, 8), which computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = nn.Sequential(*(Residual(16) for _ in range(4)))
        self.down = nn.Conv2d(16, 32, 1, stride=2, bias=False)
        self.layer2 = nn.Sequential(Residual(32), Residual(32))
        self.fc = nn.Linear(32, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        found = self.layer2(self.down(self.layer1(self.stem(pixel_values))))
        return SimpleNamespace(loss=F.cross_entropy(self.fc(found.mean((2, 3))), labels))


class FourGroups(HuggingFace):
    """Four groups with rates, decays and betas of their own, under a ``LambdaLR`` with a function for each."""

    def configure_optimizers(self) -> Any:
        tables = ("embed", "wte", "wpe", "stem")
        named = list(self.named_parameters())
        vectors = [p for name, p in named if p.ndim < 2]
        first = [p for name, p in named if p.ndim >= 2 and any(part in name for part in tables)]
        rest = [p for name, p in named if p.ndim >= 2 and not any(part in name for part in tables)]
        optimizer = torch.optim.AdamW(
            [
                {"params": vectors, "lr": 2e-3, "weight_decay": 0.0},
                {"params": first, "lr": 5e-4},
                {"params": rest[::2], "betas": (0.8, 0.95)},
                {"params": rest[1::2], "lr": 3e-3},
            ],
            lr=1e-3,
        )
        scheduler = LambdaLR(
            optimizer, [lambda t: 1.0, lambda t: 0.8**t, lambda t: min(1.0, 0.2 + t / 4), lambda t: 1.0 / (1.0 + t)]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def module(name: str, cls: type[HuggingFace] = HuggingFace) -> HuggingFace:
    """The family's model with first weights that are always the same, without dropout or drop path, as a ``cls``."""
    family = FAMILIES[name]
    pl.seed_everything(1, verbose=False)
    if family.kind == "own":
        own: Any = ResNet()
        return cls(own)
    config = hf.AutoConfig.for_model(name, **family.settings)
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    model = _AUTO[family.kind].from_config(config)
    model.train()
    return cls(model)


def batch(name: str, size: int) -> dict[str, Tensor]:
    """Keyword arguments of the family's model; every token counts."""
    kind = FAMILIES[name].kind
    if kind in ("image", "own"):
        return make_batch("vit", size)
    if kind == "speech":
        waves = torch.randn(size, 160, generator=torch.Generator().manual_seed(0))
        return {"input_values": waves, "labels": (waves.mean(1) * 40 + 2).long().clamp(0, 4)}
    return make_batch("gpt2", size)


class FamilySamples(Dataset[dict[str, Tensor]]):
    """The samples of one batch, one at a time."""

    def __init__(self, name: str, size: int) -> None:
        self.batch, self.size = batch(name, size), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.batch.items()}


class Losses(pl.Callback):
    """The training loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


STEPS = 6


def train(
    name: str, *callbacks: pl.Callback, cls: type[HuggingFace] = HuggingFace, resume: Path | None = None, **kwargs: Any
) -> tuple[HuggingFace, list[float], int]:
    """Six steps over the same 24 samples in the same order: the module, the loss of each step, and how many there were."""
    net, losses = module(name, cls), Losses()
    run = trainer(*callbacks, losses, max_steps=STEPS, max_epochs=-1, **kwargs)
    run.fit(net, DataLoader(FamilySamples(name, 24), 8), ckpt_path=resume, weights_only=True if resume else None)
    return net, losses.losses, run.global_step


def refusal(name: str, *callbacks: pl.Callback, **kwargs: Any) -> str:
    """The error with which a run is refused before its first step ends, or "" where it trains to finite weights.

    Weights that are not finite are "not finite".
    """
    losses = Losses()
    try:
        net, _, steps = train(name, *callbacks, losses, **kwargs)
    except (ValueError, RuntimeError) as error:
        assert not losses.losses, f"refused in mid-run: {error}"
        return str(error)
    assert steps == STEPS
    return "" if all(p.isfinite().all() for p in net.parameters()) else "not finite"


def layouts(name: str) -> dict[str, Any]:
    """In two processes, with the blocks divided over both: the losses of each layout, or why it is refused."""
    found: dict[str, Any] = {}
    sizes = {"tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
    for layout, size in sizes.items():
        strategy = HybridParallelStrategy(data_parallel_size=1, min_num_params=0, **size)
        try:
            _, found[layout], _ = train(name, strategy=strategy, devices=2)
        except (ValueError, RuntimeError) as error:
            found[layout] = str(error)
    return found
