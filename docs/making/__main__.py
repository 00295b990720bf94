"""``python -m docs.making facts`` writes the catalogue's facts and a picture anew; ``pages FOLDER`` writes the site's pages.

``python -m docs.making notebook`` runs the Start notebook and writes into it what its cells printed.
"""

import sys
from pathlib import Path

from docs.making import facts, notebook, pages, picture


def main(args: list[str]) -> None:
    match args:
        case ["facts"]:
            facts.FILE.write_text(facts.text())
            picture.FILE.write_text(picture.svg())
            print(f"written: {facts.FILE}, {picture.FILE}")
        case ["pages", folder]:
            print(f"written: {len(pages.write(Path(folder)))} pages into {folder}")
        case ["notebook"]:
            print(f"written: {notebook.FILE}, in {notebook.write():.0f} s")
        case _:
            sys.exit(f"got {args}; expected `facts`, `pages FOLDER` or `notebook`.")


if __name__ == "__main__":
    main(sys.argv[1:])
