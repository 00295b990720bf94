"""The report: it fits the terminal, the page refers to nothing outside itself, and the same results give the same bytes."""

import ast
import inspect
import re
import sys
from base64 import b64decode
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from lightning_eff.bench import results
from lightning_eff.bench.reports import (
    compare,
    drawing,
    export,
    figures,
    findings,
    intervals,
    overview,
    pareto,
    report,
    report_html,
    statistics,
    words,
)
from lightning_eff.bench.reports.figures import band, draw
from lightning_eff.bench.reports.statistics import summarize
from tests.bench import synthetic

VOID = {"meta", "link", "br", "hr", "img", "input", "source"}


class Page(HTMLParser):
    """Collect a page's references, ids and text; an end tag that does not fit is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.references, self.ids, self.tags, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href", "srcset", "data", "action", "poster"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert "@import" not in data
            self.references += re.findall(r"url\(([^)]*)\)", data)
        else:
            self.words.append(data)


@pytest.fixture(scope="module")
def made():
    return synthetic.everything()


@pytest.fixture(scope="module")
def text(made, tmp_path_factory):
    return report.write_html(made, tmp_path_factory.mktemp("report") / "deep" / "report.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_table_fits(made, width):
    assert max(map(len, report.table(made, width).splitlines())) <= width


def test_the_table_says_it_all(made):
    shown = report.table(made, 160)
    row = next(line for line in shown.splitlines() if line.startswith("stacking"))
    assert re.split(r"\s{2,}", row)[:5] == [
        "stacking",
        "faster",
        "1.508 ± 0.015",
        "−0.127 [−0.157, −0.097]",
        "1.41 [1.27, 1.57]",
    ]
    for own in summarize(made).values():
        assert " ".join(own["sentence"].split()) in " ".join(shown.split())
    assert "- crashes once, seed 2: crashed: RuntimeError: out of memory" in shown
    assert "Imaginary CPU 9000" in shown
    assert "energy" not in shown  # not known to any run


def test_energy_is_shown_where_known():
    made = synthetic.results({"baseline": 1.0, "a": 1.2})
    for run in made["runs"]:
        run["energy_joules"] = 1500.0 if run["arm"] == "baseline" else 1200.0
    assert summarize(made)["a"]["energy"]["estimate"] == pytest.approx(0.8)
    assert "1.5 kJ" in report.table(made, 160)


def test_the_page_refers_to_nothing_outside_itself(text):
    page = Page(text)
    assert len(page.references) == 6
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in page.references)
    assert "http" not in text
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "svg"}


def test_the_page_is_well_formed(text):
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert ("html", {"lang": "en"}) in page.tags
    assert ("meta", {"charset": "utf-8"}) in page.tags
    assert any(attrs.get("name") == "viewport" for _, attrs in page.tags)
    drawn = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(drawn) == 6 == text.count("<figcaption>")
    assert all(len(attrs["alt"]) > 20 for attrs in drawn)
    for attrs in drawn:
        picture = ElementTree.fromstring(b64decode(attrs["src"].partition(",")[2]))
        assert picture.tag == "{http://www.w3.org/2000/svg}svg" and picture.get("viewBox")


def test_every_sentence_and_failure_is_on_the_page(made, text):
    said = " ".join(" ".join(Page(text).words).split())
    for own in summarize(made).values():
        assert own["sentence"] in said
    assert "RuntimeError: out of memory <at step 700>" in said
    assert "<at step" not in text  # it is escaped


def test_the_page_takes_the_readers_colours_and_prints(text):
    for needed in ("prefers-color-scheme: dark", "@media print", "screen and (max-width: 820px)"):
        assert needed in text


def channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def turned(colour: list[float], share: float) -> list[float]:
    """``invert(share) hue-rotate(180deg)``, as the specification of filter effects has them."""
    inverted = [share + value * (1 - 2 * share) for value in colour]
    grey = 0.213 * inverted[0] + 0.715 * inverted[1] + 0.072 * inverted[2]
    return [min(max(2 * grey - value, 0.0), 1.0) for value in inverted]


def contrast(one: list[float], other: list[float]) -> float:
    """The contrast ratio of the accessibility guidelines (WCAG 2)."""

    def light(colour: list[float]) -> float:
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    return max(light(one) / light(other), light(other) / light(one))


def test_figures_can_be_seen_on_light_and_dark_ground():
    """The page's filter inverts figures on white; white itself becomes nearly the dark page's background."""
    share = float(re.search(r"invert\(([.0-9]+)\) hue-rotate\(180deg\)", report_html.STYLE)[1])
    light, dark = re.findall(r"--paper: (#\w+)", report_html.STYLE)
    assert turned(channels(light), share) == pytest.approx(channels(dark), abs=0.03)
    for colour, least in [(drawing.INK, 7.0), *((colour, 2.2) for colour in drawing.COLOURS)]:
        assert contrast(channels(colour), channels(light)) > least, colour
        assert contrast(turned(channels(colour), share), channels(dark)) > least, colour


def test_the_same_results_give_the_same_bytes(made, text, tmp_path):
    assert report.write_html(made, tmp_path / "again.html").read_text(encoding="utf-8") == text
    first = [file.read_bytes() for file in report.write_pngs(made, tmp_path / "a")]
    assert first == [file.read_bytes() for file in report.write_pngs(made, tmp_path / "b")]


def test_the_figures_are_written_as_pngs(made, tmp_path):
    files = report.write_pngs(made, tmp_path / "new")
    assert [file.name for file in files] == [
        *("speedups.png", "seconds.png", "samples.png", "memory.png", "phases.png", "pareto.png")
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_many_arms_get_a_panel_each():
    few, many = ({"baseline": 1.0} | {f"recipe {k}": 1 + k / 10 for k in range(count)} for count in (5, 7))
    for gains, panels in ((few, 1), (many, 7)):
        made = synthetic.results(gains)
        curves = next(drawing for drawing in draw(made, summarize(made)) if drawing.name == "seconds")
        assert sum(axes.has_data() for axes in curves.figure.axes) == panels


def test_a_forest_is_drawn_as_summarized(made):
    summary = summarize(made)
    forest = draw(made, summary)[0].figure.axes[0]
    drawn = [
        tuple(line.get_xdata()) for line in forest.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 2
    ]
    shown = [own["speedup"] for own in summary.values() if own["speedup"]]
    assert drawn == [pytest.approx((interval["low"], interval["high"])) for interval in shown]


def test_labels_cover_no_lines(made):
    """The lines at the ticks are drawn only behind the intervals, and the bars' axes have no grid behind their labels."""
    drawn = {one.name: one.figure.axes[0] for one in draw(made, summarize(made))}
    forest = drawn["speedups"]
    lines = [path.vertices[:, 1] for collection in forest.collections for path in collection.get_paths()]
    assert len(lines) > 5 and len(forest.texts) == 10
    for text in forest.texts:
        assert not any(min(line) <= text.get_position()[1] <= max(line) for line in lines)
    for axes in (forest, drawn["phases"]):
        assert not any(line.get_visible() for line in axes.get_xgridlines())


def test_details_are_folded(text):
    for heading in ("How to read this page", "Seconds per run", "Plan and machine"):
        assert f"<details>\n<summary>{heading}</summary>" in text
    assert text.index("<h2>What to do</h2>") < text.index("<h2>Verdicts</h2>") < text.index("<details>")


def test_no_cell_of_small_multiples_is_empty():
    """Seven panels leave a cell free, which holds the legend; the last diagram of its column has labels."""
    made = synthetic.results({"baseline": 1.0} | {f"recipe {k}": 1 + k / 10 for k in range(7)})
    figure = next(drawing for drawing in draw(made, summarize(made)) if drawing.name == "seconds").figure
    assert figure.axes[7].get_legend() is not None and not figure.legends
    assert figure.axes[5].xaxis.get_tick_params()["labelbottom"]


def test_strange_names_are_text():
    gains = {"baseline": 1.0, "_$x_1$ <b>&": 1.3, "a" * 90: 1.0}
    made = synthetic.results(gains)
    text = report.page(made)
    assert "_$x_1$ <b>&" in " ".join(Page(text).words)
    legend = draw(made, summarize(made))[1].figure.legends[0]
    assert "_$x_1$ <b>&" in [entry.get_text().strip("\u200b") for entry in legend.get_texts()]  # no formula, not hidden
    assert max(map(len, report.table(made, 80).splitlines())) <= 80


@pytest.mark.parametrize("left", ["nothing", "one run", "a failed baseline"])
def test_what_is_unfinished_is_reported_too(left, tmp_path):
    made = synthetic.everything() | {"finished": None}
    made["runs"] = [] if left == "nothing" else made["runs"][:1] if left == "one run" else made["runs"]
    if left == "a failed baseline":
        for seed in synthetic.SEEDS:
            synthetic.fail(made, "baseline", seed, "crashed", "gone")
    assert "not finished" in report.table(made, 80)
    Page(report.write_html(made, tmp_path / "report.html").read_text(encoding="utf-8"))
    report.write_pngs(made, tmp_path)


def test_band_is_the_mean_and_range_of_lines():
    xs, mean, low, high = band([[(0, 0.0), (10, 10.0)], [(0, 4.0), (5, 4.0), (12, 4.0)]])
    assert xs == [0, 5, 10]
    assert (mean, low, high) == ([2, 4.5, 7], [0, 4, 4], [4, 5, 10])


def test_matplotlibs_settings_are_the_users_again(made):
    from matplotlib import rc_context, rcParams

    with rc_context({"font.size": 33.0, "svg.fonttype": "path"}):
        first = report.page(made)
        assert (rcParams["font.size"], rcParams["svg.fonttype"]) == (33.0, "path")
    assert first == report.page(made)


def test_without_matplotlib_it_is_told_at_once(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (report.require_extra, lambda: report.write_html(made, tmp_path / "report.html")):
        with pytest.raises(
            ModuleNotFoundError, match=r"package matplotlib is not installed.*pip install .*\.\[bench\]"
        ):
            call()
    assert not list(tmp_path.iterdir())
    assert report.table(made, 80)  # which draws nothing


def test_without_scipy_it_is_told_at_once(monkeypatch):
    for name in ("scipy", "scipy.special"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (report.require_extra, lambda: intervals.t_quantile(0.975, 2)):
        with pytest.raises(ModuleNotFoundError, match=r"package scipy is not installed.*pip install .*\.\[bench\]"):
            call()


@pytest.mark.parametrize(
    "module",
    [
        *(compare, drawing, export, figures, findings, intervals, overview, pareto, report, report_html, results),
        *(statistics, words),
    ],
)
def test_importing_it_imports_neither_matplotlib_nor_numpy(module):
    for node in ast.parse(inspect.getsource(module)).body:
        names = (
            [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in getattr(node, "names", [])]
        )
        assert not {name.split(".")[0] for name in names} & {"matplotlib", "numpy", "scipy"}
