"""Muon: momentum whose every hidden matrix is made orthogonal before it is taken as a step (Jordan et al. 2024).

Also NorMuon's normalization by neuron (Li et al. 2025), cautious decay (Chen et al. 2025) and AdamW for all other parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_eff.optim.optimizers import _lists as lists
from lightning_eff.optim.optimizers._first_order import keep_dtypes
from lightning_eff.optim.optimizers._matrices import Layout, Split, layout_by_name, layouts_of, named
from lightning_eff.optim.optimizers._muon.division import Division, part_of, whole_of
from lightning_eff.optim.optimizers._muon.orthogonalization import Stack, orthogonalize, polar_stacks, stacked
from lightning_eff.optim.optimizers._muon.settings import DTYPES, Scheduled, check_settings, checked_adam
from lightning_eff.optim.optimizers._muon.steps import Piece, normalize_stack, parts_of, take_step, take_steps


class Muon(Optimizer):
    """One optimizer for a whole network: Muon for its hidden matrices, AdamW for all else.

    For each hidden matrix ``p`` of shape (out, in) with gradient ``g``::

        m = momentum * m + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * m     # nesterov, else u = m
        O = polar(u)                              # all singular values near one
        p = p - lr * scale(out, in) * O - lr * weight_decay * p

    Matrices of one shape are stacked and made orthogonal together; where fewer multiplications are needed so, on their
    Gram matrices. Fused projections of queries, keys and values are taken apart, and convolutions are (out, in * ...).

    **Which parameters are matrices** is known best from the module: pass it instead of its parameters. From
    ``named_parameters()`` it is told by name and shape. From ``parameters()`` alone nothing tells an embedding or a head
    from a hidden matrix: all tensors of two dimensions or more count as matrices, as in ``torch.optim.Muon``. A parameter
    group with ``"algorithm": "muon"`` or ``"adamw"`` of its own is taken at its word.

    Under DDP each rank makes its share of the matrices orthogonal, and the ranks exchange the results: the numbers are
    those of one process, bit for bit. That the ranks hold equal gradients is agreed on at the first step and checked at
    each; where they do not (under :class:`LocalSGD`), every rank does all by itself from then on. DTensors (FSDP2,
    tensor parallelism) are gathered for the products and stay divided otherwise.

    Args:
        params: a module, its ``named_parameters()`` or ``parameters()``, or groups of them.
        lr: the rate of hidden matrices, >= 0. With ``scale="spectral"`` about 0.02; with "match_rms_adamw" AdamW's.
        weight_decay: >= 0, decoupled and scaled by the rate; or a function of the share ``u`` of the run that is over,
            see ``num_steps``.
        momentum: in [0, 1), or a function of ``u`` with such values.
        nesterov: look one step of momentum ahead.
        orthogonalization: "polar_express" (Amsel et al. 2025) or "newton_schulz" (Jordan et al. 2024).
        num_iterations: its steps, 1 to 99.
        scale: "spectral" or "match_rms_adamw".
        normalization: "neuron" for NorMuon's, or None.
        beta2: of ``normalization="neuron"``, in [0, 1).
        cautious: decay only weights that the step moves towards zero.
        split: what is several maps in one tensor: "auto" takes apart what is named as fused (qkv, c_attn, in_proj, Wqkv:
            thirds; gate_up_proj: halves) and divides so; a mapping of patterns of names to a number of equal parts or
            to sizes along ``out``; or None.
        adam: settings of AdamW for all else: any of ``lr`` (3e-4), ``betas`` (0.9, 0.95), ``eps`` (1e-10) and
            ``weight_decay`` (0).
        dtype: of the products: "float32", "bfloat16", or None for bfloat16 on CUDA and float32 elsewhere.
        num_steps: steps after which ``u`` is 1, >= 1, for ``momentum`` and ``weight_decay`` that are functions of it. Without,
            whoever drives the run sets the attribute ``u`` before each step.
        distributed: divide the matrices over the ranks of the default process group where their gradients are equal;
            False where not all ranks step this optimizer.

    Raises:
        ValueError: for other values, and where there is no hidden matrix; as a step begins, for sparse gradients of a matrix,
            or where ``u`` is needed and not known.

    Sources:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Amsel et al. 2025, arXiv:2505.16932;
        Liu et al. 2025, arXiv:2502.16982 (scale); Li et al. 2025, arXiv:2510.05491 (NorMuon).
    """

    u: float | None = None  #: the share of the run that is over, in [0, 1]

    paper: ClassVar[str] = (
        "Jordan et al. 2024, kellerjordan.github.io/posts/muon; Amsel et al. 2025, arXiv:2505.16932; Li et al. "
        "2025, arXiv:2510.05491 (NorMuon)"
    )
    saves: ClassVar[str] = "steps, by a matrix's whole direction; one state a weight, where Adam has two"
    constraints: ClassVar[str] = "hidden matrices; other parameters are AdamW's; its rate is its own"

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 0.02,
        weight_decay: Scheduled = 0.1,
        momentum: Scheduled = 0.95,
        nesterov: bool = True,
        *,
        orthogonalization: str = "polar_express",
        num_iterations: int = 5,
        scale: str = "spectral",
        normalization: str | None = None,
        beta2: float = 0.95,
        cautious: bool = True,
        split: Split = "auto",
        adam: Mapping[str, Any] | None = None,
        dtype: str | None = None,
        num_steps: int | None = None,
        distributed: bool = True,
    ) -> None:
        check_settings(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            orthogonalization=orthogonalization,
            num_iterations=num_iterations,
            scale=scale,
            normalization=normalization,
            beta2=beta2,
            split=split,
            dtype=dtype,
            num_steps=num_steps,
        )
        adam = checked_adam(adam)
        functions = (("weight_decay", weight_decay), ("momentum", momentum))
        self._schedules = {name: fn for name, fn in functions if callable(fn)}
        self._num_steps, self._dtype = num_steps, None if dtype is None else DTYPES[dtype]
        self._layouts: dict[Tensor, Layout] = {}
        self._split: Split = split
        self._adam = adam
        self._division = Division() if distributed else None
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
                f"Muon: no hidden matrix among {len(held)} parameters (shapes {held[:6]}{' ...' if len(held) > 6 else ''});"
                " expected weights of linear maps or convolutions beside embeddings and heads. Use AdamW, or name the"
                ' matrices by a parameter group with "algorithm": "muon".'
            )

    # -- parameter groups

    def _groups(self, params: nn.Module | Iterable[Any]) -> list[dict[str, Any]]:
        """Each group as given, in up to two: its matrices, and all else."""
        known = layouts_of(params if isinstance(params, nn.Module) else None, self._split)
        if isinstance(params, nn.Module):
            params = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
        given = list(params)
        if not given:
            raise ValueError("Muon: got no parameters; expected a module, its named_parameters(), or groups of them.")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        return [part for group in groups for part in self._parted(group, known)]

    def _parted(self, group: dict[str, Any], known: Mapping[int, Layout | None] | None) -> list[dict[str, Any]]:
        held, rest = group["params"], {key: value for key, value in group.items() if key != "params"}
        pairs = named([held] if isinstance(held, Tensor) else held)
        algorithm = rest.pop("algorithm", None)
        if algorithm not in (None, "muon", "adamw"):
            raise ValueError(f'Muon: a parameter group has "algorithm": {algorithm!r}; expected "muon" or "adamw".')
        parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for name, p in pairs:
            layout = known.get(id(p)) if known is not None else layout_by_name(name, p, self._split)
            if algorithm == "muon" and layout is None:
                if p.ndim < 2:
                    raise ValueError(
                        f'Muon: a group with "algorithm": "muon" holds {name or "a parameter"} of shape {tuple(p.shape)};'
                        " expected two dimensions or more. Put it into another group."
                    )
                layout = Layout("matrix" if p.ndim == 2 else "convolution")
            which = algorithm or ("adamw" if layout is None else "muon")
            if which == "muon" and layout is not None:
                self._layouts[p] = layout
            parts[which].append(p if name is None else (name, p))
        # settings of the group are the matrices' own; AdamW's come from `adam` where the group says nothing else
        aside = {**self._adam, "momentum": 0.0, **(rest if algorithm == "adamw" else {})}
        of = {"muon": rest, "adamw": aside}
        return [{**of[which], "params": held, "algorithm": which} for which, held in parts.items() if held]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, all of one kind: by its ``"algorithm"``, or by what its first parameter is."""
        if "algorithm" not in param_group:
            parts = self._parted(param_group, None)
            for part in parts:
                super().add_param_group(part)
            return
        super().add_param_group(param_group)

    # -- what a bare torch.optim.Optimizer would lose

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, each tensor of it in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        keep_dtypes(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_schedules", "_num_steps", "_dtype", "_layouts", "_split", "_adam", "_division")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    # -- a step

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all groups.

        Args:
            closure: computes the loss anew, with gradients on, and returns it.
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
        """Let momentum and decay be what their functions say at the run's ``u``."""
        if not self._schedules:
            return
        if self.u is None and self._num_steps is None:
            raise ValueError(
                f"Muon: {sorted(self._schedules)} follow the run's progress u, which nobody tells; expected num_steps=, after"
                " which u is 1, or somebody who sets the attribute u before each step."
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
        held = [(group, p) for group in self.param_groups if group["algorithm"] == "muon" for p in group["params"]]
        held = [(group, p) for group, p in held if p.grad is not None]  # none where a step drops every block
        alike: dict[Any, list[Piece]] = {}  # what may be in one stack
        for (group, p), u in zip(held, self._momentum(held), strict=True):
            divided = hasattr(p, "full_tensor")
            key = (group["orthogonalization"], group["num_iterations"], divided, p.dtype)
            alike.setdefault(key, []).extend(self._pieces(group, p, whole_of(u), divided=divided))
        if self._division is not None:
            shapes = {key: [tuple(piece.block.shape) for piece in some] for key, some in alike.items()}
            self._division.agree([(str(key), some) for key, some in shapes.items()])
        parts: dict[Tensor, dict[int, Tensor]] = {}  # the steps of DTensors, by parameter and block
        for (method, num_iterations, divided, _), pieces in alike.items():
            for stack in self._polar([piece.block for piece in pieces], method, num_iterations):
                chosen = [pieces[i] for i in stack.blocks]
                normalize_stack(chosen, stack.x)
                if not divided:
                    take_steps(chosen, stack.x)
                    continue
                for piece, part in zip(chosen, parts_of(chosen, stack.x), strict=True):
                    parts.setdefault(piece.p, {})[piece.index] = part
        for group, p in held:
            if p in parts:
                step = part_of(self._joined(p, parts[p]), p)
                local = p.detach().to_local()  # pyright: ignore[reportAttributeAccessIssue]
                take_step(local, step, float(group["lr"]), float(group["weight_decay"]), cautious=group["cautious"])

    def _pieces(self, group: dict[str, Any], p: Tensor, u: Tensor, *, divided: bool) -> list[Piece]:
        """The matrices of a parameter, by their shapes."""
        layout = self._layouts[p]
        blocks = layout.blocks(u)
        none = [None] * len(blocks)
        targets = none if divided else layout.targets(p.detach())
        moments = self._second_moments(p, blocks) if group["normalization"] == "neuron" else none
        made = zip(range(len(blocks)), blocks, targets, moments, strict=True)
        return [Piece(group, p, *one) for one in made]

    def _momentum(self, held: list[tuple[dict[str, Any], Tensor]]) -> list[Tensor]:
        """The ``u`` of each parameter; momenta are moved on."""
        updates: list[Tensor] = []
        for group in self.param_groups:
            params = [p for other, p in held if other is group]
            if not params:
                continue
            grads: list[Tensor] = []
            for p in params:
                assert p.grad is not None
                if p.grad.is_sparse:
                    raise ValueError(
                        f"Muon: the gradient of a matrix of shape {tuple(p.shape)} is sparse; expected a dense one. Put the"
                        ' parameter into a group with "algorithm": "adamw", or make its embedding dense.'
                    )
                grads.append(p.grad)
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers, mu = [self.state[p]["momentum_buffer"] for p in params], group["momentum"]
            # m := mu m + (1 - mu) g
            lists.lerp_(buffers, grads, 1 - mu)
            # u := (1 - mu) g + mu m
            updates += lists.lerp(grads, buffers, mu) if group["nesterov"] else buffers
        return updates

    def _polar(self, blocks: list[Tensor], method: str, num_iterations: int) -> list[Stack]:
        settings: Any = {"method": method, "num_iterations": num_iterations, "dtype": self._dtype}
        if self._division is None or self._division.idle:
            return polar_stacks(blocks, **settings)
        apart = [matrix for block in blocks for matrix in block.unbind(0)]
        found = iter(self._division.run(apart, lambda chosen: orthogonalize(chosen, **settings)))
        return stacked([torch.stack([next(found) for _ in block]) for block in blocks])

    def _second_moments(self, p: Tensor, blocks: list[Tensor]) -> list[Tensor]:
        """``S`` of the matrices of each block, kept as one vector."""
        state = self.state[p]
        sizes = [len(block) * max(block.shape[1:]) for block in blocks]
        if "second_moment" not in state:
            state["second_moment"] = torch.zeros(sum(sizes), dtype=torch.float32, device=p.device)
        parts = state["second_moment"].split(sizes)
        return [part.view(len(block), -1) for part, block in zip(parts, blocks, strict=True)]

    def _joined(self, p: Tensor, steps: dict[int, Tensor]) -> Tensor:
        """The steps of a parameter's blocks in one tensor of its shape."""
        whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        for index, view in enumerate(self._layouts[p].targets(whole)):
            view.copy_(steps[index].reshape(view.shape))
        return whole
