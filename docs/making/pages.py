"""Writes the pages of the site: those of ``docs/``, a card for each technique, the catalogue and the reference."""

import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from docs.making import cards, choices, layouts, notebook, prose
from lightning_eff._exports import public

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
FILES = (".png", ".svg", ".js", ".css")  #: suffixes of files to copy
ROOMS = {
    "data": "Data",
    "model": "Model",
    "optim": "Optimization",
    "budget": "Budget",
    "memory": "Memory",
    "precision": "Precision",
    "strategies": "Strategies",
    "monitor": "Monitor",
    "advice": "Advice",
    "bench": "Bench",
    "tune": "Tune",
}


def generated() -> dict[str, str]:
    """Return the generated pages by path."""
    pages = {cards.file_of(name): cards.card(name) for name in cards.names()}
    pages |= {
        "techniques/index.md": cards.overview(),
        "catalogue.md": cards.whole_catalogue(),
        layouts.PAGE: layouts.page(),
        notebook.PAGE: notebook.page(),
    }
    rooms: dict[str, list[str]] = {}
    for name, home in sorted(public.HOMES.items()):
        prose.read(public.found(name))  # a public name without a docstring fails here
        rooms.setdefault(home.split(".")[1] if home.split(".")[1] in ROOMS else "", []).append(f"{home}.{name}")
    for room, names in rooms.items():
        title = ROOMS.get(room, "Functions")
        blocks = "\n\n".join(f"::: {name}" for name in names)
        pages[f"reference/{room or 'functions'}.md"] = f"# {title}\n\n{blocks}\n"
    return pages


def written() -> dict[str, str]:
    """Return the pages written by hand or by benchmarks by path, including two from outside ``docs``."""
    pages = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    above = {f"{name.lower()}.md": (ROOT / f"{name}.md").read_text() for name in ("CONTRIBUTING", "CHANGELOG")}
    return pages | {name: text.replace("](docs/", "](") for name, text in above.items()}


def linked(page: str, text: str, known: set[str]) -> str:
    """Replace a page's links to files outside the site by their paths in the repository."""

    def mend(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if target.endswith(notebook.FILE.name):  # the notebook is a page too
            return f"[{words}]({'../' * (len(PurePosixPath(page).parts) - 1)}{notebook.PAGE})"
        if re.match(r"https?:|mailto:|#", target):
            return match[0]
        parts: list[str] = []
        for part in (*PurePosixPath(page).parent.parts, *target.partition("#")[0].split("/")):
            if part == "..":
                if not parts:
                    return (
                        words if words.startswith("`") else f"{words} (`{target.replace('../', '')}` in the repository)"
                    )
                parts.pop()
            elif part != ".":
                parts.append(part)
        return match[0] if "/".join(parts) in known else f"{words} (`{target}` in the repository)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", mend, text)


def navigation() -> list[Any]:
    """Return the site's menu from ``mkdocs.yml``, with the cards by purpose and the reference by folder."""
    groups: list[Any] = ["techniques/index.md"]
    for purpose, names in choices.purposes().items():
        groups.append({purpose: [{name: cards.file_of(name)} for name in names]})
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    reference: list[Any] = [{title: f"reference/{room}.md"} for room, title in ROOMS.items()]
    reference += [{"Functions": "reference/functions.md"}, layouts.PAGE, "catalogue.md"]
    made = {"Techniques": groups, "Reference": reference}
    return [{title: made.get(title, pages)} for entry in menu for title, pages in entry.items()]


def write(folder: Path) -> list[Path]:
    """Write the site's sources to ``folder/pages``, and its settings to ``folder/mkdocs.yml``."""
    pages = generated()
    clash = pages.keys() & written().keys()
    if clash:
        raise ValueError(f"{sorted(clash)}: these pages are generated, but also written by hand. Remove the latter.")
    pages |= written()
    known = {*pages, *(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*") if p.suffix in FILES)}
    target = folder / "pages"
    shutil.rmtree(target, ignore_errors=True)
    made = []
    for page, text in pages.items():
        path = target / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(linked(page, text, known))
        made.append(path)
    for name in known - pages.keys():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DOCS / name, target / name)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    settings |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation()}
    for plugin in settings["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            python = plugin["mkdocstrings"]["handlers"]["python"]
            python["paths"] = [str(ROOT)]
            python["options"]["extensions"] = [str(ROOT / "docs" / "making" / "roles.py")]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return made
