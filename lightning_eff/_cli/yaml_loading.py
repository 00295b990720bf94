"""A YAML loader for jsonargparse that accepts the aliases of arguments."""

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from lightning_eff._core._arguments.declared import aliases_of, renamed
from lightning_eff._exports import public

#: name of the parser mode with this loader
MODE = "yaml_with_aliases"

_YAML = get_loader("yaml")


def _with_own_names(value: Any) -> Any:
    """Return the config with aliases replaced by the names of the arguments."""
    if isinstance(value, list):
        return [_with_own_names(one) for one in value]
    if not isinstance(value, dict):
        return value
    value = {key: _with_own_names(one) for key, one in value.items()}
    name, given = value.get("class_path"), value.get("init_args")
    if isinstance(name, str) and isinstance(given, dict):
        name = name.removeprefix("lightning_eff.")
        aliases = aliases_of(public.found(name)) if name in public.HOMES else {}
        value["init_args"] = renamed(name, aliases, given)
    return value


set_loader(MODE, lambda text: _with_own_names(_YAML(text)), exceptions=(yaml.YAMLError,))
