"""Adapters and quantized bases: a forward and a backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lightning_eff as eff
from benchmarks.peers.case import Arm, Case
from benchmarks.peers.modules import Encoder, step_of

WIDTH, LENGTH, BATCH, CLASSES = 128, 64, 8, 64
TARGETS = ["qkv", "proj", "mlp.0", "mlp.2"]
IDS, POSITIONS, PROMPTS = 512, 64, 16


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, LENGTH, WIDTH), torch.randint(CLASSES, (BATCH, LENGTH))


def _loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def _adapted(technique: Callable[[], Any], config: Callable[[], Any]) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        import peft

        batch = _batch()
        ours = eff.apply(Encoder(WIDTH, classes=CLASSES), technique())
        return step_of(ours, batch, _loss), step_of(
            peft.get_peft_model(Encoder(WIDTH, classes=CLASSES), config()), batch, _loss
        )

    return build


def _lora(**options: Any) -> Callable[[], Any]:
    def config() -> Any:
        import peft

        return peft.LoraConfig(r=8, lora_alpha=8, target_modules=TARGETS, **options)

    return config


def _vera() -> Any:
    import peft

    return peft.VeraConfig(r=64, target_modules=TARGETS)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=IDS, n_positions=POSITIONS + PROMPTS, n_embd=WIDTH, n_layer=4, n_head=4, use_cache=False
    )
    return GPT2LMHeadModel(config).train()


def _prompted() -> tuple[Arm, Arm]:
    import peft
    from lightning.pytorch import LightningModule

    from benchmarks.peers.fits import fit_arm

    class Texts(LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    batch = torch.randint(IDS, (BATCH, POSITIONS))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=PROMPTS)
    return (
        fit_arm(Texts(_gpt2()), batch, [eff.PromptTuning(PROMPTS)]),
        fit_arm(Texts(peft.get_peft_model(_gpt2(), config)), batch),
    )


def _quantized(bits: int) -> Callable[[], tuple[Arm, Arm]]:
    def build() -> tuple[Arm, Arm]:
        import bitsandbytes as bnb

        torch.manual_seed(0)
        width, batch = 512, torch.randn(64, 512)
        plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).requires_grad_(False)
        peer = nn.Sequential()
        for layer in plain:
            if bits == 4:
                made: Any = bnb.nn.Linear4bit(width, width, quant_type="nf4", compute_dtype=torch.float32)
                made.weight = bnb.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, quant_type="nf4")
            else:
                made = bnb.nn.Linear8bitLt(width, width, has_fp16_weights=False)
                made.weight = bnb.nn.Int8Params(layer.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
            made.bias = nn.Parameter(layer.bias.data.clone(), requires_grad=False)
            peer.append(made.to("cpu"))
        ours = eff.apply(nn.Sequential(nn.Linear(width, width), plain), eff.QuantizedBase(bits, names=["1.*"]))
        head = nn.Linear(width, width)
        head.load_state_dict(ours[0].state_dict())
        models = ours, nn.Sequential(head, peer)
        first, second = (step_of(model, batch, lambda m, x: m(x).square().mean()) for model in models)
        return Arm(first.step, lambda: _codes(models[0])), Arm(second.step, lambda: _codes(models[1]))

    return build


def _codes(module: nn.Module) -> list[torch.Tensor]:
    """Weights and buffers, and the scales that bitsandbytes keeps beside its parameters."""
    found = [*module.parameters(), *module.buffers()]
    for p in module.parameters():
        state = getattr(p, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            found += (
                [value for value in vars(part).values() if isinstance(value, torch.Tensor)] if part is not None else []
            )
    return found


def cases() -> list[Case]:
    return [
        Case("LoRA, rank 8", "LoRA", "peft.LoraConfig", "peft", _adapted(lambda: eff.LoRA(8, names=TARGETS), _lora())),
        Case(
            "DoRA, rank 8",
            "LoRA",
            "peft.LoraConfig(use_dora=True)",
            "peft",
            _adapted(lambda: eff.LoRA(8, dora=True, names=TARGETS), _lora(use_dora=True)),
        ),
        Case(
            "LoRA with dropout",
            "LoRA",
            "peft.LoraConfig(lora_dropout=0.1)",
            "peft",
            _adapted(lambda: eff.LoRA(8, dropout=0.1, names=TARGETS), _lora(lora_dropout=0.1)),
        ),
        Case("VeRA, rank 64", "VeRA", "peft.VeraConfig", "peft", _adapted(lambda: eff.VeRA(64, names=TARGETS), _vera)),
        Case("prompt tuning, 16 prompts", "PromptTuning", "peft.PromptTuningConfig", "peft", _prompted),
        Case("base in NF4", "QuantizedBase", "bitsandbytes.nn.Linear4bit", "bitsandbytes", _quantized(4)),
        Case(
            "base in int8",
            "QuantizedBase",
            "bitsandbytes.nn.Linear8bitLt, inputs in int8 too",
            "bitsandbytes",
            _quantized(8),
        ),
    ]
