"""Every block of code in README.md and docs/ does what it says.

A page is tried as a reader would: in an empty folder, blocks with a title saved under it first, then the Python blocks
as one script, then the commands. What a page shows as output is compared; ``…`` stands for anything.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import yaml

from envmanager.cli.config_files import RUN_TABLES, TRAINING_TABLES, load_config
from envmanager.errors import MissingExtra
from envmanager.godot.games import find_major
from envmanager.registry import ENTRY_POINT_GROUP, ManagerOptions, structure
from envmanager.training.runs.control import Control, ControlFile

SUITE = "docs"

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = ROOT / "site"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BESIDE_DOCS = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "envmanager/godot/addon/README.md")]
TIMEOUT_S = 500

FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.S | re.M)
INCLUDED = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.M)
"""A line for which the site shows a file of the project."""
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
SHOWN = re.compile(r"# -> (.*)$", re.M)
NOT_RUN = re.compile(r"(make|pip install) ")
"""Commands that install something, or run these tests again."""


@attrs.frozen
class Block:
    language: str
    title: str | None
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], found["title"], found["text"], text.count("\n", 0, found.start("text")) + 1)
        for found in FENCE.finditer(text)
    ]


def script_of(blocks: list[Block]) -> str:
    """The Python blocks without a title, each on the lines where the page has it, so that tracebacks name them."""
    script = ""
    for block in blocks:
        if block.language == "python" and block.title is None:
            script += "\n" * (block.line - 1 - script.count("\n")) + block.text
    return script


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Each command with the output shown after it; a block of ``bash`` shows none."""
    if block.language == "bash":
        lines = [line.partition("#")[0].strip() for line in block.text.splitlines()]
        return [(line, "…") for line in lines if line]
    _, *parts = re.split(r"^\$ ", block.text, flags=re.M)
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts)]


def assert_shown(output: str, shown: str) -> None:
    pattern = ".*".join(map(re.escape, shown.strip().split("…")))
    assert re.fullmatch(pattern, output.strip(), re.S), f"the page shows\n{shown}\nbut it was\n{output}"


def run(command: list[str], folder: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "COLUMNS": "120", "PYTHONPATH": ""}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def of_languages(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(block.language in languages for block in blocks_of(page))]


def save_titled(blocks: list[Block], folder: Path) -> None:
    for block in blocks:
        if block.title is not None:
            text = INCLUDED.sub(lambda found: (ROOT / found["path"]).read_text("utf-8"), block.text)
            (folder / block.title).write_text(text, encoding="utf-8")


def require_libraries(page: Path) -> None:
    """Skip a page about a library, or a program, that is not in every environment of the tests."""
    if page.stem in ("coming-from", "training", "who-learns", "writing-a-trainer", "godot"):
        pytest.importorskip("torch")
    if page.stem == "policies":
        for library in ("torch", "moviepy", "onnxruntime", "pygame"):
            pytest.importorskip(library)
    if page.stem == "vectorised-environments":
        for library in ("torch", "ale_py"):
            pytest.importorskip(library)
    if page.stem == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    if page.stem == "godot" and find_major() is None:
        pytest.skip("there is no Godot here: `apt-get install godot3-server` brings one")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", of_languages("python"), ids=name_of)
def test_python_blocks_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    require_libraries(page)
    blocks = blocks_of(page)
    save_titled(blocks, tmp_path)
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text(script_of(blocks), encoding="utf-8")

    assert_shown(run([sys.executable, script.name], tmp_path), "\n".join(SHOWN.findall(script.read_text("utf-8"))))


@pytest.mark.parametrize(
    "block",
    [block for block in blocks_of(DOCS / "writing-a-manager.md") if (block.language, block.title) == ("python", None)],
    ids=lambda block: f"line {block.line}",
)
def test_blocks_about_managers_run_when_each_is_copied_alone(block: Block, tmp_path: Path) -> None:
    save_titled(blocks_of(DOCS / "writing-a-manager.md"), tmp_path)
    (tmp_path / "copied.py").write_text(block.text, encoding="utf-8")

    assert_shown(run([sys.executable, "copied.py"], tmp_path), "\n".join(SHOWN.findall(block.text)))


@pytest.mark.parametrize("page", of_languages("bash", "console"), ids=name_of)
def test_commands_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    require_libraries(page)
    blocks = blocks_of(page)
    save_titled(blocks, tmp_path)
    for block in blocks:
        if block.language in ("bash", "console"):
            for command, shown in commands_of(block):
                if not NOT_RUN.match(command):
                    assert_shown(run(["bash", "-c", command], tmp_path), shown)


@pytest.mark.parametrize("page", of_languages("toml", "yaml"), ids=name_of)
def test_configs_are_understood(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(page)
    save_titled(blocks, tmp_path)
    for block in blocks:
        if block.language not in ("toml", "yaml"):
            continue
        file = tmp_path / (block.title or f"config.{block.language}")
        if file.name == "pyproject.toml":
            check_entry_points(block.text, tmp_path)
        elif file.name == "control.toml":
            check_control(file)
        else:
            file.write_text(block.text, encoding="utf-8")
            tables = TRAINING_TABLES if "trainers:" in block.text else RUN_TABLES
            options = structure(ManagerOptions, load_config(file, tables)["manager"])
            assert ".py:" not in (options.env or ""), "an environment is named by its module, not by a file"


def check_control(file: Path) -> None:
    """What a page shows of it is carried out."""
    asked: list[Control] = []
    ControlFile(file, ["hero", "target"]).obey(asked.append, now=0.0)
    assert len(asked) == 1


def check_entry_points(text: str, folder: Path) -> None:
    """The group is the one that is looked at, and the module that each name points to has such a class."""
    assert f'[project.entry-points."{ENTRY_POINT_GROUP}"]' in text
    for module, name in re.findall(r'"(\w+):(\w+)"', text):
        spec = importlib.util.spec_from_file_location(module, folder / f"{module}.py")
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        assert isinstance(getattr(loaded, name), type)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_in_a_language_that_nobody_tries(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert text.count("```") == 2 * len(blocks_of(page)), "a fence that was not understood"
    assert {block.language for block in blocks_of(page)} <= {
        "python",
        "bash",
        "console",
        "toml",
        "yaml",
        "text",
        "gdscript",
    }


def test_lines_for_which_a_page_shows_a_file_are_spelled_as_the_site_reads_them() -> None:
    lines = [
        line for page in PAGES for block in blocks_of(page) for line in block.text.splitlines() if line[:3] == "--8"
    ]

    assert len(lines) > 1
    shown = [found["path"] for found in map(INCLUDED.fullmatch, lines) if found is not None]
    assert len(shown) == len(lines), f"a formatter changed one of {lines}: write <!-- fmt: off --> above the block"
    assert [path for path in shown if not (ROOT / path).is_file()] == []


def test_code_fits_the_column_of_a_page_on_a_laptop() -> None:
    """The site has 105 characters at 1280 pixels; commands and messages wrap, code would have to be scrolled."""
    too_long = [
        f"{name_of(page)}: {line}"
        for page in PAGES
        for block in blocks_of(page)
        if block.language in ("python", "toml", "yaml")
        for line in block.text.splitlines()
        if len(line) > 105
    ]

    assert too_long == []


def headings_of(page: Path) -> set[str]:
    """Return the anchors that forges give the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", LINK.sub(r"\1", title).lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *BESIDE_DOCS], ids=name_of)
def test_links_and_images_lead_to_files_and_headings_of_a_checkout(page: Path) -> None:
    """Anchors of docstrings are on the site alone, which is looked through below."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://[^\s)]+/envmanager/", text), "an address of the repository: write a relative link"

    dead = []
    for _, link in LINK.findall(FENCE.sub("", text)):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if re.match("https?:", link) or (target.is_file() and heading.startswith("envmanager.")):
            continue
        if not target.is_file() or (heading and heading not in headings_of(target)):
            dead.append(link)
    assert dead == []


def description(config: str, folder: Path) -> str:
    """Return what a package index shows with ``config`` as pyproject.toml."""
    pytest.importorskip("hatch_fancy_pypi_readme")
    (folder / "pyproject.toml").write_text(config, encoding="utf-8")
    shutil.copy(ROOT / "README.md", folder)
    return run([sys.executable, "-m", "hatch_fancy_pypi_readme"], folder)


def test_a_package_index_shows_the_readme_without_relative_links(tmp_path: Path) -> None:
    texts = [text for text, _ in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))]

    shown = description((ROOT / "pyproject.toml").read_text(encoding="utf-8"), tmp_path)
    assert len(texts) > 20
    assert [text for text in texts if text not in shown] == []
    assert [link for _, link in LINK.findall(shown) if not link.startswith("https://")] == []


def test_links_are_absolute_on_a_package_index_once_the_repository_has_an_address(tmp_path: Path) -> None:
    config = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    links = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))

    config = re.sub(r"replacement = '.*'", r"replacement = '[\\1](https://example.org/\\2)'", config)
    assert LINK.findall(description(config, tmp_path)) == [
        (text, link if link.startswith("https://") else f"https://example.org/{link}") for text, link in links
    ]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml"])
def test_targets_of_make_that_are_named_exist(name: str) -> None:
    makefile, text = ((ROOT / each).read_text(encoding="utf-8") for each in ("Makefile", name))
    workflow = yaml.safe_load(text)["jobs"]["more"]["strategy"]["matrix"]["target"] if name.endswith(".yml") else []
    named = {*re.findall(r"(?:`|^|run: )make ([a-z][a-z0-9-]*)", text, re.M), *workflow}

    assert named
    suites = re.search(r"^OTHER_SUITES = (.+)$", makefile, re.M)
    assert suites
    targets = {*re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.M), *(f"test-{suite}" for suite in suites[1].split())}
    assert named - targets == set()


def test_the_workflow_tries_the_pythons_that_the_package_is_declared_for() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    declared = re.findall(r'Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"] == declared


def test_every_decision_is_listed_and_marked_where_a_later_one_has_overruled_it() -> None:
    listed = (DOCS / "decisions" / "index.md").read_text(encoding="utf-8")
    marks = dict(re.findall(r"^\| \[\d+\]\((.+?)\) \|.+\| ?(.*) \|$", listed, re.M))
    notes = {note.name: note.read_text(encoding="utf-8") for note in (DOCS / "decisions").glob("0*.md")}

    assert marks.keys() == notes.keys()
    said = {name for name, text in notes.items() if re.match(r"# .+\n\n(\*|> )(Overruled|Changed)", text)}
    assert said == {name for name, mark in marks.items() if mark}
    assert len(said) > 10


def pages_of_the_site() -> dict[str, list[str]]:
    """Return the paths of the pages in ``docs/`` under each heading of the navigation."""
    _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    groups = [group for entry in yaml.safe_load(nav) for group in entry.items()]
    return {title: [path for page in pages for path in page.values()] for title, pages in groups}


def test_the_readme_and_the_overview_name_every_page_about_what_the_library_can_do() -> None:
    readme, overview = (page.read_text(encoding="utf-8") for page in (ROOT / "README.md", DOCS / "index.md"))
    groups = pages_of_the_site()
    features = [page for name in groups if name.startswith(("Guides", "Training", "Integ")) for page in groups[name]]

    assert len(features) > 20
    assert [page for page in features if f"](docs/{page})" not in readme] == []
    assert [page for page in features if f"]({page})" not in overview and f"]({page}#" not in overview] == []


PUBLIC = DOCS / "reference" / "index.md"


def rows_of_public() -> list[str]:
    return [line for line in PUBLIC.read_text(encoding="utf-8").splitlines() if re.match(r"\|.*\[`", line)]


def public_names() -> dict[str, list[str]]:
    """Return the names that the page of public names lists, by module. A row without a module belongs to the last."""
    names: dict[str, list[str]] = {}
    module = ""
    for cells in (line.split(" | ") for line in rows_of_public()):
        found = re.match(r"\| `(envmanager[\w.]*)`", cells[0])
        module = found[1] if found else module
        names.setdefault(module, []).extend(re.findall(r"\[`(\w+)`\]", cells[1]))
    return names


@pytest.mark.parametrize("module", public_names())
def test_public_names_are_those_of_their_module(module: str) -> None:
    names = public_names()[module]
    try:
        found = importlib.import_module(module)
        assert [name for name in names if not hasattr(found, name)] == []
    except MissingExtra as error:
        pytest.skip(str(error))
    declared = getattr(found, "__all__", None)
    if Path(str(found.__file__)).name == "__init__.py":
        assert sorted(names) == sorted(declared or [])


def test_a_public_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for module, names in public_names().items():
        for name in names:
            homes.setdefault(name, []).append(module)
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1 and name != "MlagentsEnvManager"}
    meant = {name: {id(getattr(importlib.import_module(each), name)) for each in twice[name]} for name in twice}

    assert [name for name, objects in meant.items() if len(objects) > 1] == []


def imported_on(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules and names that a page's blocks, or an example, import from this library."""
    code = page.read_text(encoding="utf-8") if page.suffix == ".py" else script_of(blocks_of(page))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("envmanager"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_what_pages_and_examples_import_is_public_and_what_is_public_is_taught() -> None:
    inside = {"writing-a-manager.md", "tcp_manager.py", "plot_returns.py"}  # the last reads the files of runs
    teaching = [page for page in (*PAGES, *(DOCS / "examples").glob("*.py")) if page.name not in inside]
    public = public_names()
    imported = {(page.name, *each) for page in teaching for each in imported_on(page)}
    unlisted = {
        (page, module, name)
        for page, module, name in imported
        if name not in public.get(module, []) and f"{module}.{name}" not in public
    }
    assert len(imported) > 80
    assert unlisted == set()

    for line in rows_of_public():
        pages, names = re.findall(r"\]\(\.\./([\w-]+\.md)\)", line), re.findall(r"\[`(\w+)`\]", line)
        told = "".join((DOCS / page).read_text(encoding="utf-8") for page in pages)
        assert [name for name in names if not re.search(rf"\b{name}\b", told)] == [], pages


def test_the_site_builds_without_warnings_and_holds_no_code_but_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in ``site/``, where `make docs` says that it is."""
    pytest.importorskip("mkdocs")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # the hook's own bytecode lies among the pages

    run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(SITE)], ROOT)
    reference = list((SITE / "reference").glob("*.html"))
    assert len(reference) > 10
    assert max(page.stat().st_size for page in reference) < 400_000, "a page of the reference that nobody reads"
    assert "envmanager.make_manager" in (SITE / "reference" / "managers.html").read_text(encoding="utf-8")
    code = {path for path in SITE.rglob("*") if path.name == "__pycache__" or path.suffix in (".py", ".pyc")}
    assert code == {SITE / "examples" / path.name for path in (DOCS / "examples").glob("*.py")}
    assert list(dead_links(SITE)) == []
    overview = (SITE / "index.html").read_text(encoding="utf-8")
    first = overview[overview.index("<table") : overview.index("</table>")]
    assert first.startswith("<table data-wide>"), "the comparison does not fit a phone"
    assert '<td data-column="envmanager"><strong>5,523 steps/s</strong>' in first


def dead_links(site: Path) -> Iterator[str]:
    """Yield each link to a file or heading of the site that does not exist; mkdocs does not see those to docstrings."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    names = {page: set(re.findall(r' (?:id|name)="?([^"\s>]+)', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r' href="([^":]+)"', text):
            path, _, name = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (name and name not in names.get(target, {name})):
                yield f"{page.name}: {link}"
