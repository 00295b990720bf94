"""The interface for techniques that change the loss calls in one pass of an unchanged ``training_step``.

It observes calls of the loss functions of ``torch.nn.functional`` (:data:`~lightning_eff._core.losses.LOSSES`), under any
name or from any module, whose targets come from the batch's labels. It cannot observe losses in a compiled module, in a custom
autograd function, or written by hand. If the step's loss comes from no observed call, or labels are combined with the
network's output in another operation, an error is raised.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_eff._core._targets.calls import Change, TargetCall
from lightning_eff._core._targets.followed import can_follow
from lightning_eff._core._targets.leaks import Leaks, Level, depends_on_labels, leaked, rolled
from lightning_eff._core._targets.passing import Window
from lightning_eff._core._targets.seen import none_seen, not_of_them
from lightning_eff._core.batches import first_opaque, lies_at, map_tensors, num_samples, sample_of, tensors
from lightning_eff._core.losses import LossNotVisible, loss_of
from lightning_eff._core.session import Session
from lightning_eff._core.steps import Proceed, Step


class Targets:
    """The labels of a run's batches, and the loss calls that use them as targets.

    A technique creates one in ``attach`` and uses it in a link of stage ``TRANSFORM`` or ``REWEIGHT``::

        def attach(self, session):
            self._targets = Targets(session, who=type(self).__name__, labels=self.labels)
            session.chain.add(Stage.TRANSFORM, self._link)

        def _link(self, step, batch, proceed):
            labels = self._targets.labels(step, batch)
            mirrored = {path: y.flip(0) for path, y in labels.items()}
            return self._targets.run(step, batch, proceed, mixed(0.7, 0.3), others=mirrored)

    Nothing is patched outside of :meth:`run`, and validation is not affected. The calls stay changed until the end of the
    step's backward pass, for recomputation by gradient checkpointing.

    Args:
        session: the run.
        who: the technique's name, for messages.
        labels: names or positions of the labels in the batch, if they cannot be found automatically.
        scored: also change loss calls, with or without a gradient, of techniques that observe samples' losses within
            :meth:`run`. They must see the losses that are trained on.
        alone: refuse steps whose loss depends on the labels in other ways. ``"loss"`` refuses uses outside the loss calls, as
            in a contrastive term. ``"step"`` also refuses uses in their inputs, as in an embedding of classes. It is for
            techniques that give samples other labels, and checks again on a later batch.
        entrances: returns the modules whose outputs are mixed, and with them labels that are also the network's input.

    Attributes:
        compared: whether a training pass compared labels with other tensors outside of its loss, as a metric does.
        changed: the names of the loss functions whose calls were changed.
        functions: by path, the loss functions whose calls had tensors of the batch as targets.
    """

    def __init__(
        self,
        session: Session,
        who: str,
        labels: Sequence[str | int] | None = None,
        *,
        scored: bool = False,
        alone: Literal["loss", "step"] | None = None,
        entrances: Callable[[nn.Module], list[nn.Module]] | None = None,
    ) -> None:
        self.session = session
        self.alone = alone
        self.entrances = entrances
        self._doubtful = False  # whether labels may affect the loss in another way
        self._looked_at = -1  # the step in which that was checked
        self.scored = scored
        self.compared = False
        self.changed: set[str] = set()
        self.functions: dict[str, set[str]] = {}
        self.who = who
        self.named = labels
        self._window: Window | None = None  # the last pass
        self._paths: list[str] | None = None
        #: whether all ranks have run a pass whose loss is known to come from the calls on labels
        self.checked = False
        self._by_class = False  # whether labels can be followed by their class, known after the first pass

    def labels(self, step: Step, batch: Any) -> dict[str, Tensor]:
        """Return the batch's labels by path: tensors that are targets of the step's loss calls, unchanged or converted.

        The first call runs the step forward once, without a trace, to find them. They are those that the user names, or the
        only tensor of the batch that becomes a target, or those that only become targets of ``F.cross_entropy`` or
        ``F.nll_loss``. While the step has skipped every batch (it returned None), there are none.

        Raises:
            LossNotVisible: on all ranks, if no loss call has a target from the batch.
            ValueError: on all ranks, if the labels are ambiguous.
        """
        if self._paths is None:
            paths, problem = None, None
            try:
                paths = self._look(step, batch)
                if paths and self.alone is not None:
                    self._look_alone(step, batch, paths)
            except ValueError as error:
                problem = error
            every = self._agree(problem, paths is not None, self._doubtful)
            self._doubtful, self._looked_at = any(doubtful for _, doubtful in every), step.global_step
            if not all(ready for ready, _ in every):
                return {}
            self._paths = paths or []
            rank_zero_info(f"{self.who}: labels found at {', '.join(p or 'the batch itself' for p in self._paths)}")
        named = dict(tensors(batch))
        missing = [path for path in self._paths if path not in named]
        if missing:
            raise ValueError(
                f"{self.who}: batch {step.batch_idx} has no labels at {missing}, unlike the first batch;"
                f" it holds {', '.join(named) or 'no tensors'}. Give all batches the same structure in the loader."
            )
        if self._doubtful and step.global_step > self._looked_at and step.global_step.bit_count() == 1:
            self._look_again(step, batch)
        return {path: named[path] for path in self._paths}

    def seen(self, step: Step, batch: Any) -> list[TargetCall]:
        """Return the loss calls on the batch's labels in one forward pass, in order, without a graph or a trace."""
        held = list(self.labels(step, batch).items())
        return [call for call, _ in self._forward_only(step, batch, held)[0].made] if held else []

    def run(
        self,
        step: Step,
        batch: Any,
        proceed: Proceed,
        change: Change,
        others: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
    ) -> Any:
        """Run ``proceed(batch)`` with each loss call on the batch's labels replaced by ``change(call)``.

        Args:
            step: the link's step.
            batch: the batch for the rest of the chain, with labels where :meth:`labels` found them.
            proceed: the link's ``proceed``.
            change: returns the result of a call; see :func:`~lightning_eff._core._targets.calls.mixed`, ``soft`` and
                ``weighted``. It is called for each loss call in each pass, and must not draw global random numbers.
            others: by path, other labels in the shape of the batch's. The targets computed from them are in ``call.others``.
                Labels without others are only followed if ``others`` is None.

        Raises:
            LossNotVisible: if the step returned a loss, and no observed call has its target from the labels. In the first step,
                also if the loss does not come from the changed calls, or not only from them.
        """
        named = self.labels(step, batch)
        if others is not None:
            named = {path: tensor for path, tensor in named.items() if path in others}
        window = Window(change, {path: tensor.shape for path, tensor in named.items()}, scored=self.scored)
        window.samples = sample_of(batch, num_samples(batch))
        window.follower.by_class = self._by_class and not self.session.divided and can_follow(named.values())
        for path, tensor in named.items():
            beside = [] if others is None else others[path]
            beside = [beside] if isinstance(beside, Tensor) else list(beside)
            for other in beside:
                if other.shape != tensor.shape:
                    raise ValueError(
                        f"{self.who}: got other labels of shape {tuple(other.shape)} for {path}; expected that of the"
                        f" batch's, {tuple(tensor.shape)}."
                    )
            window.follower.begin(path, tensor, beside)
        if self._window is not None:  # SAM's first pass stays to the step's end, and would change this pass's calls too
            self._window.over = True
        self._window = window
        wrong: list[str] = []

        def see(output: Any) -> None:
            if not self.checked and (loss := loss_of(output)) is not None and window.made:
                wrong.extend(filter(None, [not_of_them(window, loss)]))

        step.seen.append(see)
        if others and self.session.divided:
            window.factors = self._factors(batch, others)
        window.__enter__()
        try:
            output = proceed(batch)
            if not self.session.divided:
                see(output)
            self._check(step, window, loss_of(output), wrong)
            self._by_class = self.checked and not (window.foreign or window.follower.foreign)
            self.compared |= window.learning and (window.follower.compared or bool(window.still))
            self.changed.update(call.fn.__name__ for call, _ in window.made)
        except BaseException:
            _leave(window)
            raise
        if window.learning:  # gradient checkpointing recomputes losses in the backward pass
            self.session.when_step_ends(lambda: _leave(window))
        else:
            _leave(window)
        return output

    def _factors(self, batch: Any, others: Mapping[str, Tensor | Sequence[Tensor]]) -> Callable[[], tuple[float, ...]]:
        """Return the factors of a pipeline's micro-batches, if other samples' labels change which elements are ignored."""
        session, held = self.session, dict(tensors(batch))
        beside = {path: [found] if isinstance(found, Tensor) else list(found) for path, found in others.items()}
        every = [session.weights_of_parts(batch)]
        for labels in zip(*beside.values(), strict=True):
            by = {id(held[path]): y for path, y in zip(beside, labels, strict=True)}
            every.append(session.weights_of_parts(map_tensors(batch, lambda t, by=by: by.get(id(t), t))))
        session.weigh_parts(evenly=any(weights != every[0] for weights in every))
        if all(weights == every[0] for weights in every):
            return tuple
        number = next(len(weights) for weights in every if weights is not None)
        return lambda: tuple(1.0 if w is None else number * w[session.part[0]] for w in every)

    # -- the first batch

    def _look(self, step: Step, batch: Any) -> list[str] | None:
        """Return the paths of the labels, or None if the step skips this batch."""
        held = [(path, tensor) for path, tensor in tensors(batch) if tensor.ndim > 0]
        window, output = self._forward_only(step, batch, held)
        found: dict[str, list[TargetCall]] = {}
        for call, _ in window.made:
            found.setdefault(call.label, []).append(call)
        elsewhere = window.elsewhere
        self.functions = {path: {call.fn.__name__ for call in calls} for path, calls in found.items()}
        if not found and loss_of(output) is None:
            return None
        if self.named is not None:
            chosen = [path for path in found if any(lies_at(path, key) for key in self.named)]
            missing = [key for key in self.named if not any(lies_at(path, key) for path in found)]
            if missing:
                there = ", ".join(path or "one tensor" for path, _ in held) or "no tensors"
                raise ValueError(
                    f"{self.who}(labels={list(self.named)}): {missing} became no target of a loss call. Tensors that did:"
                    f" {_listed(found) or 'none'}. The batch holds {there}."
                )
            return chosen
        if not found:
            raise LossNotVisible(f"{self.who}: {none_seen(elsewhere, [], step.module, first_opaque(batch))}")
        if len(found) == 1:
            return list(found)
        classes = [path for path, calls in found.items() if all(call.of_classes for call in calls)]
        if classes:
            return classes
        raise ValueError(
            f"{self.who}: several tensors of the batch became targets of loss calls: {_listed(found)}; expected one, or"
            " one of classes. Name those that are the labels by labels=, such as labels=['labels'] or labels=[1]."
        )

    def _look_alone(self, step: Step, batch: Any, paths: Sequence[str]) -> None:
        """Check that labels reach the loss only as targets.

        Labels that pass through :attr:`entrances` are also the network's input, so other labels would be another input.

        Raises:
            LossNotVisible: if they do not.
        """
        named = dict(tensors(batch))
        leaks = Leaks(through_inputs=self.alone == "step")
        handles = [] if self.entrances is None else leaks.entering(self.entrances(step.module))
        try:
            _, output = self._forward_only(step, batch, [(path, named[path]) for path in paths], leaks=leaks)
        finally:
            for handle in handles:
                handle.remove()
        leak, listed = leaks.of(loss_of(output)), ", ".join(path or "in the batch" for path in paths)
        # a loss term of the network itself, such as a router's
        read = self.alone == "loss" and leak.entry and leaks.fed
        if leak.level is Level.VALUE and not read:
            raise LossNotVisible(leaked(self.who, listed, leak.name))
        if self.alone == "step" and not leaks.entered:
            moved = self._moves(step, batch, paths)
            if moved:
                raise LossNotVisible(leaked(self.who, listed, leak.name))
            self._doubtful = moved is None or leaks.escaped or leak.level is Level.MASK

    def reaching(self, step: Step, batch: Any, paths: Sequence[str]) -> list[str]:
        """Return those of ``paths`` on which the step's loss depends, by a forward pass for each that leaves no trace.

        Tensors that are the same for all samples are not included, because exchanging them between samples changes nothing.
        """
        named, found = dict(tensors(batch)), list[str]()
        for path in paths:
            if rolled({path: named[path]}) is None:
                continue
            leaks = Leaks(through_inputs=True)
            window, output = self._forward_only(step, batch, [(path, named[path])], leaks=leaks)
            if loss_of(output) is None:
                continue
            if leaks.of(loss_of(output)).level or window.targeted or self._moves(step, batch, [path]):
                found.append(path)
        return found

    def _look_again(self, step: Step, batch: Any) -> None:
        """Check the values of another batch, because in the first one samples or outputs may have been equal."""
        paths, self._looked_at = self._paths or [], step.global_step
        moved = self._moves(step, batch, paths)
        listed = ", ".join(path or "in the batch" for path in paths)
        self._agree(LossNotVisible(leaked(self.who, listed, None)) if moved else None)

    def _moves(self, step: Step, batch: Any, paths: Sequence[str]) -> bool | None:
        """Return whether the loss changes when samples get other labels while its targets stay; None if unknown."""
        named = dict(tensors(batch))
        labels = {path: named[path] for path in paths if path in named}
        others = rolled(labels)
        if others is None:
            return None
        by = {id(y): others[path] for path, y in labels.items()}
        other = map_tensors(batch, lambda t: by.get(id(t), t))
        now = dict(tensors(other))

        def run(moved: bool) -> Tensor | None:
            held = [(path, now[path] if moved else y) for path, y in labels.items()]
            beside = {path: [y] for path, y in labels.items()} if moved else {}
            return loss_of(self._forward_only(step, other if moved else batch, held, beside=beside)[1])

        return depends_on_labels(run)

    def _forward_only(
        self,
        step: Step,
        batch: Any,
        held: Sequence[tuple[str, Tensor]],
        *,
        leaks: Leaks | None = None,
        beside: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> tuple[Window, Any]:
        """Run the user's step unchanged, and return the observed uses of the tensors ``held``, and its output.

        With labels ``beside`` those held, by path, loss calls get the targets that these give.
        """
        window = Window(_beside if beside else TargetCall.plain, {path: tensor.shape for path, tensor in held})
        window.samples = sample_of(batch, num_samples(batch))
        window.leaks = leaks
        for path, tensor in held:
            window.follower.begin(path, tensor, beside.get(path, ()) if beside else ())

        def around(run: Proceed, batch: Any) -> Any:
            window.learning, window.looks = False, True
            with window:
                return run(batch)

        output = step.forward_only(batch, num_samples(batch), around, transform=False)
        window.targeted = bool(window.made)
        window.follower.clear()
        return window, output

    def _agree(self, problem: ValueError | None, *values: Any) -> list[tuple[Any, ...]]:
        """Raise the error of any rank on all ranks, so that none waits for another; return the ``values`` of each rank."""
        told = None if problem is None else (isinstance(problem, LossNotVisible), str(problem))
        every = self.session.replicas.everyone((told, values))
        if problem is not None:
            raise problem
        for rank, (one, _) in enumerate(every):
            if one is not None:
                raise (LossNotVisible if one[0] else ValueError)(f"On rank {rank}: {one[1]}")
        return [values for _, values in every]

    # -- every batch

    def _check(self, step: Step, window: Window, loss: Tensor | None, wrong: list[str]) -> None:
        if not window.learning:
            return
        problem = None
        if loss is not None and not window.made and self.session.sees_loss:
            alone = window.follower.by_class
            problem = LossNotVisible(
                f"{self.who}: {none_seen(window.elsewhere, window.still, step.module, on_labels=alone)}"
            )
        elif wrong:
            problem = LossNotVisible(f"{self.who}: {wrong[0]}")
        if not self.checked:
            self.checked = all(ready for (ready,) in self._agree(problem, loss is not None))
        elif problem is not None:
            raise problem


def _beside(call: TargetCall) -> Tensor:
    return call.fn(**{**call.arguments, "target": call.others[0]})


def _leave(window: Window) -> None:
    window.__exit__(None, None, None)
    window.follower.clear()
    window.made.clear()


def _listed(found: Mapping[str, Sequence[TargetCall]]) -> str:
    return ", ".join(f"{path or 'the batch itself'} (F.{calls[0].fn.__name__})" for path, calls in found.items())
