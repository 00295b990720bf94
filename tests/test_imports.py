"""No circle of imports is left in the package: not by type checking, not in functions, not by way of a package."""

from pathlib import Path

import pytest

from tests.import_graph import circles, graph, in_words

ROOT = Path(__file__).parent.parent


def test_no_module_imports_itself_by_way_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    imports = graph({"lightning_eff": ROOT / "lightning_eff", "lightning_eff.kernels": ROOT / "kernels"})
    found = [in_words(circle, imports) for circle in circles(imports)]
    size = f"{len(imports)} modules and {sum(map(len, imports.values()))} imports among them"
    with capsys.disabled():
        print(f"\nthe import graph: {size}, {len(found) or 'no'} circle{'s' * (len(found) > 1)}", *found, sep="\n")
    assert len(imports) > 200 and not found, "\n".join(found)


def package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.py": "import p.b", "b.py": "from p import a"}, ["p.a imports p.b (line 1), which imports p.a (line 1)"]),
        (
            {
                "a.py": "def f():\n    from p.b import g",
                "b.py": "import p.c",
                "c.py": "if TYPE_CHECKING:\n    import p.a",
            },
            [
                "p.a imports p.b (line 2, in a function), which imports p.c (line 1), which imports p.a (line 2, for type"
                " checkers)"
            ],
        ),
        (
            {"a.py": "import p.b, p.c", "b.py": "import p.a", "c.py": "import p.b"},
            [
                "p.a imports p.b (line 1), which imports p.a (line 1)",
                "p.a imports p.c (line 1), which imports p.b (line 1), which imports p.a (line 1)",
            ],
        ),
        (  # importing q.c runs q, which imports a
            {"a.py": "import p.q.c", "q/__init__.py": "from p import a", "q/c.py": ""},
            ["p.a imports p.q (line 1), which imports p.a (line 1)"],
        ),
        ({"a.py": "import p.b\nimport torch", "b.py": "class C:\n    from p.c import d", "c.py": "d = 1"}, []),
    ],
    ids=["two", "hidden", "two of three", "by way of a package", "none"],
)
def test_planted_circles_are_told(files: dict[str, str], words: list[str], tmp_path: Path) -> None:
    imports = graph({"p": package(tmp_path, files)})
    assert [in_words(circle, imports) for circle in circles(imports)] == words
