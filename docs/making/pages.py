"""The pages of the site."""

from pathlib import Path



def write(folder: Path) -> list[Path]:
    """Nothing yet."""
    return []
