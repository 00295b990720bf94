"""The contents of peft's folder: its config, and tensors by peft's names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from peft import LoraConfig, PeftConfig
from torch import Tensor, nn

from lightning_eff.model.adapters._peft.layers import NAME
from lightning_eff.model.adapters._peft.vera import VeRALinear, projections_of, vera_config_of

#: The prefix of PeftModel for paths of the model that it wraps.
PREFIX = "base_model.model."


def config_of(module: nn.Module, layers: Mapping[str, Any], modules: Sequence[str]) -> PeftConfig:
    """The config with which peft makes the same layers."""
    of = vera_config_of if isinstance(next(iter(layers.values())), VeRALinear) else _lora_config_of
    config = of(layers, modules)
    config.base_model_name_or_path = getattr(getattr(module, "config", None), "_name_or_path", None) or None
    return config


def _lora_config_of(layers: Mapping[str, Any], modules: Sequence[str]) -> LoraConfig:
    first = next(iter(layers.values()))
    return LoraConfig(
        r=first.r[NAME],
        lora_alpha=first.lora_alpha[NAME],
        lora_dropout=getattr(first.lora_dropout[NAME], "p", 0.0),
        use_rslora=first.use_rslora[NAME],
        use_dora=first.use_dora[NAME],
        init_lora_weights=first.lightning_eff_init,
        fan_in_fan_out=bool(getattr(first, "fan_in_fan_out", False)),
        modules_to_save=list(modules) or None,
        inference_mode=True,
    )


def states_of(module: nn.Module, layers: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Tensor]:
    """Factors and whole modules, by the names that peft gives them in a file."""
    found: dict[str, Tensor] = {}
    for path, m in layers.items():
        for name, p in m.state_dict().items():
            if not name.startswith("base_layer."):
                found[f"{path}.{name}".replace(f".{NAME}.", ".").removesuffix(f".{NAME}")] = p
    for path in modules:
        found |= {f"{path}.{name}": p for name, p in module.get_submodule(path).state_dict().items()}
    found = {PREFIX + name: p for name, p in found.items()}
    if isinstance(next(iter(layers.values())), VeRALinear):
        found |= projections_of(layers)
    tensors = {name: p.detach().cpu().contiguous() for name, p in found.items()}
    several = Counter(t.data_ptr() for t in tensors.values())
    return {
        name: t.clone() if several[t.data_ptr()] > 1 else t for name, t in tensors.items()
    }  # a file has no shared tensors
