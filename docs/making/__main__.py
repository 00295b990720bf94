"""``python -m docs.making facts`` writes the catalogue's facts and entries, a picture and the tables of ``docs/verdicts.md``.

``python -m docs.making pages FOLDER`` writes the site's pages. ``python -m docs.making notebook`` runs the Start notebook
and saves its output in it.
"""

import sys
from pathlib import Path

from docs.making import choices, facts, notebook, pages, picture
from lightning_eff._catalogue.facts import facts as read


def main(args: list[str]) -> None:
    match args:
        case ["facts"]:
            facts.FILE.write_text(facts.text())
            read.cache_clear()
            facts.ENTRIES.write_text(facts.entries())
            picture.FILE.write_text(picture.svg())
            choices.VERDICTS.write_text(choices.verdicts(choices.VERDICTS.read_text()))
            print(f"wrote {facts.FILE}, {facts.ENTRIES}, {picture.FILE}, {choices.VERDICTS}")
        case ["pages", folder]:
            print(f"wrote {len(pages.write(Path(folder)))} pages into {folder}")
        case ["notebook"]:
            print(f"wrote {notebook.FILE}, in {notebook.write():.0f} s")
        case _:
            sys.exit(f"got {args}; expected `facts`, `pages FOLDER` or `notebook`.")


if __name__ == "__main__":
    main(sys.argv[1:])
