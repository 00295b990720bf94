"""Tensor parallelism of an unchanged module, with a plan from the user, from the model, or found, and a check.

torch's styles apply the plan on a device mesh. All parameters become DTensors under the plain module's names, and their
``full_tensor()`` is the plain parameter. So checkpoints and FSDP2 (``fully_shard`` afterwards) need no translation. The
training step runs once before and once after the split. Loss and all gradients must agree on every rank.

Outside split regions all ranks must draw the same random numbers, so the strategy gives all ranks of a tensor-parallel group
the same seed. In a split region (attention's dropout, an MLP's inner dropout), each rank draws the same mask for its own heads
or features. Every activation is dropped with the right probability. But unlike in one process, head i of one rank has the same
mask as head i of the next.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_eff.strategies._inplace import changed, lost, marks
from lightning_eff.strategies._tensor.exercise import exercised
from lightning_eff.strategies._tensor.fallback import alone, last_layers, norms, storage
from lightning_eff.strategies._tensor.given import Entry, carried_plan, given_plan, refuse_heads, wildcard
from lightning_eff.strategies._tensor.propose import divisions, pairs, variants
from lightning_eff.strategies._tensor.sharder import Sharder
from lightning_eff.strategies._tensor.styles import Style, names_of, sharded_part
from lightning_eff.strategies._tensor.trace import Record, execute, jittered
from lightning_eff.strategies._tensor.verify import Finding, compare, noise, rounding

Attributes = tuple[tuple[str, str], ...]


class TensorPlan:
    """The applied plan with its reasons; it prints as a table.

    Attributes:
        entries: path, style and reason of every module with parameters.
        notes: attempts that failed.
        sharded: names of split parameters; others are whole on every rank.
        verified: whether loss and gradients were compared with the whole module's.
        share: fraction of all parameter elements on this rank, about 1 / size.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, entries: list[Entry], notes: list[str], verified: bool
    ) -> None:
        self._module, self._mesh = module, mesh
        self.entries, self.notes, self.verified = entries, notes, verified
        self.sharded = {
            name
            for name, param in module.named_parameters(remove_duplicate=False)
            if isinstance(param, DTensor) and any(not p.is_replicate() for p in param.placements)
        }
        held, whole = sharded_part(module.parameters())
        self.share = held / max(whole, 1)

    def is_sharded(self, name: str) -> bool:
        """Whether a rank holds only a part of the parameter ``name``."""
        return name in self.sharded

    def normalize_gradients(self) -> None:
        """Give every gradient the placement of its parameter, if it has another one."""
        for param in self._module.parameters():
            grad = param.grad
            if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
                param.grad = grad.redistribute(placements=param.placements)

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], int] = {}
        for entry in self.entries:
            key = (wildcard(entry.path) or "(the module itself)", str(entry.style), entry.why)
            rows[key] = rows.get(key, 0) + 1
        lines = [(path if n == 1 else f"{path} ({n})", style, why) for (path, style, why), n in rows.items()]
        widths = [max((len(line[i]) for line in lines), default=0) for i in range(2)]
        checked = "equal to the whole module's loss and gradients" if self.verified else "not checked: no batch to run"
        head = f"Tensor parallel over {self._mesh.size()} ranks, {self.share:.1%} of the parameters on each; {checked}"
        table = [f"  {path:<{widths[0]}}  {style:<{widths[1]}}  {why}" for path, style, why in lines]
        return "\n".join([head, *table, *(f"  note: {note}" for note in self.notes)])


def tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Literal["auto"] | Mapping[str, str],
    run: Callable[[], Tensor] | None,
    *,
    sequence_parallel: bool = False,
    whole_heads: bool = False,
    who: str = "HybridParallelStrategy",
) -> TensorPlan:
    """Split ``module`` over the ranks of ``mesh``, in place.

    Args:
        module: the whole module, equal on all ranks. Its parameters can be on the meta device if ``run`` is None.
        mesh: a mesh with one dimension.
        plan: "auto", or styles by dotted path or pattern (``*`` for one name, ``**`` for several). Styles are ``colwise``,
            ``rowwise``, ``colwise_gather_output``, ``rowwise_split_input``, ``packed_colwise[:rows,rows]``,
            ``embedding_rowwise``, ``embedding_colwise``, ``gather`` (stored in parts, gathered when it is read),
            ``replicate``, ``replicated_with_grad_allreduce`` and ``sequence_parallel``. Other modules stay replicated.
        run: runs the training step on a real batch, the same on all ranks, and returns the loss without logging. None if it
            cannot run. Then only written plans and split storage are used, without a check.
        sequence_parallel: let norms on (B, T, features) compute each rank's part of the sequence, if the result is right.
            Their inputs and outputs stay whole on every rank.
        whole_heads: with "auto", store the layers that compute the loss's input in parts, and compute with whole weights.
        who: name of the caller in messages.

    Returns:
        The applied plan.

    Raises:
        ValueError: if a given plan is wrong, or no plan gives the whole module's loss and gradients.
    """
    if mesh.ndim != 1:
        raise ValueError(f"{who}: got a mesh with {mesh.ndim} dimensions. Pass a mesh with one dimension.")
    if isinstance(plan, str) and plan != "auto":
        raise ValueError(
            f'{who}(tensor_parallel_plan={plan!r}): expected "auto" or a mapping of module paths to styles.'
        )
    same_random_numbers(mesh)
    hand = None if isinstance(plan, str) else given_plan(module, plan, mesh.size(), who=who)
    if hand is None:
        refuse_heads(module, mesh.size(), who=who)
    sharder = Sharder(module, mesh)
    if run is None:
        found = _by_hand(module, sharder, hand, None, who=who) if hand else _found(module, sharder, None, who=who)
        if sequence_parallel:
            found.notes.append("no norm computes parts of the sequence: there is no batch to find norms on")
        return found
    before = marks(module)
    first = execute(module, run, keep_calls=True)
    if touched := changed(before, marks(module)):
        raise lost(
            touched, f"with tensor parallelism ({mesh.size()} ranks) each rank computes with a piece or a copy", who=who
        )
    _refuse_other_ranks(module, first, mesh, who=who)
    with exercised(module, first):
        del first
        check = Check(module, mesh, run)
        if hand is not None:
            more = norms(module, check.before, taken=hand) if sequence_parallel else []
            return _by_hand(module, sharder, [*hand, *more], check, who=who)
        heads = last_layers(module, check.before) if whole_heads else []
        return _found(module, sharder, check, sequence_parallel=sequence_parallel, heads=heads, who=who)


def same_random_numbers(mesh: DeviceMesh) -> None:
    """Copy the generator state of the first rank to all ranks of ``mesh``, on the CPU and on the mesh's device."""
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    states: list[Tensor | None] = [torch.get_rng_state(), None]
    if mesh.device_type == "cuda":
        states[1] = torch.cuda.get_rng_state()
    dist.broadcast_object_list(states, src=source, group=group)
    cpu, cuda = states
    assert cpu is not None
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)


def _refuse_other_ranks(module: nn.Module, first: Record, mesh: DeviceMesh, *, who: str) -> None:
    sums = {name: float(p.detach().double().sum()) for name, p in module.named_parameters() if not p.is_meta}
    everyone: list[tuple[float, dict[str, float]]] = [(first.loss, sums)] * mesh.size()
    dist.all_gather_object(everyone, (first.loss, sums), group=mesh.get_group())
    other = next((name for name in sums if len({of_rank.get(name) for _, of_rank in everyone}) > 1), None)
    if other is not None:
        raise ValueError(
            f"{who}: {other!r} differs between the ranks of one tensor-parallel group before the split. Set the same seed on"
            " all of them, or broadcast the module first."
        )
    losses = [loss for loss, _ in everyone]
    if not max(losses) - min(losses) <= 1e-5 * max(1.0, abs(losses[0])):
        raise ValueError(
            f"{who}: the ranks of one tensor-parallel group have different losses {losses} before the split, so their batches"
            " differ. Let the sampler split data only over the data-parallel ranks."
        )


class Check:
    """Runs a split module and compares it with the whole one.

    Attributes:
        before: the whole module's execution.
        errors: the effect of rounding on it.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, run: Callable[[], Tensor]) -> None:
        self.module, self.mesh, self.run = module, mesh, run
        self.before = execute(module, run, keep_calls=True)
        with jittered(module, rounding(self.before.dtype, mesh.device_type)):
            self.errors = noise(self.before, execute(module, run))

    def __call__(self, sharder: Sharder) -> Finding:
        """Return the first difference, equal on all ranks; an exception in the execution counts as one."""
        finding = self._run()
        if "modified inplace" in finding.message and not sharder.copies:  # code like ``x += layer(x)``
            sharder.copy_outputs()
            finding = self._run()
        return finding

    def _run(self) -> Finding:
        after, failure = Record(), Finding()
        try:
            after = execute(self.module, self.run)
        except Exception as error:
            failure = Finding(f"{type(error).__name__}: {error}", error.__dict__.get("inside", ""))
        findings: list[Finding] = [failure] * self.mesh.size()
        dist.all_gather_object(findings, failure, group=self.mesh.get_group())
        failed = next((finding for finding in findings if finding.message), None)
        return failed or compare(self.module, self.before, after, self.mesh, self.errors)


def _by_hand(
    module: nn.Module,
    sharder: Sharder,
    entries: list[Entry],
    check: Check | None,
    *,
    who: str,
) -> TensorPlan:
    first, notes = Finding(), []
    choices = divisions(module, check.before, entries, sharder.size) if check else [()]
    for attributes in choices:
        for entry in entries:
            try:
                sharder.apply(entry.path, entry.style)
            except ValueError as error:
                sharder.undo()
                raise ValueError(
                    f"{who}(tensor_parallel_plan=...): {error}. Give modules that share a weight styles that split it equally."
                ) from None
        _divide(module, sharder, attributes)
        sharder.finish()
        finding = Finding() if check is None else check(sharder)
        if not finding.message:
            if attributes:
                names = ", ".join(dict.fromkeys(f"{wildcard(path)}.{name}" for path, name in attributes))
                notes.append(f"divided by {sharder.size}: {names}")
            sharder.commit()
            return TensorPlan(module, sharder.mesh, _complete(module, entries), notes, check is not None)
        first = first if first.message else finding
        sharder.undo()
    raise ValueError(
        f"{who}(tensor_parallel_plan=...): the split module differs from the whole one: {first.message}. The first"
        f" difference is in {first.suspect or 'the loss'!r}. Correct the plan there (rowwise after"
        ' colwise; heads that divide; a weight that other code reads too), or use tensor_parallel_plan="auto".'
    )


def _complete(module: nn.Module, entries: list[Entry]) -> list[Entry]:
    named = {entry.path: entry for entry in entries}
    rest = [(path, part) for path, part in module.named_modules() if names_of(part)]
    return [named.get(path) or Entry(path, Style("replicate"), "not named") for path, _ in rest]


def _found(
    module: nn.Module,
    sharder: Sharder,
    check: Check | None,
    *,
    sequence_parallel: bool = False,
    heads: Sequence[str] = (),
    who: str,
) -> TensorPlan:
    """Combine the model's own plan, pairs that pass the check, and splits that are always right; record failures.

    ``heads`` are not split, even if the model's own plan splits them.
    """
    size, before = sharder.size, check.before if check else None
    whole = [Entry(path, Style("gather"), "its loss is computed with the whole weight") for path in heads]
    carried, refused = carried_plan(module, size)
    reasons: dict[str, dict[str, None]] = {}
    for path, why in refused.items():
        reasons.setdefault(why, {})[wildcard(path)] = None
    notes = [f"the model's own plan is not used for {', '.join(paths)}: {why}" for why, paths in reasons.items()]
    carried = [entry for entry in carried if entry.path not in heads]
    if check is not None and carried and (finding := _try(sharder, carried, (), check)).message:
        notes.append(f"the model's own plan given up: {finding.message} (at {finding.suspect or 'the loss'})")
        carried = []
    entries, attributes = _accept_pairs(module, sharder, [*carried, *whole], check, notes)
    if check is not None:
        trials = _alike(alone(module, size, check.before, taken=entries, read=True))
        if sequence_parallel:
            trials += _alike(norms(module, check.before, taken=entries))
        for trial in trials:
            finding = _try(sharder, [*entries, *trial], attributes, check)
            if not finding.message:
                entries += trial
            elif trial[0].style.name == "sequence_parallel":
                notes.append(f"{wildcard(trial[0].path)} is not sequence parallel: {finding.message.splitlines()[0]}")
    levels: list[tuple[str, list[Entry], Attributes]] = [
        ("all that proved right by itself", [*entries, *alone(module, size, before, taken=entries)], attributes),
        ("pairs", [*whole, *alone(module, size, before, taken=whole)], ()),
        ("splitting layers", [], ()),  # then all are read whole
        ("storage in parts", [], ()),
    ]
    for level, (what, chosen, divided) in enumerate(levels):
        applied = []
        for entry in chosen:
            try:
                sharder.apply(entry.path, entry.style)
                applied.append(entry)
            except ValueError as error:
                notes.append(str(error))
        _divide(module, sharder, divided)
        stored = storage(module, sharder) if level < len(levels) - 1 else []
        sharder.finish()
        finding = Finding() if check is None else check(sharder)
        if not finding.message:
            sharder.commit()
            return TensorPlan(module, sharder.mesh, _complete(module, [*applied, *stored]), notes, check is not None)
        notes.append(f"{what} given up: {finding.message} (at {finding.suspect or 'the loss'})")
        sharder.undo()
    raise ValueError(
        f"{who}(tensor_parallel_size={size}): no plan gives the whole module's loss and gradients: {'; '.join(notes)}."
        " Let training_step compute the same on all ranks from equal weights, batch and random numbers, give a"
        " tensor_parallel_plan, or use tensor_parallel_size=1."
    )


def _divide(module: nn.Module, sharder: Sharder, attributes: Attributes) -> None:
    for path, name in attributes:
        owner = module.get_submodule(path)
        sharder.set_attribute(owner, name, getattr(owner, name) // sharder.size)


def _try(sharder: Sharder, entries: list[Entry], attributes: Attributes, check: Check) -> Finding:
    """Return the first difference with only these entries, and undo them."""
    try:
        for entry in entries:
            sharder.apply(entry.path, entry.style)
        _divide(check.module, sharder, attributes)
        return check(sharder)
    except ValueError as error:
        return Finding(str(error))
    finally:
        sharder.undo()


def _accept_pairs(
    module: nn.Module, sharder: Sharder, carried: list[Entry], check: Check | None, notes: list[str]
) -> tuple[list[Entry], Attributes]:
    """Return ``carried`` and the pairs that pass the check, with the attributes that they divide."""
    entries, divided = list(carried), []
    if check is None:
        return entries, ()
    for group in pairs(module, check.before, sharder.size, taken=carried):
        finding = Finding("there is no way to try")
        for makes in zip(*(variants(module, pair, sharder.size) for pair in group.pairs), strict=True):
            new = [entry for make in makes for entry in make.entries()]
            attributes = [found for make in makes for found in make.attributes]
            finding = _try(sharder, [*entries, *new], (*divided, *attributes), check)
            if not finding.message:
                entries += new
                divided += attributes
                break
        if finding.message:
            one = group.pairs[0]
            names = ", ".join(wildcard(path) for path in one.cols)
            notes.append(
                f"{names} -> {wildcard(one.row)} is no pair that can be split: {finding.message.splitlines()[0]}"
            )
    return entries, tuple(divided)


def _alike(entries: list[Entry]) -> list[list[Entry]]:
    """Group entries at the same place in different layers."""
    groups: dict[tuple[str, Style], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((wildcard(entry.path), entry.style), []).append(entry)
    return list(groups.values())
