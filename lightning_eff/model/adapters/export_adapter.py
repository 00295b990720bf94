"""``lightning_eff.export_adapter``: write the folder that ``peft.PeftModel.from_pretrained`` reads."""

import re
from pathlib import Path
from typing import Any

from torch import nn

from lightning_eff.model.adapters._optional import imported

WHO = "lightning_eff.export_adapter"


def export_adapter(module: nn.Module, folder: str | Path) -> Path:
    """Write the weights trained by :class:`LoRA` or :class:`VeRA` as a folder that peft reads.

    The folder holds ``adapter_config.json`` and ``adapter_model.safetensors``. ``peft.PeftModel.from_pretrained(plain,
    folder)`` then computes the same as ``module``, where ``plain`` is the module before the change. Give the part that is the
    model, such as ``lightning_module.model``, so that the paths in the folder are those of that model.

    Args:
        module: a module after a fit, or after ``lightning_eff.apply`` and the loading of a checkpoint, or a part of it.
        folder: the folder to write into; it is created if it does not exist.

    Returns:
        The folder.

    Raises:
        ValueError: if nothing in ``module`` is peft's, or if other parameters were trained that are not whole modules, which
            peft's ``modules_to_save`` requires.
        ImportError: if peft is not installed.
    """
    imported("peft", extra="peft", who=WHO)
    from safetensors.torch import save_file

    from lightning_eff.model.adapters._peft.saving import config_of, states_of

    layers = {path: m for path, m in module.named_modules() if path and (hasattr(m, "lora_A") or hasattr(m, "vera_A"))}
    if not layers:
        raise ValueError(
            f"{WHO}: nothing in {type(module).__name__} was made by peft. Give a module that was trained with LoRA or VeRA, or"
            " the part of it with the adapted layers."
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
    """The modules that train as a whole in addition to the factors, and all modules that share a parameter with them.

    peft copies each module of ``modules_to_save`` separately, so a head that is tied to a trained embedding must be one too.
    """
    beside = {id(p) for p in module.parameters() if p.requires_grad and id(p) not in own}
    found: dict[str, None] = {}
    partly: dict[str, str] = {}
    held: set[int] = set()  # parameters of modules that train as a whole
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
                f"{WHO}: {name} was trained, but not its whole module, and peft's modules_to_save are whole modules. Train all"
                f" of {path or 'them'} or none of it, or use the checkpoint of the run."
            )
        found[path] = None
    return list(found)
