"""``lightning-eff budget``: the best model size and number of tokens for FLOPs, accelerator-hours or money."""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_eff._cli.errors import Arguments, UsageError, check_configs, told
from lightning_eff.budget.compute_optimal import PUBLISHED, REFIT, check_amount

_STEPS = 6  # of a measurement; the first one counts FLOPs
_DESCRIPTION = """\
Print the size of a language model, and the number of training tokens, that give the lowest loss for a budget. The scaling law
is that of Hoffmann et al. 2022 with the fit of Besiroglu et al. 2024, at 6 FLOPs per parameter and token. The fit is for
transformers trained on web text for one epoch; for other tasks it is a first guess. With --config, the command measures the
module's FLOPs and its speed on this machine in a few steps, and prints the budget in its tokens and steps."""


def main(argv: Sequence[str], *, debug: bool = False) -> None:
    """Run the command on ``argv``, the arguments after ``budget``; ``debug`` lets every error through with its traceback.

    Raises:
        SystemExit: with status 2 if the arguments or the config are wrong, 1 if the measurement failed.
    """
    with told("lightning-eff budget", debug=debug):
        _run(argv)


def _arguments() -> Arguments:
    parser = Arguments("lightning-eff budget", description=_DESCRIPTION)
    amount = parser.add_argument_group("budget (choose one)")
    amount.add_argument("--flops", type=float, help="FLOPs of the whole training")
    amount.add_argument("--hours", type=float, help="accelerator-hours: 8 accelerators for one hour are 8")
    amount.add_argument("--money", type=float, help="amount of money, with --price-per-hour")
    parser.add_argument("--price-per-hour", type=float, help="of one accelerator, in the currency of --money")
    speed = parser.add_argument_group("speed of one accelerator, for --hours and --money (measured with --config)")
    speed.add_argument("--flops-per-second", type=float, help="FLOP/s that it reaches in training")
    speed.add_argument("--gpu", help="name in the planner's table, such as h100")
    speed.add_argument("--mfu", type=float, help="fraction of its BF16 peak that training reaches (default: 0.4)")
    parser.add_argument(
        "--config", action="append", default=[], help="LightningCLI config of a module; repeat the option to merge"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run(argv: Sequence[str]) -> None:
    check_configs(argv)
    options = _arguments().parse_args(list(argv))
    found = spend(options)
    print(json.dumps(found, indent=1) if options.json else text(found))


def spend(options: Any) -> dict[str, Any]:
    """Work out the best use of a budget from the parsed options.

    Raises:
        UsageError: if the options do not go together.
        ValueError: if an amount is out of range, the accelerator is unknown, or the module has no tokens.
    """
    given = [name for name in ("flops", "hours", "money") if getattr(options, name) is not None]
    if len(given) != 1:
        raise UsageError(
            f"got {' and '.join(f'--{name}' for name in given) or 'no budget'}; expected exactly one of --flops, --hours and"
            " --money. Pass, for example, --flops 1e21, or --hours 5000 --gpu h100."
        )
    for name, unit in (
        ("flops", "FLOPs"),
        ("hours", "accelerator-hours"),
        ("money", "an amount of money"),
        ("price-per-hour", "the price of an accelerator's hour"),
        ("flops-per-second", "FLOP/s of one accelerator"),
        ("mfu", "a fraction of the peak"),
    ):
        check_amount(name, getattr(options, name.replace("-", "_")), unit)
    if options.mfu is not None and options.mfu > 1:
        raise UsageError(f"--mfu {options.mfu:g}: expected a fraction of the peak in (0, 1], such as 0.4.")
    if options.mfu is not None and options.gpu is None:
        raise UsageError("--mfu: it needs an accelerator. Add --gpu, such as --gpu h100.")
    if options.gpu is not None and options.flops_per_second is not None:
        raise UsageError(
            "got --gpu and --flops-per-second, which both set the accelerator's speed. Pass only one of them."
        )
    if (options.money is None) != (options.price_per_hour is None):
        raise UsageError("--money needs --price-per-hour. Pass both, such as --money 10000 --price-per-hour 2.5.")
    if options.flops is None and not options.config and options.gpu is None and options.flops_per_second is None:
        raise UsageError(
            f"--{given[0]}: the speed of the accelerator is unknown. Add --gpu NAME, --flops-per-second, or the --config of a"
            " module to measure on this machine."
        )
    module = measured(options.config) if options.config else None
    rate, source = _rate(options, module)
    hours = options.hours if options.money is None else options.money / options.price_per_hour
    if options.flops is None:
        assert rate is not None
    flops = options.flops if options.flops is not None else hours * 3600 * rate
    if hours is None and rate is not None:
        hours = flops / rate / 3600
    fits = {}
    for name, fit in (("refit", REFIT), ("published", PUBLISHED)):
        size, tokens = fit.best(flops)
        fits[name] = {
            "parameters": size,
            "tokens": tokens,
            "tokens_per_parameter": tokens / size,
            "loss": fit.loss(size, tokens),
            "source": fit.source,
        }
    found = {"flops": flops, "hours": hours, "flops_per_second": rate, "speed_source": source, "best": fits}
    return {**found, "module": None if module is None else _of_module(module, flops)}


def _rate(options: Any, module: dict[str, Any] | None) -> tuple[float | None, str | None]:
    """Return the FLOP/s of one accelerator and their source."""
    if options.flops_per_second is not None:
        return options.flops_per_second, "given"
    if options.gpu is not None:
        from lightning_eff.planner.accelerators import find_accelerator

        mfu = 0.4 if options.mfu is None else options.mfu
        accelerator = find_accelerator(options.gpu)
        return accelerator.peak_flops * mfu, f"{mfu:.0%} of the BF16 peak of {accelerator.name}"
    if module is not None:
        return module["flops_per_second"], "measured on this machine with the module"
    return None, None


def measured(configs: Sequence[str]) -> dict[str, Any]:
    """Measure the FLOPs per token and the speed of the configs' module in a few training steps on this machine.

    Raises:
        ValueError: if the data has no tokens, or FLOPs cannot be counted.
    """
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from lightning_eff._core._lightning.names import like
    from lightning_eff._core.batches import num_tokens
    from lightning_eff.monitor.efficiency_monitor import EfficiencyMonitor
    from lightning_eff.planner.recipe import read_recipe

    recipe = read_recipe(configs, real=True)
    tokens = num_tokens(recipe.batch)
    name = type(recipe.module).__name__
    if not tokens:
        raise ValueError(
            f"--config: the batch of {name}, a {type(recipe.batch).__name__}, has no tokens, so the law for language models"
            " does not apply. Use a batch that contains a 2-D integer tensor, or remove --config."
        )
    seen = EfficiencyMonitor(activations=False)
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = like(recipe.module, Trainer)(
        max_steps=_STEPS, precision=recipe.precision, devices=1, callbacks=[seen], limit_val_batches=0, **quiet
    )
    batches: Any = [recipe.batch] * _STEPS
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(recipe.module, DataLoader(batches, batch_size=None))
    told = seen.summary()
    if told["flops_unknown"] is not None or not told["flops_batches"] or told["flops_per_second"] is None:
        why = told["flops_unknown"] or "no step was timed"
        raise ValueError(
            f"--config: the FLOPs of {name} cannot be counted: {why}. Use a module that is not compiled, or replace --config"
            " by --flops-per-second."
        )
    return {
        "name": name,
        "parameters": sum(p.numel() for p in recipe.module.parameters()),
        "flops_per_token": told["flops"] / told["flops_batches"] / tokens,
        "flops_per_second": told["flops_per_second"],
        "tokens_per_second": told["tokens_per_second"],
        "tokens_per_step": tokens * recipe.accumulate,
    }


def _of_module(module: dict[str, Any], flops: float) -> dict[str, Any]:
    """Express the budget in tokens and steps of the module at its present size."""
    size, tokens = module["parameters"], flops / module["flops_per_token"]
    best = REFIT.loss(*REFIT.best(flops))
    return {
        **module,
        "flops_per_parameter_and_token": module["flops_per_token"] / size,
        "tokens": tokens,
        "steps": tokens / module["tokens_per_step"],
        "tokens_per_parameter": tokens / size,
        "loss_above_best": REFIT.loss(size, tokens) - best,
    }


def text(found: dict[str, Any]) -> str:
    """Format the result of :func:`spend` for people."""
    refit, published, module = found["best"]["refit"], found["best"]["published"], found["module"]
    lines = [f"A budget of {found['flops']:.3g} FLOPs"]
    if found["hours"] is not None:
        rate = f"{found['flops_per_second'] / 1e12:,.3g} TFLOP/s ({found['speed_source']})"
        lines[0] += f", {found['hours']:,.4g} accelerator-hours at {rate}"
    lines += [
        "",
        f"  best size       {_count(refit['parameters'])} parameters and {_count(refit['tokens'])} tokens,"
        f" {refit['tokens_per_parameter']:.3g} tokens per parameter",
        f"  source          {refit['source']}; 6 FLOPs per parameter and token",
        f"  not             {_count(published['parameters'])} and {_count(published['tokens'])}"
        f" ({published['tokens_per_parameter']:.3g} per parameter), from the published constants. Their exponents are rounded"
        " to two digits, and contradict the paper's own 70B model on 1.4T tokens",
    ]
    if module is not None:
        larger = module["parameters"] / refit["parameters"]
        lines += [
            "",
            f"  {module['name']} has {_count(module['parameters'])} parameters, {larger:.3g} times the best size. It needs"
            f" {module['flops_per_token']:,.4g} FLOPs per token ({module['flops_per_parameter_and_token']:.3g} per parameter),"
            " measured",
            f"  its budget      {_count(module['tokens'])} tokens, {module['steps']:,.0f} steps of"
            f" {module['tokens_per_step']:,}, {module['tokens_per_parameter']:.3g} tokens per parameter",
            f"  its loss        {module['loss_above_best']:.3g} above that of the best size, by the same law"
            f" (measured speed: {module['tokens_per_second']:,.0f} tokens/s on one device)",
        ]
    return "\n".join(lines)


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


if __name__ == "__main__":
    main(sys.argv[1:])
