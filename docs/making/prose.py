"""Docstrings as Markdown: the text, the arguments, and what else their sections say."""

import doctest
import inspect
import re
from dataclasses import dataclass, field

SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Yields", "Note", "Sources", "Source", "Example", "References")


@dataclass
class Doc:
    """A docstring in parts.

    Attributes:
        summary: its first paragraph, in one line.
        text: the paragraphs after it, up to the first section.
        sections: each section's entries, by name: what stands before the colon, and what after it.
        example: the section "Example", in doctest's form.
    """

    summary: str
    text: str
    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    example: str = ""


def markdown(text: str) -> str:
    """Sphinx's roles as code, and a double colon before an indented block as a single one."""
    text = re.sub(r":(?:class|meth|func|attr|mod|data):`~?([^`]+)`", lambda m: f"`{m[1].rpartition('.')[2]}`", text)
    return re.sub(r"::\n", ":\n", text)


def read(thing: object) -> Doc:
    """The docstring of a class, function or module.

    Raises:
        ValueError: if there is none, which the site does not take.
    """
    doc = inspect.getdoc(thing)
    if not doc:
        raise ValueError(f"{getattr(thing, '__qualname__', thing)} has no docstring; expected one: the site shows it.")
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
    """The code of an example in doctest's form, without its prompts and what it prints."""
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
    """A text as the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
