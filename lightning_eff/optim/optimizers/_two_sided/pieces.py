"""Steps of matrices that lie in pieces on several ranks: one rank owns each matrix, and does its work."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_eff.optim.optimizers._division.equal_work import Division
from lightning_eff.optim.optimizers._division.owned import OWNERS, Matrices, of_unit, put_unit, settle, settled, shown
from lightning_eff.optim.optimizers._division.shards import Unit, aligned, local, mismatch, shape_of, units
from lightning_eff.optim.optimizers._first_order import FirstOrder
from lightning_eff.optim.optimizers._matrices import Layout
from lightning_eff.optim.optimizers._two_sided.folding import Fold, cost


class InPieces(FirstOrder):
    """A rule for matrices whose parameters can be DTensors.

    The owner of a matrix gets the pieces of its gradient, keeps its state, and sends the pieces of its step
    (:mod:`.._division.owned`).

    Attributes:
        divides: whether the rule does so.
    """

    divides: ClassVar[bool] = True

    def _start(self, *, distributed: bool) -> None:
        """Set the attributes, before the parameters are added."""
        self._folds: dict[Tensor, Fold] = {}
        self._matrices: dict[Tensor, Matrices] = {}  # of DTensors, as they are needed
        self._division = Division(enabled=distributed and self.divides)
        self._planned: dict[Tensor, list[int]] = {}  # the owners of matrices that have no state yet
        self._alone = False  # whether the work at hand is this rank's alone
        self._failure: Exception | None = None

    @property
    def sent_bytes(self) -> int:
        """The bytes of tensors that this rank sent in the last step; a collective counts as in a ring."""
        return self._division.messages.sent_bytes

    # -- what a rule implements

    @abstractmethod
    def moments(self, like: Tensor) -> dict[str, Any]:
        """Return the tensors of a new state for a parameter or a matrix with the shape, dtype and device of ``like``.

        They are contiguous, so that their pieces are views.
        """

    def moves(self, t: int) -> bool:
        """Return whether a matrix moves in its step ``t``."""
        return True

    @abstractmethod
    def directions(
        self, group: dict[str, Any], folds: list[Fold], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> list[Tensor]:
        """Return the step of each matrix before the learning rate, and move its state on.

        Args:
            group: the settings.
            folds: how each gradient is folded.
            grads: the whole gradients. They do not change.
            states: the states, with this step's number as ``step``.

        Returns:
            The steps in the working dtype. Those of matrices that do not move (:meth:`moves`) are not used.
        """

    @abstractmethod
    def move(self, group: dict[str, Any], targets: list[Tensor], updates: list[Tensor]) -> None:
        """Move weights, whole or in pieces, by the steps from :meth:`directions`."""

    # -- a step

    def _matrices_of(self, p: DTensor) -> Matrices:
        if p not in self._matrices:
            found = units(self._folds[p].layout, p.shape)
            counts = [len(self._pieces_of(p, unit)) for unit in found]
            self._matrices[p] = Matrices(p, found, counts)
        return self._matrices[p]

    def _pieces_of(self, p: Tensor, unit: Unit) -> list[Tensor]:
        """The pieces of a matrix, without values."""
        return self._unit_fold(p, unit.layout).apart(torch.empty(shape_of(unit.region), device="meta"))

    def _unit_fold(self, p: Tensor, layout: Layout | None) -> Fold:
        fold = self._folds[p]
        return Fold(layout, fold.merge, fold.block)

    def _plan(self, mesh: DeviceMesh, params: Sequence[DTensor]) -> dict[Tensor, list[int]]:
        """Return the owners of matrices that have none yet, of all of them at once so that ranks have equal work."""
        new = [self._matrices_of(p) for p in params if not settled(self.state.get(p, {}))]
        costs = [sum(cost(one.shape) for one in self._pieces_of(m.p, unit)) for m in new for unit in m.units]
        owners = iter(self._division.owners(mesh, costs))
        return {m.p: [next(owners) for _ in m.units] for m in new}

    def update_pieces(
        self,
        mesh: DeviceMesh,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        """Update matrices that lie in pieces on the ranks of ``mesh``; each rank does the work on those that it owns."""
        messages = self._division.messages
        held = [self._matrices_of(p) for p in params if isinstance(p, DTensor)]
        new = [(m, state, self._planned[m.p]) for m, state in zip(held, states, strict=True) if not settled(state)]
        if new:
            settle(messages, new)
        places = [place for m, state in zip(held, states, strict=True) for place in m.places(state[OWNERS])]
        jobs = [(i, u) for i, m in enumerate(held) for u in range(len(m.units))]
        pieces = [aligned(g, p) for g, p in zip(grads, params, strict=True)]
        got = messages.gather(places, [pieces[i] for i, _ in jobs])
        for state in states:
            state["step"] += 1
        steps = list(got)
        mine = [k for k, place in enumerate(places) if place.mine]
        try:
            found = self._own_directions(
                group, [(held[jobs[k][0]], states[jobs[k][0]], jobs[k][1], got[k]) for k in mine]
            )
            for k, step in zip(mine, found, strict=True):
                steps[k] = step
        except Exception as error:  # raised when no rank waits for this one any more
            self._failure = self._failure or error
            for k in mine:
                steps[k] = torch.zeros(
                    shape_of(places[k].region), dtype=params[jobs[k][0]].dtype, device=pieces[0].device
                )
        moving = [k for k, (i, _) in enumerate(jobs) if self.moves(states[i]["step"])]
        dtypes = [params[jobs[k][0]].dtype for k in moving]
        chosen = [places[k] for k in moving]
        parts = messages.scatter(chosen, [steps[k] for k in moving], dtypes, pieces[0].device)
        updates: dict[int, Tensor] = {}
        for k, place, part in zip(moving, chosen, parts, strict=True):
            i = jobs[k][0]
            if i not in updates:
                updates[i] = torch.empty_like(local(params[i]))
            if part is not None:
                updates[i][place.here].copy_(part)
        if updates:
            self.move(group, [local(params[i]) for i in updates], list(updates.values()))

    def _own_directions(
        self, group: dict[str, Any], jobs: list[tuple[Matrices, dict[str, Any], int, Any]]
    ) -> list[Tensor]:
        """The steps of the matrices that this rank owns, each with its parameter's state, its index and its gradient."""
        folds = [self._unit_fold(matrices.p, matrices.units[u].layout) for matrices, _, u, _ in jobs]
        own = [{"step": s["step"], **(of_unit(s, u) or self.moments(grad))} for _, s, u, grad in jobs]
        self._alone = True
        try:
            found = self.directions(group, folds, [grad for *_, grad in jobs], own) if jobs else []
        finally:
            self._alone = False
        for (_, state, u, _), one in zip(jobs, own, strict=True):
            put_unit(state, u, one)
        return [step.to(matrices.p.dtype) for step, (matrices, *_) in zip(found, jobs, strict=True)]

    def show_state(self, into: dict[Tensor, dict[str, Any]]) -> None:
        """Add the state of each matrix that is a DTensor to ``into``, as in :meth:`state_dict`; collective."""
        for mesh in self._meshes() if self.divides else ():
            held = [
                (p, self._matrices_of(p), self.state[p])
                for p in self._parameters()
                if p in self._folds and isinstance(p, DTensor) and p.device_mesh == mesh and p in self.state
            ]
            states = shown(self._division.messages, [(matrices, state) for _, matrices, state in held])
            into.update({p: state for (p, _, _), state in zip(held, states, strict=True)})

    def _check(self, mesh: DeviceMesh, what: str = "") -> None:
        failure, self._failure = self._failure, None
        self._division.messages.check(mesh, failure, what, who=type(self).__name__)

    @override
    def prepare(self) -> None:
        if not self.divides:
            return
        self._division.messages.reset()
        with_grads = [(i, p) for i, p in enumerate(self._parameters()) if p in self._folds and p.grad is not None]
        self._division.agree([(i, tuple(p.shape)) for i, p in with_grads if not isinstance(p, DTensor)])
        self._planned = {}
        for mesh in self._meshes():
            mine = [(i, p) for i, p in with_grads if isinstance(p, DTensor) and p.device_mesh == mesh]
            for _, p in mine:
                if p not in self._matrices:
                    self._failure = self._failure or mismatch(p, who=type(self).__name__)
            self._check(mesh, str([(i, tuple(p.shape)) for i, p in mine]))
            self._planned |= self._plan(mesh, [p for _, p in mine])

    @override
    def conclude(self) -> None:
        for mesh in self._meshes() if self.divides else ():
            self._check(mesh)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _meshes(self) -> list[DeviceMesh]:
        """The meshes of matrices, in an order that is equal on all ranks of each."""
        return list(
            dict.fromkeys(p.device_mesh for p in self._parameters() if isinstance(p, DTensor) and p in self._folds)
        )
