"""``lightning_eff.export_adapter``: the folder that ``peft.PeftModel.from_pretrained`` reads."""

import re
from pathlib import Path
from typing import Any

from torch import nn

from lightning_eff.model.adapters._optional import imported

WHO = "lightning_eff.export_adapter"


def export_adapter(module: nn.Module, folder: str | Path) -> Path:
    """Write what :class:`LoRA` or :class:`VeRA` learnt for peft: ``adapter_config.json`` and ``adapter_model.safetensors``.

    ``peft.PeftModel.from_pretrained(plain, folder)`` then computes what ``module`` does, where ``plain`` is what ``module``
    was before. Give the part that is a model of its own, such as ``lightning_module.model``, so that the paths in the
    folder are those of that model.

    Args:
        module: after a fit, or after ``lightning_eff.apply`` and the loading of a checkpoint; or a part of it.
        folder: to write into; it is made where it is not there.

    Returns:
        The folder.

    Raises:
        ValueError: if nothing in ``module`` is peft's; or if parameters outside of the factors train, which only whole
            modules of peft's ``modules_to_save`` could hold.
        ImportError: where peft is not installed.
    """
    imported("peft", extra="peft", who=WHO)
    from safetensors.torch import save_file

    from lightning_eff.model.adapters._peft.saving import config_of, states_of

    layers = {path: m for path, m in module.named_modules() if path and (hasattr(m, "lora_A") or hasattr(m, "vera_A"))}
    if not layers:
        raise ValueError(
            f"{WHO}: nothing in {type(module).__name__} was made by peft; expected a module that was trained with LoRA or VeRA,"
            " or the part of it that holds what they acted on."
        )
    own = {id(p) for m in layers.values() for p in m.parameters()}
    modules = _whole(module, own)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = config_of(module, layers, modules)
    config.target_modules = "|".join(re.escape(path) for path in layers)
    save_file(states_of(module, layers, modules), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    return folder


def _whole(module: nn.Module, own: set[int]) -> list[str]:
    """Modules whose every parameter trains in full, beside the factors, and all that share a parameter with these.

    peft copies each module of ``modules_to_save`` by itself. So a head that is tied to a trained embedding must be one too.
    """
    beside = {id(p) for p in module.parameters() if p.requires_grad and id(p) not in own}
    found: dict[str, None] = {}
    partly: dict[str, str] = {}
    held: set[int] = set()  # what modules that are whole hold
    for path, m in sorted(module.named_modules()):
        name = next((name for name, p in m.named_parameters(recurse=False) if id(p) in beside), None)
        if name is None:
            continue
        inside = {id(p) for p in m.parameters()}
        if path and inside <= beside:
            found[path] = None
            held |= inside
        else:
            partly[path] = f"{path}.{name}".lstrip(".")
    for path, name in partly.items():
        m = module.get_submodule(path)
        trains = {id(p) for p in m.parameters() if id(p) in beside}
        if not path or not trains <= held or any(id(p) in own for p in m.parameters()):
            raise ValueError(
                f"{WHO}: {name} trains, and its module does not as a whole; peft's modules_to_save are whole modules. Train all"
                f" of {path or 'them'}, or none of it, or keep the checkpoint of the run."
            )
        found[path] = None
    return list(found)
