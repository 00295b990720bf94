"""When an optimizer's gradients are complete, and when its step is over, whoever calls backward and step."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_eff._core.session import Session
from lightning_eff._core.steps import looking

Turn = Callable[[Optimizer], None]


def before_clipping(session: Session, fn: Turn) -> None:
    """Call ``fn`` before gradients are clipped, once they are summed over micro-batches and ranks."""
    clip = session.module.configure_gradient_clipping

    @functools.wraps(clip)
    def configure_gradient_clipping(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        fn(optimizer)
        clip(optimizer, *args, **kwargs)

    session.patches.set(session.module, "configure_gradient_clipping", configure_gradient_clipping)


def around_steps(
    session: Session,
    before: Turn,
    after: Turn,
    *,
    backward: Callable[[], None] | None = None,
    skipped: Turn | None = None,
) -> list[RemovableHandle]:
    """Call ``before`` once the gradients of a step are complete, and ``after`` when the step is over, with its optimizer.

    Under automatic optimization, ``before`` is called before clipping. Under manual optimization, it is called once per step:
    before the first ``clip_gradients`` with this optimizer, or without one when the optimizer steps. ``backward`` is then
    also called after each ``manual_backward``, because a module may clip gradients itself, and ``skipped`` instead of
    ``after`` if a gradient scaler skips the step.
    """
    if session.module.automatic_optimization:
        before_clipping(session, before)
        return [o.register_step_post_hook(lambda o, *_: after(o)) for o in session.optimizers]
    module, strategy, complete = session.module, session.trainer.strategy, set[int]()

    def begin(optimizer: Optimizer) -> None:
        if not looking() and id(optimizer) not in complete:
            complete.add(id(optimizer))
            before(optimizer)

    def starting(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        itself, *given = args
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            begin(optimizer)
            return None

        def closed() -> Any:  # the closure may call backward
            output = closure()
            begin(optimizer)
            return output

        return ((itself, closed, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": closed})

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        complete.discard(id(optimizer))
        after(optimizer)

    clip, step, manual = module.clip_gradients, strategy.optimizer_step, module.manual_backward

    @functools.wraps(clip)
    def clip_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        begin(getattr(optimizer, "_optimizer", optimizer))
        clip(optimizer, *args, **kwargs)

    @functools.wraps(step)
    def optimizer_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(optimizer, *args, **kwargs)
        finally:
            if id(optimizer) in complete:
                complete.discard(id(optimizer))
                if skipped is not None:
                    skipped(optimizer)

    @functools.wraps(manual)
    def manual_backward(*args: Any, **kwargs: Any) -> None:
        manual(*args, **kwargs)
        if backward is not None:
            backward()

    session.patches.set(module, "clip_gradients", clip_gradients)
    session.patches.set(strategy, "optimizer_step", optimizer_step)
    session.patches.set(module, "manual_backward", manual_backward)
    pre = [o.register_step_pre_hook(starting) for o in session.optimizers]
    return [*pre, *(o.register_step_post_hook(stepped) for o in session.optimizers)]
