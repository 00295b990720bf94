"""Checkpoints that hold only what trains: what is left out, how the rest is filled in, and whether the base is the same."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_eff._core._architecture.record import check_checkpoint
from lightning_eff._core._stack.walking import modules_by_path, without_collections
from lightning_eff._core.session import Session
from lightning_eff.model.adapters._pieces import Pieces, local, sketch

#: The attribute in which a module lists buffers that are frozen weights in another form.
STILL = "_lightning_eff_still"


def still(module: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters, and buffers that represent such, by name."""
    named = modules_by_path(module, once=False)
    found: dict[str, Tensor] = {
        f"{path}.{name}" if path else name: p
        for path, m in named
        for name, p in m._parameters.items()
        if p is not None and not p.requires_grad
    }
    for path, m in named:
        for name in m.__dict__.get(STILL, ()):
            found[f"{path}.{name}" if path else name] = m.get_buffer(name)
    return found


class Partial:
    """What the checkpoints of one run hold, and how they are loaded.

    They hold each trained parameter, all buffers, and frozen parameters that a technique has changed since. The rest is what
    the module's own code makes or loads.

    Args:
        session: the run.
        key: the key of the technique's state in a checkpoint.
        who: the technique, for messages.
    """

    def __init__(self, session: Session, key: str, who: str) -> None:
        self._session, self._key, self._who = session, key, who
        self._pieces = Pieces(session)
        self._frozen: dict[str, Tensor] = {}
        self._begun: dict[str, tuple[int, Tensor, Tensor | None]] = {}
        self._keys: list[str] = []
        self._looked: dict[str, tuple[Any, Tensor]] = {}
        self._held: set[str] = set()
        self.base = torch.zeros(0, 2, dtype=torch.float32, device="cpu")
        module, strategy = session.module, session.trainer.strategy
        configure = module.configure_model

        def configure_model() -> None:  # a plain function: Lightning inspects wrappers
            configure()
            self._look(module)

        session.patches.set(module, "configure_model", configure_model)
        session.patches.set(strategy, "lightning_module_state_dict", self._saving(strategy.lightning_module_state_dict))
        if self._pieces.loads_at_once:
            session.patches.set(strategy, "load_checkpoint", self._loading_file(strategy.load_checkpoint))
        else:
            session.patches.set(strategy, "load_model_state_dict", self._loading(strategy.load_model_state_dict))

    @without_collections()
    def _look(self, module: LightningModule) -> None:
        self._frozen, self._keys = still(module), list(module.state_dict())
        self.base = self._pieces.whole_sketches([*self._frozen.values()])
        looked = zip(self._frozen.items(), self.base, strict=True)
        self._looked = {name: (_content_of(p), of_p) for (name, p), of_p in looked}

    @without_collections()
    def begin(self) -> None:
        """Record the weights with which training starts."""
        module = self._session.module
        now = still(module)
        if any(name not in now for name in self._frozen):  # some train again by now
            now = {**dict(module.named_parameters(remove_duplicate=False)), **now}
        here = {name: now[name] for name in self._frozen if name in now}  # a pipeline stage has only some of them
        whole = not self._pieces.divided
        self._begun = {
            name: (p._version, self._sketched(name, p), p.detach() if whole else None) for name, p in here.items()
        }
        if not self._pieces.divided:
            self._frozen = here
            return
        self._frozen |= here
        self.base = self._pieces.agreed(self.base, self._frozen)

    def _sketched(self, name: str, p: Tensor) -> Tensor:
        """The sketch of this rank's piece of ``p``, from :meth:`_look` if the tensor has not changed since."""
        content, found = self._looked.get(name, (None, None))
        return sketch(local(p)) if found is None or content != _content_of(p) or self._pieces.divided else found

    def without(self, states: dict[str, Any]) -> dict[str, Any]:
        """``states`` without frozen parameters that were not changed, and without values stored with them."""
        out = self._out()
        return {key: value for key, value in states.items() if not _of(key, out)}

    def _out(self) -> set[str]:
        moved = self._pieces.anywhere({name for name, p in self._frozen.items() if self._moved(name, p)})
        return self._frozen.keys() - self._held - moved

    def _saving(self, states: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def lightning_module_state_dict() -> dict[str, Any]:
            out = self._out()
            found = self._pieces.put_together(states, frozenset(key for key in self._keys if _of(key, out)))
            return {key: value for key, value in found.items() if not _of(key, out)}

        return lightning_module_state_dict

    def _moved(self, name: str, p: Tensor) -> bool:
        if name not in self._begun:
            return False
        version, was, at = self._begun[name]
        put = at is not None and at.data_ptr() != p.data_ptr()  # by p.data = ..., which leaves the version unchanged
        return put or p._version != version or not torch.equal(sketch(local(p)), was)

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            saved = checkpoint["state_dict"]
            if self._pieces.divided and not saved:  # of a folder, whose pieces are loaded by now
                load(checkpoint, strict=strict)
                return
            left_out = self._left_out(checkpoint)
            if left_out and self._pieces.divided:
                self._check_keys(saved, left_out, strict=strict)
                strict = False
            elif left_out:
                own = self._session.module.state_dict()
                filled = {key: value for key, value in own.items() if _of(key, left_out) and key not in saved}
                checkpoint = {**checkpoint, "state_dict": {**saved, **filled}}
            load(checkpoint, strict=strict)

        return load_model_state_dict

    def _loading_file(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """The same for strategies that load weights as they read a file."""

        def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            module = self._session.module
            checkpoint = self._pieces.read(checkpoint_path, weights_only)
            if checkpoint is None:
                return load(checkpoint_path, weights_only=weights_only)
            check_checkpoint(
                module, checkpoint["state_dict"], checkpoint.get("lightning_eff", {}).get("architecture", [])
            )
            left_out, strict = self._left_out(checkpoint), module._strict_loading
            if left_out:
                self._check_keys(checkpoint["state_dict"], left_out, strict=module.strict_loading)
                module._strict_loading = False
            try:
                return load(checkpoint_path, weights_only=weights_only)
            finally:
                module._strict_loading = strict

        return load_checkpoint

    def _left_out(self, checkpoint: Mapping[str, Any]) -> set[str]:
        """The frozen parameters that a checkpoint may leave out, because the module has them.

        Raises:
            ValueError: if the module's frozen weights are not those of the checkpoint's run.
        """
        saved = checkpoint["state_dict"]
        self._held = {name for name in self._frozen if name in saved}
        left_out = self._frozen.keys() - saved.keys()
        state = checkpoint.get("callbacks", {}).get(self._key)
        alone = left_out == self._frozen.keys()  # a checkpoint of weights alone has no sketches
        if not left_out or (state is None and not alone):
            return set()
        if state is not None:
            self.base = self._pieces.agreed(self.base, self._frozen)
            self._check(state["base"], left_out)
        return left_out

    def _check_keys(self, saved: Mapping[str, Any], left_out: set[str], *, strict: bool) -> None:
        missing = [key for key in self._keys if key not in saved and not _of(key, left_out)]
        unexpected = [key for key in saved if key not in self._keys]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._session.module).__name__} with {self._who}: missing keys"
                f" {missing}, unexpected keys {unexpected}. Load a checkpoint of this module, or set strict_loading=False."
            )

    def _check(self, base: Tensor, left_out: set[str]) -> None:
        """Raise ``ValueError`` if the module's frozen weights are not those of the checkpoint's run."""
        names = list(self._frozen)
        wrong = [] if base.shape == self.base.shape else names
        for name, was, now in zip(names, base, self.base, strict=False):
            known = bool(was.isfinite().all() and now.isfinite().all())
            if (
                known
                and name in left_out
                and not torch.allclose(now, was, rtol=1e-2, atol=1e-2 * float(was[1]) + 1e-12)
            ):
                wrong.append(name)
        if wrong:
            raise ValueError(
                f"{self._who}: the frozen weights of this {type(self._session.module).__name__} are not those of the"
                f" checkpoint's run: {', '.join(wrong[:3])}{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}. Load the"
                f" weights that the run started with, or train with {self._who}(save='all')."
            )


def _content_of(p: Tensor) -> tuple[int, int, int]:
    """What differs if another tensor, or other values, are in the place of ``p``."""
    return id(p), p._version, 0 if p.is_meta or isinstance(p, DTensor) else p.data_ptr()


def _of(key: str, names: set[str]) -> bool:
    """Whether ``key`` of a state dict is one of ``names`` or is below one, as the scales of a quantised weight."""
    while key:
        if key in names:
            return True
        key = key.rpartition(".")[0]
    return False
