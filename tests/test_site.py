"""The site: a card for each technique whose figures are the results', pages whose code is right, and a build without a slip."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import callbacks
from torch.optim import Optimizer

import lightning_eff
from benchmarks import evidence_page as evidence
from docs.making import cards, choices, facts, pages, picture, prose
from lightning_eff._exports import public
from lightning_eff._exports.techniques import technique_classes

ROOT = Path(__file__).parent.parent
WRITTEN = {"README.md": (ROOT / "README.md").read_text()} | {
    name: text for name, text in pages.written().items() if name not in ("ways_in.md",)
}
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> Iterator[str]:
    for _, found, body in BLOCK.findall(text):
        if found == language:
            yield textwrap.dedent(body)


def every(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{name}-{i}")
        for name, text in WRITTEN.items()
        for i, block in enumerate(blocks(text, language))
    ]


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """The pages that are made, once for all tests of this file."""
    return pages.generated()


# -- cards


def test_every_public_technique_has_a_card(made: dict[str, str]) -> None:
    optimizers = {
        n for n in lightning_eff.__all__ if inspect.isclass(c := public.found(n)) and issubclass(c, Optimizer)
    }
    names = {cls.__name__ for cls in technique_classes()} | optimizers
    assert cards.names() == sorted(names)
    files = [cards.file_of(name) for name in names]
    assert len(set(files)) == len(files) and set(files) <= made.keys()
    overview = made["techniques/index.md"]
    assert all(f"[{name}]({Path(cards.file_of(name)).name})" in overview for name in names)


def test_a_card_has_its_parts(made: dict[str, str]) -> None:
    for name in cards.names():
        text = made[cards.file_of(name)]
        assert text.startswith(f"# {name}\n")
        parts = ["When to use it", "How to use it", "Cost and measured gain", "Works with", "References"]
        assert [part for part in re.findall(r"\n## (.+)", text) if part in parts] == parts, name
        cls = public.found(name)
        assert getattr(cls, "constraints", "")[1:] in text and getattr(cls, "paper", "") in text
        assert not re.search(r":(class|func|meth|attr):`", text), name


def figures(text: str) -> set[str]:
    """Speed-ups with their intervals, as pages have them."""
    return set(re.findall(r"\d+\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", text))


def test_the_figures_of_a_card_are_those_of_the_results(made: dict[str, str]) -> None:
    """Told from the committed results themselves, not by what writes cards: every figure of a technique, and no other."""
    seen = 0
    for name in cards.names():
        wanted = set()
        for recipe, _, _, results in facts.measurements(name):
            arms = [arm["name"] for arm in results["plan"]["arms"] if arm.get("of") == recipe or arm["name"] == recipe]
            for arm in arms:
                speed = results["summary"][arm]["speedup"]
                if speed is not None:
                    wanted.add(f"{speed['estimate']:.2f} [{speed['low']:.2f}, {speed['high']:.2f}]")
        section = made[cards.file_of(name)].partition("## Cost and measured gain")[2].partition("\n## ")[0]
        assert figures(section) == wanted, name
        assert bool(wanted) != (cards.UNMEASURED in section), name
        seen += len(wanted)
    assert seen > 50


def test_advice_follows_the_results(made: dict[str, str]) -> None:
    """It names the tasks where the results show a gain or a loss, by the best settings of each task."""
    names = {"faster": "Faster", "slower": "Slower", "undecided": "Undecided"}
    for name in cards.names():
        advice = made[cards.file_of(name)].partition("## When to use it\n")[2].partition("\n## ")[0]
        best: dict[str, tuple[float, str]] = {}
        for recipe, task, _, results in facts.measurements(name):
            one = results["summary"][recipe]
            if one["speedup"] is not None:
                said = one["verdict"].replace("no measurable difference", "undecided")
                best[task] = max(best.get(task, (0.0, "")), (one["speedup"]["estimate"], said))
        for verdict, words in names.items():
            lines = re.findall(rf"- {words} here, with its best settings, on: (.*)\.", advice)
            wanted = {evidence.SHORT[task] for task, (_, said) in best.items() if said == verdict}
            assert sorted(lines) == (
                [", ".join(t for t in map(evidence.SHORT.get, best) if t in wanted)] if wanted else []
            )


def test_the_table_has_a_line_for_each_technique_and_knows_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert choices.choices().keys() == set(cards.names()), "a technique needs its line in docs/making/choices.txt"
    line = "Muon | any | time | more | training | recommended | It gains."
    monkeypatch.setattr(choices, "FILE", tmp_path / "choices.txt")
    for text, error in (
        (line.replace("more", "dear"), "Muon: 'dear' is unknown"),
        (f"{line}\n{line}", "Muon has two lines"),
        (line.removesuffix(" | It gains."), "expected 7 columns, found 6"),
    ):
        choices.FILE.write_text(f"[Optimizers]\n{text}\n")
        with pytest.raises(ValueError, match=error):
            choices.choices.__wrapped__()


def test_yaml_on_a_card_has_the_settings_of_its_python(made: dict[str, str]) -> None:
    """Of every example whose arguments a config can have, and each is one that the class takes."""
    same = 0
    for name in cards.names():
        text = made[cards.file_of(name)]
        (config,) = blocks(text, "yaml")
        given = [init for path, init in named(yaml.safe_load(config)) if path.rpartition(".")[2] == name]
        for init in given:
            inspect.signature(public.found(name)).bind_partial(**init)
        for code in blocks(text, "python"):
            calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
            own = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == name]
            words = {word.arg: ast.unparse(word.value) for node in own[:1] for word in node.keywords}
            if (
                own
                and not own[0].args
                and all(re.fullmatch(r"[\d.]+|'\w+'|True|False", word) for word in words.values())
            ):
                assert {key: repr(value) for key, value in given[0].items()} == words, name
                same += 1
    assert same > 20


def test_what_refuses_what_is_on_both_cards(made: dict[str, str]) -> None:
    for pair, why in cards.refused().items():
        if why != "a trainer has one precision plugin" and pair <= set(cards.names()):
            one, other = sorted(pair)
            assert f"[{other}](" in made[cards.file_of(one)] and f"[{one}](" in made[cards.file_of(other)]


def test_the_picture_is_what_the_results_say() -> None:
    """Else run ``python -m docs.making facts``."""
    assert picture.FILE.read_text() == picture.svg()


def test_the_tables_of_verdicts_are_what_the_results_say() -> None:
    """Else run ``python -m docs.making facts``."""
    text = choices.VERDICTS.read_text()
    assert text == choices.verdicts(text)
    shown = facts.measurements("Muon")[0][3]["summary"]["muon"]["speedup"]
    assert f"| `Muon` | **{shown['estimate']:.2f}** [{shown['low']:.2f}, {shown['high']:.2f}] |" in text


def test_what_has_no_figure_has_a_reason() -> None:
    """And no other technique has one; a reason that names a study tells its verdicts as its results say them."""
    assert set(choices.reasons()) == {name for name in choices.choices() if not facts.measurements(name)}
    assert all(name in (ROOT / "docs" / "verdicts.md").read_text() for name in choices.reasons())
    told = {"selection": {"slower"}, "augmentation": {"slower", "no measurable difference"}}
    for study, verdicts in told.items():
        names = [name for name, reason in choices.reasons().items() if f"benchmarks/{study}.md" in reason]
        rows = (ROOT / "benchmarks" / f"{study}.md").read_text().splitlines()
        for name in names:
            arm = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("rholoss", "rho_loss")
            own = [row.split(" | ") for row in rows if row.startswith(f"| `{arm}` |")]
            assert len(own) == 2 and {row[8] for row in own} <= verdicts, name
        assert names


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


# -- pages


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["title"], cited["version"], cited["license"]) == (
        "lightning_eff",
        project["version"],
        project["license"],
    )


def test_the_workflow_runs_what_a_change_has_to_pass() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_a_link_out_of_the_site_becomes_a_path_and_others_stay() -> None:
    text = "[a](memory.md#x) [b](../README.md) [c](https://x.org) [d](#e) ![f](no.png) [`g`](../h.py)"
    assert pages.linked("ways_in.md", text, {"memory.md"}) == (
        "[a](memory.md#x) b (`README.md` in the repository) [c](https://x.org) [d](#e) ![f](no.png) `g`"
    )
    assert pages.linked("how/a.md", "[m](../memory.md)", {"memory.md"}) == "[m](../memory.md)"


def test_every_page_of_the_menu_is_there(made: dict[str, str]) -> None:
    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from files(value)
        else:
            for one in entry:
                yield from files(one)

    menu = list(files(pages.navigation()))
    assert set(menu) <= made.keys() | pages.written().keys()
    assert len(set(menu)) == len(menu)
    assert made.keys() | pages.written().keys() == set(menu), "a page that no menu leads to"


def test_links_among_pages_lead_somewhere(made: dict[str, str]) -> None:
    """As the strict build would find, in a second; of README and CONTRIBUTING too, in the repository."""
    known = made.keys() | pages.written().keys()
    for page, text in {**made, **pages.written()}.items():
        for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)\s#:]+\.md)[^)]*\)", pages.linked(page, text, set(known))):
            there = (Path("/") / Path(page).parent / target).resolve().relative_to("/").as_posix()
            assert there in known, f"{page}: {target}"
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)\s#]+)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"


# -- code in the pages


@pytest.mark.parametrize("code", every("python"))
def test_python_in_a_page_names_what_there_is(code: str) -> None:
    """It parses; what it imports from the package exists; calls of classes have arguments that they take."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_eff"):
            home = importlib.import_module(node.module or "")
            assert all(hasattr(home, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in lightning_eff.__all__:
            inspect.signature(public.found(node.func.id)).bind(
                *(None for _ in node.args), **{word.arg: None for word in node.keywords if word.arg}
            )


def named(entry: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every class that a config names, with its arguments."""
    if isinstance(entry, dict):
        if "class_path" in entry:
            yield entry["class_path"], entry.get("init_args", {})
        for value in entry.values():
            yield from named(value)
    elif isinstance(entry, list):
        for one in entry:
            yield from named(one)


def of_path(path: str) -> Any:
    if "." not in path:
        return public.found(path) if path in public.HOMES else getattr(callbacks, path)
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


@pytest.mark.parametrize("text", every("yaml"))
def test_yaml_in_a_page_names_what_there_is(text: str) -> None:
    for path, given in named(yaml.safe_load(text)):
        cls = of_path(path)
        inspect.signature(cls).bind_partial(**dict.fromkeys(given))


def test_a_slip_in_a_page_is_found() -> None:
    with pytest.raises(TypeError, match="staged"):
        test_python_in_a_page_names_what_there_is("ProgressiveStacking(staged=[])")
    with pytest.raises(AssertionError, match="Unheard"):
        test_python_in_a_page_names_what_there_is("from lightning_eff import Unheard")
    with pytest.raises(AttributeError):
        test_yaml_in_a_page_names_what_there_is("callbacks: [{class_path: Unheard}]")
    with pytest.raises(TypeError):
        test_yaml_in_a_page_names_what_there_is("a: {class_path: EfficiencyMonitor, init_args: {wrong: 1}}")


def test_a_public_name_without_a_docstring_fails() -> None:
    class Bare:
        pass

    with pytest.raises(ValueError, match=r"Bare has no docstring\. Write one"):
        prose.read(Bare)


@pytest.mark.slow
def test_the_strict_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pages.write(tmp_path)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "how" / "less_memory.html").read_text()
    assert 'src="../assets/iframe-worker.js"' in page and not re.search(r'(src|<link[^>]*href)="https?:', page)
    assert "Rematerialization" in (tmp_path / "site" / "search" / "search_index.json").read_text()
