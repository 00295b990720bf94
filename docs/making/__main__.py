"""``python -m docs.making facts`` writes the catalogue's facts anew; ``pages FOLDER`` the site's pages into a folder."""

import sys
from pathlib import Path

from docs.making import facts, pages


def main(args: list[str]) -> None:
    match args:
        case ["facts"]:
            facts.FILE.write_text(facts.text())
            print(f"written: {facts.FILE}")
        case ["pages", folder]:
            print(f"written: {len(pages.write(Path(folder)))} pages into {folder}")
        case _:
            sys.exit(f"got {args}; expected `facts` or `pages FOLDER`.")


if __name__ == "__main__":
    main(sys.argv[1:])
