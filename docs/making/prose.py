"""Converts docstrings to Markdown: the text, the arguments and the other sections."""

import doctest
import inspect
import re
from dataclasses import dataclass, field

SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Yields", "Note", "Sources", "Source", "Example", "References")


@dataclass
class Doc:
    """The parts of a docstring.

    Attributes:
        summary: its first paragraph in one line.
        text: the paragraphs up to the first section.
        sections: entries of each section by name, as pairs of the texts before and after the colon.
        example: the section "Example" in doctest's form.
    """

    summary: str
    text: str
    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    example: str = ""


def markdown(text: str) -> str:
    """Replace Sphinx's roles by code, and a double colon before an indented block by a single one."""
    text = re.sub(r":(?:class|meth|func|attr|mod|data):`~?([^`]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    return re.sub(r"::\n", ":\n", text)


def read(thing: object) -> Doc:
    """Return the docstring of a class, function or module.

    Raises:
        ValueError: if there is no docstring.
    """
    doc = inspect.getdoc(thing)
    if not doc:
        raise ValueError(
            f"{getattr(thing, '__qualname__', thing)} has no docstring. Write one, because the site shows it."
        )
    head = re.split(rf"(?m)^(?=(?:{'|'.join(SECTIONS)}):\n)", doc)
    summary, _, text = head[0].strip().partition("\n\n")
    sections, example = {}, ""
    for part in head[1:]:
        name, _, body = part.partition(":\n")
        if name == "Example":
            example = inspect.cleandoc(body)
        else:
            sections[name] = _entries(inspect.cleandoc(body))
    return Doc(markdown(" ".join(summary.split())), markdown(text), sections, example)


def code(example: str) -> str:
    """Return the code of an example in doctest's form, without prompts and output."""
    return "".join(one.source for one in doctest.DocTestParser().get_examples(example))


def _entries(body: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in body.split("\n"):
        match = re.match(r"(\*{0,2}\w+)(?: \([^)]*\))?:(?: |$)(.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += f" {line.strip()}" if line.strip() else ""
    return {name: markdown(text.strip()) for name, text in found.items()}


def cell(text: str) -> str:
    """Format a text as a table cell."""
    return " ".join(text.split()).replace("|", "\\|")
