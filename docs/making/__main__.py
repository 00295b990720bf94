"""``python -m docs.making facts`` writes the catalogue's facts and a picture anew; ``pages FOLDER`` writes the site's pages."""

import sys
from pathlib import Path

from docs.making import facts, pages, picture


def main(args: list[str]) -> None:
    match args:
        case ["facts"]:
            facts.FILE.write_text(facts.text())
            picture.FILE.write_text(picture.svg())
            print(f"written: {facts.FILE}, {picture.FILE}")
        case ["pages", folder]:
            print(f"written: {len(pages.write(Path(folder)))} pages into {folder}")
        case _:
            sys.exit(f"got {args}; expected `facts` or `pages FOLDER`.")


if __name__ == "__main__":
    main(sys.argv[1:])
