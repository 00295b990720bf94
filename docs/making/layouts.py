"""The page on which strategies each technique trains under, from what techniques and strategies declare."""

from collections import Counter
from typing import Any

from docs.making import prose
from lightning_eff._catalogue.strategies import LAYOUTS, reasons
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes

PAGE = "techniques/strategies.md"

_INTRO = """# Techniques and strategies

Each technique declares what it needs of a process, such as whole weights or single blocks. Each strategy declares how it
divides a run. This table follows from both, and so do the errors that a run raises at setup.

| column | strategy |
|---|---|
| DDP | a single device, `strategy="ddp"`, `CompressedDDPStrategy`, `HybridParallelStrategy(shard=False)` |
| FSDP2 | Lightning's `ModelParallelStrategy` without tensor parallelism; `configure_model` calls `fully_shard` |
| hybrid shard | `HybridParallelStrategy(shard=True)` |
| hybrid tp | `HybridParallelStrategy(tensor_parallel_size=2)` or more |
| hybrid pp | `HybridParallelStrategy(pipeline_parallel_size=2)` or more |
| DeepSpeed | Lightning's `DeepSpeedStrategy` and `DeepSpeedEffStrategy` |

Under FSDP2, a technique that changes the architecture is applied before the module divides itself:
`lightning_eff.apply(self, LoRA(rank=8))` in `configure_model`. The error says so.

A layout that combines several columns supports the techniques that all of them support. "✓" means that the technique works.
A number leads to the reason below the table. Tests run the FSDP2 and hybrid layouts of this table in two processes
(`tests/strategies/test_techniques.py`). Some settings of a technique need more than its default ones. The error says so.
"""


def line(cls: Any) -> str:
    """Return a technique's strategies in one line for its card, or "" for other classes."""
    found = reasons(cls)
    if not found:
        return ""
    yes = [layout for layout, why in found.items() if not why]
    no = [layout for layout, why in found.items() if why]
    but = f"; not under {', '.join(no)}" if no else ""
    return f"trains under {', '.join(yes)}{but}. [Why](strategies.md)"


def page() -> str:
    """Return the table, and the reasons for missing entries."""
    rows, numbers, counted = [], dict[str, int](), Counter[str]()
    names = {cls.__name__: reasons(cls) for cls in technique_classes() if reasons(cls)}
    for name, found in sorted(names.items()):
        cells = [f"[{name}]({public.HOMES[name].rpartition('.')[2]}.md)"]
        for layout, why in found.items():
            counted[layout] += not why
            cells.append("✓" if not why else f"[{numbers.setdefault(why, len(numbers) + 1)}](#reasons)")
        rows.append(f"| {' | '.join(cells)} |")
    total = [f"{counted[layout]} of {len(names)}" for layout in LAYOUTS]
    lines = [_INTRO, f"| technique | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}", *rows]
    lines += [f"| all | {' | '.join(total)} |", "", "## Reasons", ""]
    lines += [f"{number}. {prose.cell(why)}." for why, number in numbers.items()]
    return "\n".join([*lines, ""])
