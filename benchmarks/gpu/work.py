"""What a unit works with: rows that are written as they come, kept when the unit goes on, and given up when time is out."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import files

Row = dict[str, Any]


class OutOfTime(Exception):
    """There is no time for the next row."""


class Skip(Exception):
    """A row cannot be had here, and why: a package or a feature of the device is missing."""


class Broken(Exception):
    """The device no longer answers this process."""


def breaks(error: BaseException) -> bool:
    """Whether CUDA has failed for the whole process: all later calls would fail too, whatever they do."""
    text = f"{type(error).__name__}: {error}"
    words = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
    words += (
        "illegal instruction",
        "CUDA_ERROR_ILLEGAL",
        "hardware stack error",
        "uncorrectable ECC",
        "CUBLAS_STATUS_EXEC",
    )
    return any(word in text for word in words)


def told(error: BaseException) -> str:
    """One line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


class Work:
    """A unit at work.

    Args:
        file: where its result is written, after every row.
        result: what stands there beside the rows: unit, settings, environment.
        ends: when it must have ended, on :func:`time.monotonic`'s clock.
        before: an earlier result of the same unit, of which it keeps the rows.
    """

    def __init__(self, file: Path, result: files.Result, ends: float, before: files.Result | None = None) -> None:
        self.file, self.result, self.ends = file, result, ends
        self.tiny: bool = bool(result["environment"].get("tiny"))
        self.settings: dict[str, Any] = result["settings"]
        self.began = time.monotonic()
        rows: list[Row] = before["rows"] if before else []
        # where all rows were tried, those that failed are tried again; else what failed is passed over until the rest is done
        again = before is not None and before["status"] == "failed"
        self._kept = {row["row"]: row for row in rows if "skipped" not in row and not ("error" in row and again)}
        result["rows"] = list(self._kept.values())
        self._earlier = before["seconds"] if before and self._kept else 0.0
        self.save("running")

    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def has(self, key: str) -> bool:
        """Whether the row is there from before."""
        return key in self._kept

    def row(self, key: str, make: Callable[[], Row], *, needs: float = 0.0) -> Row | None:
        """Make a row, or keep it from before.

        Args:
            key: its name, one for each row of a unit.
            make: gives its values; what it raises becomes the row's ``error``, and :class:`Skip` or a missing package its
                ``skipped``.
            needs: seconds that it takes about.

        Returns:
            The row; None where it failed or was skipped.

        Raises:
            OutOfTime: less time is left than it needs.
            Broken: CUDA failed for the whole process.
        """
        if key in self._kept:
            row = self._kept[key]
            return None if "error" in row else row
        if self.left() < (0 if self.tiny else needs):
            raise OutOfTime(key)
        self.result["current"] = key
        self.save("running")
        row: Row = {"row": key}
        broken: BaseException | None = None
        try:
            row |= make()
        except (Skip, ModuleNotFoundError) as error:
            row["skipped"] = str(error)
        except Exception as error:
            row["error"] = told(error)
            broken = error if breaks(error) else None
        self.add(row)
        if broken is not None:
            raise Broken(row["error"]) from broken
        print(line(row), flush=True)
        return None if "error" in row or "skipped" in row else row

    def add(self, row: Row) -> None:
        """Write a row that was made elsewhere."""
        self.result["rows"].append(row)
        self.result.pop("current", None)
        self.save("running")

    def save(self, status: str, error: str | None = None) -> None:
        """Write the result as it is now."""
        self.result |= {
            "status": status,
            "error": error,
            "seconds": round(self._earlier + time.monotonic() - self.began, 2),
        }
        files.write(self.file, self.result)

    def end(self) -> None:
        """Say how it went: failed where a row did, skipped where all were."""
        rows: list[Row] = self.result["rows"]
        wrong = [row["row"] for row in rows if "error" in row]
        if wrong:
            self.save("failed", f"{len(wrong)} of {len(rows)} rows failed: {', '.join(wrong)}"[:300])
        elif rows and all("skipped" in row for row in rows):
            self.save("skipped", next(row["skipped"] for row in rows))
        else:
            self.save("ok")


def line(row: Row) -> str:
    """A row for those who watch: its numbers, spreads by their median."""
    parts: Iterable[str] = (f"{key} {_short(value)}" for key, value in row.items() if key != "row")
    return f"  {row['row']}: {', '.join(parts)}"[:400]


def _short(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        value = value["median"]
    if isinstance(value, float):
        return f"{value:.4g}"
    return "..." if isinstance(value, list | dict) else str(value)
