"""Checkpoints that hold what trains alone: what is left out, what it is filled up with, and whether that is the same base."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_eff._core.session import Session

#: Numbers of a tensor that are looked at.
LOOKS = 256
#: Under which name a module lists buffers that are frozen weights in another form.
STILL = "_lightning_eff_still"


def still(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that do not train, and buffers that stand for such, by name."""
    found: dict[str, Tensor] = {n: p for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for path, m in module.named_modules(remove_duplicate=False):
        for name in m.__dict__.get(STILL, ()):
            found[f"{path}.{name}" if path else name] = m.get_buffer(name)
    return found


def sketch(t: Tensor) -> Tensor:
    """Two numbers that tell one tensor from another, (2,): a sum over few of its elements, and that of their sizes."""
    if t.is_meta or not t.numel():
        return torch.zeros(2)
    flat = t.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() // LOOKS)][:LOOKS].to(torch.float32)
    weights = 1 + torch.arange(few.numel(), device=few.device) % 7
    return torch.stack([(few * weights).sum(), few.abs().sum()]).cpu()


class Partial:
    """In one run: what its checkpoints hold, and how they are loaded.

    They hold each parameter that trains, all buffers, and those frozen ones that some technique moved meanwhile. The rest is
    that of the module, as its own code makes or loads it.

    Args:
        session: the run.
        key: of the technique's state in a checkpoint.
        who: the technique, for messages.
    """

    def __init__(self, session: Session, key: str, who: str) -> None:
        self._session, self._key, self._who = session, key, who
        self._frozen: dict[str, Tensor] = {}
        self._begun: dict[str, tuple[int, Tensor]] = {}
        self._held: set[str] = set()
        self.base = torch.zeros(0, 2)
        module, strategy = session.module, session.trainer.strategy
        configure = module.configure_model
        states, load = strategy.lightning_module_state_dict, strategy.load_model_state_dict

        def configure_model() -> None:  # plain: Lightning looks through wrappers
            configure()
            self._look(module)

        session.patches.set(module, "configure_model", configure_model)
        session.patches.set(strategy, "lightning_module_state_dict", lambda: self.without(states()))
        session.patches.set(strategy, "load_model_state_dict", self._loading(load))

    def _look(self, module: LightningModule) -> None:
        self._frozen = still(module)
        self.base = torch.stack([sketch(p) for p in self._frozen.values()]) if self._frozen else torch.zeros(0, 2)

    def begin(self) -> None:
        """Training begins with what the module has now."""
        module = self._session.module
        named = {**dict(module.named_parameters(remove_duplicate=False)), **still(module)}
        self._frozen = {name: p for name, p in named.items() if name in self._frozen}
        self._begun = {name: (p._version, sketch(p)) for name, p in self._frozen.items()}

    def without(self, states: dict[str, Any]) -> dict[str, Any]:
        """``states`` without the frozen parameters, and what is saved beside one of them, unless they were moved."""
        out = {name for name, p in self._frozen.items() if name not in self._held and not self._moved(name, p)}
        return {key: value for key, value in states.items() if not _of(key, out)}

    def _moved(self, name: str, p: Tensor) -> bool:
        if name not in self._begun:
            return False
        version, was = self._begun[name]
        return p._version != version or not torch.equal(sketch(p), was)

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            saved = checkpoint["state_dict"]
            self._held = {name for name in self._frozen if name in saved}
            left_out = self._frozen.keys() - saved.keys()
            state = checkpoint.get("callbacks", {}).get(self._key)
            alone = left_out == self._frozen.keys()  # of weights alone, which tell no more
            if left_out and (state is not None or alone):
                if state is not None:
                    self._check(state["base"], left_out)
                own = self._session.module.state_dict()
                filled = {key: value for key, value in own.items() if _of(key, left_out) and key not in saved}
                checkpoint = {**checkpoint, "state_dict": {**saved, **filled}}
            load(checkpoint, strict=strict)

        return load_model_state_dict

    def _check(self, base: Tensor, left_out: set[str]) -> None:
        """Raise ``ValueError`` where the checkpoint was trained beside other frozen weights than the module has."""
        names = list(self._frozen)
        wrong = [] if base.shape == self.base.shape else names
        for name, was, now in zip(names, base, self.base, strict=False):
            if name in left_out and not torch.allclose(now, was, rtol=1e-2, atol=1e-2 * float(was[1]) + 1e-12):
                wrong.append(name)
        if wrong:
            raise ValueError(
                f"{self._who}: the checkpoint holds what was trained and not the frozen weights beside it, and this"
                f" {type(self._session.module).__name__} has others: {', '.join(wrong[:3])}"
                f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}. Expected the weights that the run began with."
                f" Build the module with those; or train with {self._who}(save='all'), whose checkpoints hold them."
            )


def _of(key: str, names: set[str]) -> bool:
    """Whether ``key`` of a state dict is one of ``names``, or lies below it as a quantised weight's scales do."""
    while key:
        if key in names:
            return True
        key = key.rpartition(".")[0]
    return False
