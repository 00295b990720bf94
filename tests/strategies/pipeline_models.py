"""More Hugging Face models with random weights, of width 32 and five layers."""

import torch
import transformers as hf
from transformers import PreTrainedModel

from tests.models import LENGTH, VOCAB, HuggingFace, hugging_face

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 1, "head_dim": 16}
SLOW = ("qwen3", "gemma2", "mistral", "gpt_neox", "opt", "bloom")


def model(name: str) -> HuggingFace:
    """One of :data:`SLOW`, or ``t5``."""
    torch.manual_seed(0)
    if name == "t5":
        return hugging_face("t5")
    made: PreTrainedModel
    if name == "qwen3":
        made = hf.Qwen3ForCausalLM(hf.Qwen3Config(**_GROUPED))
    elif name == "gemma2":
        made = hf.Gemma2ForCausalLM(hf.Gemma2Config(**_GROUPED, sliding_window=8))
    elif name == "mistral":
        made = hf.MistralForCausalLM(hf.MistralConfig(**_GROUPED, sliding_window=8))
    elif name == "gpt_neox":
        made = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_SIZES, attention_dropout=0.0, hidden_dropout=0.0))
    elif name == "opt":
        sizes = {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
        made = hf.OPTForCausalLM(hf.OPTConfig(**sizes))
    elif name == "bloom":
        made = hf.BloomForCausalLM(hf.BloomConfig(**{**_SIZES, "n_layer": 5, "n_head": 2}))
    else:
        raise ValueError(name)
    made.train()
    return HuggingFace(made)
