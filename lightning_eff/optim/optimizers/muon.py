"""Muon: the momentum of every hidden matrix is orthogonalized before the step (Jordan et al. 2024).

Also NorMuon's normalization by neuron (Li et al. 2025), cautious weight decay (Chen et al. 2025), and AdamW for all other
parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_eff._core._arguments.declared import declared
from lightning_eff._core._arguments.kinds import Count, Fraction
from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._division.equal_work import Division
from lightning_eff.optim.optimizers._first_order import Rate, keep_dtypes
from lightning_eff.optim.optimizers._matrices import Layout, Split, layout_by_name, layouts_of, named
from lightning_eff.optim.optimizers._muon.in_pieces import InPieces
from lightning_eff.optim.optimizers._muon.orthogonalization import Stack, orthogonalize, polar, product_dtype, stacked
from lightning_eff.optim.optimizers._muon.scratch import Scratch
from lightning_eff.optim.optimizers._muon.settings import DTYPES, Decay, Momentum, checked_adam
from lightning_eff.optim.optimizers._muon.steps import (
    Held,
    Piece,
    chunks,
    normalize_stack,
    second_moments,
    take_steps,
)


class Muon(Optimizer):
    """Muon for the hidden matrices of a network and AdamW for all its other parameters, in one optimizer.

    For each hidden matrix ``p`` of shape (out, in) with gradient ``g``::

        m = momentum * m + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * m     # nesterov, else u = m
        O = polar(u)                              # all singular values near one
        p = p - lr * scale(out, in) * O - lr * weight_decay * p

    Use it for Transformers and other networks with many matrices, where it usually needs fewer steps than AdamW. It keeps one
    tensor of state per matrix, where Adam keeps two. Matrices of one shape are stacked and orthogonalized together, a few
    MiB at a time, and on their Gram matrices where that needs fewer multiplications. Fused projections of queries, keys and
    values are split, and convolutions are treated as (out, in * ...).

    **Pass the module itself** if you can: it shows best which parameters are hidden matrices. With ``named_parameters()``,
    names and shapes decide. With ``parameters()`` alone, all tensors of two or more dimensions count as matrices, as in
    ``torch.optim.Muon``, including embeddings and heads. A parameter group with ``"algorithm": "muon"`` or ``"adamw"``
    decides for itself.

    Under DDP the ranks divide the matrices and exchange the results, which equal those of one process bit for bit. The ranks
    agree at the first step that their gradients are equal, and check it at each step. If they are not (under
    :class:`LocalSGD`), every rank does all the work from then on. Of DTensors (FSDP2, tensor parallelism, or both), one rank
    owns each matrix: it gets the pieces of the momentum, orthogonalizes it, and sends the pieces of the step. The momentum
    stays sharded. ``sent_bytes`` is the number of bytes that this rank sent in the last step.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the learning rate of hidden matrices. Use about 0.02 with ``scale="spectral"``, and AdamW's with
            "match_rms_adamw".
        weight_decay: the weight decay, decoupled and scaled by the learning rate; or a function of the fraction ``u`` of the
            run that is over (see ``num_steps``).
        momentum: the momentum factor, or a function of ``u``.
        nesterov: whether to look one step of momentum ahead.
        orthogonalization: the iteration. "polar_express" is by Amsel et al. 2025, "newton_schulz" by Jordan et al. 2024.
        num_iterations: the number of steps of the iteration.
        scale: the factor by shape. "spectral" is ``sqrt(max(1, out / in))``, "match_rms_adamw" is ``0.2 sqrt(max(out, in))``.
        normalization: "neuron" for NorMuon's normalization, or None.
        beta2: the decay factor of ``normalization="neuron"``.
        cautious: whether to decay only weights that the step moves towards zero.
        split: tensors that hold several matrices. "auto" splits fused projections by name (qkv, c_attn, in_proj, Wqkv into
            thirds, gate_up_proj into halves). A mapping of name patterns to a number of equal parts, or to sizes along
            ``out``, decides otherwise; None splits nothing.
        adam: settings of AdamW for all other parameters: any of ``lr`` (3e-4), ``betas`` (0.9, 0.95), ``eps`` (1e-10) and
            ``weight_decay`` (0).
        dtype: the dtype of the products, "float32" or "bfloat16". None is bfloat16 on CUDA. On a CPU it is bfloat16 for
            matrices whose shorter side is 64 or longer, if the processor has instructions for it (AMX or AVX512-BF16), where
            they are several times as fast; else float32. Give it to get equal results on different processors.
        num_steps: the number of steps after which ``u`` is 1, for ``momentum`` and ``weight_decay`` that are functions.
            Without it, the caller sets the attribute ``u`` before each step.
        distributed: whether to divide whole matrices over the ranks of the default process group while their gradients are
            equal. Set it to False if not all ranks step this optimizer. The work on DTensors is always divided.

    Raises:
        ValueError: for a value out of range, or if there is no hidden matrix. When a step begins, for the sparse gradient of
            a matrix, if ``u`` is needed and unknown, or if ranks that share a DTensor have gradients of different parameters.
        RuntimeError: when a step ends, if it failed on another rank.

    Example:
        >>> optimizer = Muon(model.parameters(), lr=0.02, weight_decay=0.1)
        >>> trainer = L.Trainer(callbacks=[ReplaceOptimizer(Muon, lr=0.02)])

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Amsel et al. 2025, arXiv:2505.16932
        (Polar Express). Liu et al. 2025, arXiv:2502.16982 (scale). Li et al. 2025, arXiv:2510.05491 (NorMuon).
    """

    u: float | None = None  #: the fraction of the run that is over, in [0, 1]

    paper: ClassVar[str] = (
        "Jordan et al. 2024, kellerjordan.github.io/posts/muon; Amsel et al. 2025, arXiv:2505.16932; Li et al. "
        "2025, arXiv:2510.05491 (NorMuon)"
    )
    saves: ClassVar[str] = "steps; keeps one state per weight, where Adam keeps two"
    constraints: ClassVar[str] = "acts on hidden matrices, and AdamW on the rest; needs a learning rate of its own"

    @declared
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: Rate = 0.02,
        weight_decay: Decay = 0.1,
        momentum: Momentum = 0.95,
        nesterov: bool = True,
        *,
        orthogonalization: Literal["polar_express", "newton_schulz"] = "polar_express",
        num_iterations: Annotated[int, Count(at_most=99)] = 5,
        scale: Literal["spectral", "match_rms_adamw"] = "spectral",
        normalization: Literal["neuron"] | None = None,
        beta2: Annotated[float, Fraction(below=1)] = 0.95,
        cautious: bool = True,
        split: Split = "auto",
        adam: Mapping[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        num_steps: Annotated[int, Count()] | None = None,
        distributed: bool = True,
    ) -> None:
        if not (split is None or split == "auto" or isinstance(split, Mapping)):
            raise ValueError(f"Muon({split=}): expected 'auto', None, or a mapping of name patterns to parts.")
        adam = checked_adam(adam)
        functions = (("weight_decay", weight_decay), ("momentum", momentum))
        self._schedules = {name: fn for name, fn in functions if callable(fn)}
        self._num_steps, self._dtype = num_steps, None if dtype is None else DTYPES[dtype]
        self._layouts: dict[Tensor, Layout] = {}
        self._split: Split = split
        self._adam = adam
        self._division = Division(enabled=distributed)
        defaults = {
            "lr": lr,
            "weight_decay": 0.0 if callable(weight_decay) else weight_decay,
            "momentum": 0.0 if callable(momentum) else momentum,
            "nesterov": nesterov,
            "orthogonalization": orthogonalization,
            "num_iterations": num_iterations,
            "scale": scale,
            "normalization": normalization,
            "beta2": beta2,
            "cautious": cautious,
            "algorithm": "muon",
            "betas": adam["betas"],
            "eps": adam["eps"],
        }
        super().__init__(self._groups(params), defaults)
        if not any(group["algorithm"] == "muon" for group in self.param_groups):
            held = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
            raise ValueError(
                f"Muon: found no hidden matrix among {len(held)} parameters (shapes"
                f" {held[:6]}{' ...' if len(held) > 6 else ''})."
                ' Use AdamW, or put matrices into a parameter group with "algorithm": "muon".'
            )

    # -- parameter groups

    def _groups(self, params: nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
        """The given groups, each split into its matrices and its other parameters."""
        known = layouts_of(params if isinstance(params, nn.Module) else None, self._split)
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        given = list(params)
        if not given:
            raise ValueError("Muon: got no parameters. Pass a module, its named_parameters(), or groups of them.")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        return [part for group in groups for part in self._parted(group, known)]

    def _parted(self, group: dict[str, Any], known: Mapping[int, Layout | None] | None) -> list[dict[str, Any]]:
        held, rest = group["params"], {key: value for key, value in group.items() if key != "params"}
        pairs = named([held] if isinstance(held, Tensor) else held)
        algorithm = rest.pop("algorithm", None)
        if algorithm not in (None, "muon", "adamw"):
            raise ValueError(f'Muon: a parameter group has "algorithm": {algorithm!r}. Use "muon" or "adamw".')
        parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for name, p in pairs:
            layout = known.get(id(p)) if known is not None else layout_by_name(name, p, self._split)
            if algorithm == "muon" and layout is None:
                if p.ndim < 2:
                    raise ValueError(
                        f'Muon: a group with "algorithm": "muon" holds {name or "a parameter"} of shape {tuple(p.shape)}, which'
                        " has fewer than two dimensions. Put it into another group."
                    )
                layout = Layout("matrix" if p.ndim == 2 else "convolution")
            which = algorithm or ("adamw" if layout is None else "muon")
            if which == "muon" and layout is not None:
                self._layouts[p] = layout
            parts[which].append(p if name is None else (name, p))
        # a group's settings are for its matrices; AdamW's come from `adam`, unless the group is AdamW's
        aside = {**self._adam, "momentum": 0.0, **(rest if algorithm == "adamw" else {})}
        of = {"muon": rest, "adamw": aside}
        return [{**of[which], "params": held, "algorithm": which} for which, held in parts.items() if held]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; without an ``"algorithm"`` it is split into matrices and other parameters."""
        if "algorithm" not in param_group:
            parts = self._parted(param_group, None)
            for part in parts:
                super().add_param_group(part)
            return
        super().add_param_group(param_group)

    # -- state that torch.optim.Optimizer would lose

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and keep the dtype of each tensor in it."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_schedules", "_num_steps", "_dtype", "_layouts", "_split", "_adam", "_division")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    # -- a step

    @property
    def sent_bytes(self) -> int:
        """The bytes of tensors that this rank sent in the last step; a collective counts as in a ring."""
        return self._division.messages.sent_bytes

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all groups once.

        Args:
            closure: a function that computes the loss again, with gradients, and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._schedule()
            for group in self.param_groups:
                if group["algorithm"] == "adamw":
                    self._step_adamw(group)
            self._step_matrices()
        return loss

    def _schedule(self) -> None:
        """Set momentum and weight decay by their functions of ``u``."""
        if not self._schedules:
            return
        if self.u is None and self._num_steps is None:
            raise ValueError(
                f"Muon: {sorted(self._schedules)} are functions of the run's progress u, which is unknown. Give num_steps=, or"
                " set"
                " the attribute u before each step."
            )
        for group in self.param_groups:
            if group["algorithm"] != "muon":
                continue
            done = group.setdefault("num_done", 0)
            u = self.u if self.u is not None else min(done / (self._num_steps or 1), 1.0)
            group["num_done"] = done + 1
            for name, fn in self._schedules.items():
                group[name] = float(fn(u))

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if p.is_cuda else None)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            params,
            [p.grad for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=all(type(p) in (Tensor, nn.Parameter) and p.is_floating_point() for p in params),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_matrices(self) -> None:
        alike: dict[Any, list[Held]] = {}  # matrices that can share a stack; empty if a step drops every block
        for group in self.param_groups:
            for p in group["params"] if group["algorithm"] == "muon" else ():
                if p.grad is not None:
                    mesh = p.device_mesh if isinstance(p, DTensor) else None
                    key = (group["orthogonalization"], group["num_iterations"], mesh, p.dtype)
                    alike.setdefault(key, []).append((group, self._begun(p)))
        self._division.messages.reset()
        self._division.agree(
            [
                (str((*key[:2], key[3])), [(tuple(p.shape), self._layouts[p]) for _, p in held])
                for key, held in alike.items()
                if key[2] is None
            ]
        )
        scratch = Scratch()
        with InPieces(self, self._division, self._layouts, self._dtype, scratch) as in_pieces:
            for (method, num_iterations, mesh, _), held in alike.items():
                if mesh is not None:
                    in_pieces.step(mesh, held, method, num_iterations)
                    continue
                for chunk in chunks(held, self._division.share):
                    self._step_chunk(chunk, method, num_iterations, scratch)

    def _begun(self, p: Tensor) -> Tensor:
        """Return the parameter, with a momentum in its state."""
        assert p.grad is not None
        if p.grad.is_sparse:
            raise ValueError(
                f"Muon: the gradient of a matrix of shape {tuple(p.shape)} is sparse. Set sparse=False in its"
                ' embedding, or put the parameter into a group with "algorithm": "adamw".'
            )
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return p

    def _step_chunk(self, held: list[Held], method: str, num_iterations: int, scratch: Scratch) -> None:
        """Update parameters of one dtype, whose matrices are stacked together."""
        pieces: list[Piece] = []
        blocks: list[Tensor] = []
        u: Tensor | None = None
        for (group, p), u in zip(held, self._momentum(held, scratch), strict=True):
            blocks += self._layouts[p].blocks(u)
            pieces += self._pieces(group, p, [block.shape for block in blocks[len(pieces) :]])
        del u  # so that the memory of the momenta can be replaced by a larger one
        for stack in self._polar(blocks, method, num_iterations, scratch):
            chosen = [pieces[i] for i in stack.blocks]
            normalize_stack(chosen, stack.x)
            take_steps(chosen, stack.x, scratch)

    def _pieces(self, group: dict[str, Any], p: Tensor, shapes: list[torch.Size]) -> list[Piece]:
        """The matrices within a parameter."""
        targets = self._layouts[p].targets(p.detach())
        moments = self._second_moments(p, shapes) if group["normalization"] == "neuron" else [None] * len(shapes)
        return [Piece(group, p, *one) for one in zip(shapes, targets, moments, strict=True)]

    def _momentum(self, held: list[Held], scratch: Scratch) -> list[Tensor]:
        """Advance the momenta, and return the ``u`` of each parameter."""
        updates: list[Tensor] = []
        sizes = [p.numel() for _, p in held]
        _, one = held[0]
        rooms = iter(scratch.get("updates", [sum(sizes)], one.dtype, one.device).split(sizes))
        for _, some in groupby(held, key=lambda one: id(one[0])):
            found = list(some)
            group, params = found[0][0], [p for _, p in found]
            grads: list[Any] = [p.grad for p in params]
            buffers, mu = [self.state[p]["momentum_buffer"] for p in params], group["momentum"]
            # m := mu m + (1 - mu) g
            lists.lerp_(buffers, grads, 1 - mu)
            # u := (1 - mu) g + mu m
            if not group["nesterov"]:
                updates += buffers
            else:
                whole = [next(rooms).view(p.shape) for p in params]
                updates += [torch.lerp(g, m, mu, out=u) for g, m, u in zip(grads, buffers, whole, strict=True)]
        return updates

    def _polar(self, blocks: list[Tensor], method: str, num_iterations: int, scratch: Scratch) -> list[Stack]:
        """The polar factors of ``blocks``, whose memory is used again."""
        settings: Any = {"method": method, "num_iterations": num_iterations}
        if self._division.idle:
            stacks = stacked(blocks, self._dtype, scratch)
            blocks.clear()
            polar(stacks, scratch, **settings)
            return stacks
        apart = [matrix for block in blocks for matrix in block.unbind(0)]
        sizes = [len(block) for block in blocks]
        settings["dtype"] = self._dtype
        dtypes = [product_dtype(matrix.shape, matrix.device, self._dtype) for matrix in apart]
        found = iter(self._division.run(apart, lambda chosen: orthogonalize(chosen, **settings), dtypes))
        return stacked([torch.stack([next(found) for _ in range(size)]) for size in sizes], self._dtype, scratch)

    def _second_moments(self, p: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
        """The second moments ``S`` of the matrices of each block, stored as one vector."""
        return second_moments(self.state[p], p, shapes)
