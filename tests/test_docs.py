"""The pages: equations that name code that exists, and nothing loaded from elsewhere."""

import importlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ALGORITHM_PAGES = sorted((DOCS / "algorithms").glob("*.md"))
KATEX = DOCS / "assets" / "katex"
RENDER = """
const katex = require(process.argv[1]);
for (const formula of JSON.parse(require("fs").readFileSync(0, "utf8"))) {
    katex.renderToString(formula, { strict: "error", throwOnError: true });
}
"""


def prose(page):
    """The lines of a page outside of its code blocks, without inline code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text).splitlines()


def formulas(page):
    return [x for line in prose(page) for x in re.findall(r"\${1,2}([^$]+)\${1,2}", line)]


def equation_rows(page):
    """The cells of every row below a header that begins with `equation`."""
    rows, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith("| equation |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def preset_rows(page, presets):
    """Flag, preset and value of every cell in the tables of flags by preset."""
    rows, columns = [], []
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if cells[:1] == ["flag"]:
            columns = [(i, cell.strip("`")) for i, cell in enumerate(cells)]
            columns = [(i, name) for i, name in columns if name in presets]
        elif not cells:
            columns = []
        elif flag := re.fullmatch(r"`--([a-z-]+)`", cells[0]):
            rows += [(flag[1].replace("-", "_"), name, cells[i]) for i, name in columns]
    return rows


def written(value):
    """A value of a Config as tables write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return value if isinstance(value, str) else float(value)


def named(cell):
    name = re.fullmatch(r"`([\w.]+)`", cell)
    assert name, f"{cell!r} is not one name in backticks"
    return name[1]


class Sources(HTMLParser):
    """Collects what a browser loads for a page."""

    def __init__(self):
        super().__init__()
        self.urls = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.urls.append(attrs.get("src"))
        if tag == "link" and attrs.get("rel") != "canonical":
            self.urls.append(attrs.get("href"))


@pytest.mark.parametrize("page", ALGORITHM_PAGES, ids=lambda page: page.stem)
class TestEquationTables:
    def test_formulas_are_typeset_in_cells_of_equal_number(self, page):
        rows = equation_rows(page)
        assert rows
        assert len({len(row) for row in rows}) == 1
        assert all(row[0].startswith("$") for row in rows)

    def test_named_code_exists(self, page):
        module = importlib.import_module(f"algos.{page.stem}")
        for row in equation_rows(page):
            owner, attribute = named(row[1]).split(".")
            if hasattr(module, owner):
                place = getattr(module, owner)
            else:
                place = importlib.import_module(f"common.{owner}")
            assert hasattr(place, attribute), row[1]


def test_named_code_of_the_targets_page_exists():
    modules = [importlib.import_module(f"common.{x}") for x in ("targets", "distributions")]
    rows = equation_rows(DOCS / "targets.md")
    assert len(rows) == 22
    for row in rows:
        assert any(hasattr(module, named(row[1])) for module in modules), row[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_dollars_are_paired_on_each_line(page):
    for line in prose(page):
        marks = re.findall(r"\$+", line)
        assert marks[::2] == marks[1::2], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_has_the_columns_that_the_site_has_room_for(page):
    blocks = re.findall(r"^```.*?^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > 100]


@pytest.mark.skipif(shutil.which("node") is None, reason="KaTeX runs in node")
def test_katex_reads_every_formula():
    found = [x for page in PAGES for x in formulas(page)]
    assert len(found) > 60
    subprocess.run(
        ["node", "-e", RENDER, str(KATEX / "katex.min.js")],
        input=json.dumps(found),
        text=True,
        check=True,
    )


def test_style_sheets_load_from_the_site_alone():
    for sheet in DOCS.rglob("*.css"):
        text = sheet.read_text()
        assert "@import" not in text
        for url in re.findall(r"url\(([^)]*)\)", text):
            assert (sheet.parent / url).is_file(), url


def test_scripts_name_no_address_but_xml_namespaces():
    for script in DOCS.rglob("*.js"):
        addresses = re.findall(r"https?://[\w./]+", script.read_text())
        assert all(x.startswith("http://www.w3.org/") for x in addresses), script


def test_built_pages_load_from_the_site_alone(tmp_path):
    pytest.importorskip("material")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    pages = sorted(tmp_path.rglob("index.html"))
    assert len(pages) == len(PAGES)
    for page in pages:
        sources = Sources()
        sources.feed(page.read_text())
        urls = [url for url in sources.urls if url]
        assert any(url.endswith("assets/katex/katex.min.js") for url in urls)
        assert not [url for url in urls if "//" in url], page
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any("Algorithm.td_target" in entry["text"] for entry in index["docs"])


@pytest.mark.parametrize("page", ALGORITHM_PAGES, ids=lambda page: page.stem)
def test_tables_of_presets_are_those_of_the_code(page):
    module = importlib.import_module(f"algos.{page.stem}")
    configs = {name: module.Config(**preset) for name, preset in module.PRESETS.items()}
    rows = preset_rows(page, configs)
    assert rows or page.stem in ("dqn", "double_dqn", "dueling_dqn"), "no table of flags by preset"
    for flag, preset, cell in rows:
        value = written(getattr(configs[preset], flag))
        told = float(cell.replace(",", "")) if isinstance(value, float) else cell.strip("`")
        assert told == value, f"--{flag} of {preset}"
    text = page.read_text()
    assert [name for name in configs if f"`{name}`" not in text] == [], "presets without a word"
