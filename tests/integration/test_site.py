"""The documentation as a site: it is built without a warning, and every link of it works."""

import importlib.util
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse
from xml.etree import ElementTree

import pytest
from support.accessibility import find_serious_violations, load_axe
from support.browser import BINARY, Browser

import podscale

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """The addresses that a page links to, those that it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.loaded, self.anchors = set(), set(), {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {value for name, value in values.items() if name in ("id", "name") and value}
        self.targets |= {value for name, value in values.items() if name in ("href", "src") and value}
        loads = tag != "a" and values.get("rel") not in ("canonical", "next", "prev")
        self.loaded |= {values[name] for name in ("href", "src") if loads and values.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_link_of_the_site_works(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= len(list((ROOT / "docs").glob("*.md")))
    for path, links in pages.items():
        for target in links.targets:
            address = urlparse(target)
            if address.scheme or address.netloc:
                continue
            place = (path.parent / unquote(address.path)).resolve() if address.path else path
            assert place.exists(), f"{path.name}: {target}"
            if address.fragment and place in pages:
                assert unquote(address.fragment) in pages[place].anchors, f"{path.name}: {target}"


def test_the_api_reference_shows_the_public_names(site):
    text = (site / "api.html").read_text()
    headings = re.findall(r'<h2 id="podscale\.[^>]*>\s*<code[^>]*>(?:<[^>]*>)*([\w.]+)', text)
    assert sorted(headings) == sorted(f"podscale.{name}" for name in podscale.__all__)
    shown = re.sub(r"<[^>]*>", " ", text).split()
    assert "plan_recipe" not in shown
    assert "make_plan" in shown  # in the table of contents


def test_nothing_of_the_site_needs_the_network(site):
    for path in site.rglob("*.html"):
        for target in Links(path.read_text()).loaded:
            assert not urlparse(target).netloc, f"{path.name}: {target}"


@pytest.mark.heavy
@pytest.mark.skipif(BINARY is None, reason="there is no Chromium")
def test_the_search_works_in_pages_that_are_opened_as_files(site):
    with Browser() as browser, browser.open((site / "index.html").as_uri(), width=1280, ready=None) as tab:
        tab.wait_for("document.querySelector('.md-search__input')?.offsetWidth > 0")
        field = "document.querySelector('.md-search__input')"
        tab.evaluate(
            f"{field}.focus(), {field}.value = 'goodput', {field}.dispatchEvent(new KeyboardEvent('keyup')), 0"
        )
        tab.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
        assert "look.html" in "".join(tab.list_attributes(".md-search-result__item a", "href"))
        assert tab.problems == []


def test_the_figures_are_what_the_code_draws():
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))["FIGURES"]
    for name, draw in figures.items():
        assert (ROOT / "docs" / name).read_text() == draw(), f"{name}: run docs/figures.py"
    for path in (ROOT / "docs").glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_the_readme_fits_a_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


def is_main(path):
    return path.name in ("index.html", "tutorial.html", "recipes.html", "compare.html", "api.html")


@pytest.mark.heavy
@pytest.mark.skipif(BINARY is None, reason="there is no Chromium")
@pytest.mark.parametrize(
    ("dark", "is_chosen"),
    [
        pytest.param(False, is_main, id="main pages"),
        pytest.param(True, lambda path: path.name == "index.html", id="dark landing page"),
        pytest.param(False, lambda path: path.name != "404.html", id="all", marks=pytest.mark.slow),
        pytest.param(True, lambda path: path.name != "404.html", id="all dark", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_serious_violation_on_the_site(site, tmp_path, dark, is_chosen):
    """Page 404 is the theme's own."""
    axe = load_axe(tmp_path)
    with Browser() as browser:
        for path in filter(is_chosen, sorted(site.glob("*.html"))):
            with browser.open(path.as_uri(), dark=dark, ready=None) as tab:
                violations = find_serious_violations(tab, axe)
                assert not violations, f"{path.name}: {violations}"


@pytest.mark.heavy
@pytest.mark.skipif(BINARY is None, reason="there is no Chromium")
def test_no_page_of_the_site_scrolls_sideways_on_a_phone(site):
    with Browser() as browser:
        for path in sorted(site.glob("*.html")):
            with browser.open(path.as_uri(), width=390, height=844, ready=None) as tab:
                assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), path.name
