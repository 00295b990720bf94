"""Modules whose blocks are in no list: attributes with numbers, a dict, a module within."""

import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.models import TinyGPT, module

LAYOUTS = ("attributes", "dict", "within", "two halves")


class Numbered(nn.Module):
    """Blocks as ``layer1``, ``layer2``, ..., which it runs one after the other."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        for i, block in enumerate(blocks):
            self.add_module(f"layer{i + 1}", block)

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class Elsewhere(TinyGPT):
    """A TinyGPT with the weights of the plain one, its blocks in another place."""

    def __init__(self, layout: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.layout, blocks = layout, [*(self.blocks or ())]
        del self.blocks
        if layout == "attributes":
            for i, block in enumerate(blocks):
                setattr(self, f"block_{i}", block)
        elif layout == "dict":
            self.stages = nn.ModuleDict({"abcdefgh"[i]: block for i, block in enumerate(blocks)})
        elif layout == "within":
            self.body = Numbered(blocks)
        else:
            self.lower, self.upper = nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        if self.layout == "attributes":
            for i in range(self.num_layers):
                x = getattr(self, f"block_{i}")(x)
        elif self.layout == "dict":
            for block in self.stages.values():
                x = block(x)
        elif self.layout == "within":
            x = self.body(x)
        else:
            for block in (*self.lower, *self.upper):
                x = block(x)
        if self.batch_norm is not None:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        return self.head(self.norm(x))


def in_the_list(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of such a module by the names of the plain one."""
    named: dict[str, Tensor] = {}
    pattern = r"block_(\d+)|stages\.([a-h])|body\.layer(\d+)|(upper|lower)\.(\d+)|vit\.layers\.layer(\d+)"
    for name, value in state.items():
        for found in re.finditer(pattern, name):
            at, letter, number, half, there, vit = found.groups()
            if vit:
                place = f"vit.layers.{int(vit) - 1}"
            elif half:
                place = f"blocks.{int(there) + 2 * (half == 'upper')}"
            else:
                index = at or (letter and "abcdefgh".index(letter)) or (number and int(number) - 1) or 0
                place = f"blocks.{index}"
            name = name.replace(found[0], place)
        named[name] = value
    return named


def plain_and_elsewhere(name: str, layout: str) -> tuple[pl.LightningModule, pl.LightningModule]:
    """The model ``name`` of ``tests.models``, and one with the same weights whose blocks are elsewhere."""
    torch.manual_seed(0)
    plain: Any = module(name)
    torch.manual_seed(0)
    if isinstance(plain, TinyGPT):
        return plain, Elsewhere(layout, batch_norm=plain.batch_norm is not None)
    other: Any = module(name)
    other.model.vit.layers = Numbered(other.model.vit.layers)
    return plain, other
