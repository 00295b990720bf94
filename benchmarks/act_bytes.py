"""Bytes that a forward pass leaves for its backward pass: exact, and compressed to 8, 4 and 2 bits, by category.

    python benchmarks/act_bytes.py --out benchmarks/results/act_bytes.json

Random-initialised Hugging Face models of 4 blocks of width 256 on 4 samples (256 tokens, or images of 128 x 128 in patches
of 8 x 8), vocabulary 512, float32, with and without their own dropout of 0.1. Counts, not times: they are the same on every
machine.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lightning_eff.memory._compression.engine import Engine

VOCAB, DIM, LENGTH, SAMPLES = 512, 256, 256, 4


def models(dropout: float) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Name, model in training mode, and its arguments."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (SAMPLES, LENGTH))
    text = {"input_ids": ids, "labels": ids}
    heads: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": DIM}
    drop: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    pdrop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=DIM, n_layer=4, n_head=4, **pdrop, **ends
    )
    yield "GPT-2", transformers.GPT2LMHeadModel(gpt2).train(), text
    bert = transformers.BertConfig(vocab_size=VOCAB, intermediate_size=4 * DIM, **heads, **drop)
    yield "BERT", transformers.BertForMaskedLM(bert).train(), text
    vit = transformers.ViTConfig(intermediate_size=4 * DIM, image_size=128, patch_size=8, **heads, **drop)
    images = {"pixel_values": torch.randn(SAMPLES, 3, 128, 128), "labels": torch.zeros(SAMPLES, dtype=torch.long)}
    yield "ViT", transformers.ViTForImageClassification(vit).train(), images
    if not dropout:
        llama = transformers.LlamaConfig(vocab_size=VOCAB, intermediate_size=688, **heads, **ends)
        yield "Llama", transformers.LlamaForCausalLM(llama).train(), text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dropout in (0.1, 0.0):
        for name, model, batch in models(dropout):
            for bits in (8, 4, 2):
                engine = Engine(model, bits=bits)
                with engine.forward(1, batch):
                    loss = model(**batch).loss
                loss.backward()
                ledger = engine.ledger
                row = {"model": name, "dropout": dropout, "bits": bits, "exact_bytes": ledger.exact_bytes}
                row |= {"saved_bytes": ledger.saved_bytes, "ratio": round(ledger.exact_bytes / ledger.saved_bytes, 2)}
                row |= {"left": {key: count for key, count in ledger.by_category.items() if count}}
                rows.append(row)
                print(json.dumps(row), flush=True)
    if args.out is not None:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        args.out.write_text(json.dumps({"benchmark": "act_bytes", **versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
