"""Every snippet of the README, the docs and the docstrings runs, and every command line is one."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

from tests.snippets import commands
from tests.snippets.pages import (
    LANGUAGES,
    PAGES,
    ROOT,
    SOURCES,
    Docstring,
    Snippet,
    docstrings,
    fences,
    indented_blocks,
    is_python,
    statement_in,
)
from tests.snippets.running import run
from tests.snippets.worlds import CLUSTER_WORLDS, WORLDS, names_in

FENCES = [fence for page in PAGES for fence in fences(page)]
BLOCKS = [block for docstring in docstrings() for block in indented_blocks(docstring)]
SCRIPTS = [fence for fence in FENCES if fence.language == "python" and fence.title]
PAGES_WITH_PYTHON = sorted({fence.where for fence in FENCES if fence.language == "python" and not fence.title})
ON_CLUSTER = {*CLUSTER_WORLDS, "rollout_reassembler.data_plane.mooncake.master"}
EXAMPLES = [block for block in BLOCKS if is_python(block.text)]
COMMANDS = [
    (f"{fence.where}:{fence.line + number}", line)
    for fence in FENCES
    if fence.language == "sh"
    for number, line in enumerate(fence.text.splitlines())
    if line.strip() and not line.startswith("#")
]
MENTIONS = sorted(
    {
        (str(page.relative_to(ROOT)), mention)
        for page in [*PAGES, *SOURCES.rglob("*.py")]
        for mention in re.findall(r"`(reassemble [^`\n{]+)`", page.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", **WORLDS.get(page, dict)()}
    for snippet in FENCES:
        if snippet.where == page and snippet.language == "python" and not snippet.title:
            run(snippet, names)


@pytest.mark.parametrize("example", [block for block in EXAMPLES if block.where not in ON_CLUSTER], ids=str)
def test_the_example_of_a_docstring_runs(example: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    world = WORLDS.get(example.where, dict)()
    for name, value in names_in(example.where).items():
        world.setdefault(name, value)
    run(example, world)


@pytest.mark.parametrize("module", sorted({d.module for d in docstrings() if ">>> " in d.text}))
def test_the_session_of_a_docstring_runs(module: str) -> None:
    shown = sum(line.startswith(">>> ") for d in docstrings() if d.module == module for line in d.text.splitlines())
    result = doctest.testmod(importlib.import_module(module))
    assert (result.failed, result.attempted) == (0, shown)


def test_every_script_is_run_by_name() -> None:
    assert {script.title for script in SCRIPTS} == {"on_a_cluster.py", "on_mooncake.py"}
    assert len(SCRIPTS) == 2


def test_nothing_in_a_fence_is_passed_over() -> None:
    lines = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert len(FENCES) * 2 == lines
    unknown = [fence for fence in FENCES if fence.language not in LANGUAGES and not fence.language.startswith("{")]
    assert list(map(str, unknown)) == []
    texts = [fence for fence in FENCES if fence.language in ("", "text")]
    assert [str(text) for text in texts if is_python(text.text) or statement_in(text.text)] == []
    unnamed = [text for text in texts if not text.language]
    assert [str(text) for text in unnamed if re.search(r"^(reassemble|make) ", text.text, re.MULTILINE)] == []


def test_nothing_in_a_docstring_is_passed_over() -> None:
    indented = sum(line.startswith("    ") for docstring in docstrings() for line in docstring.text.splitlines())
    assert sum(line.strip() != "" for block in BLOCKS for line in block.text.splitlines()) == indented
    drawings = [block for block in BLOCKS if not is_python(block.text)]
    assert {str(block): statement_in(block.text) for block in drawings if statement_in(block.text)} == {}
    assert [d.module for d in docstrings() if "\n```" in d.text] == []


def test_every_docstring_is_looked_at() -> None:
    """As the interpreter finds them: modules, classes and functions with a docstring."""
    seen = {(docstring.module, docstring.text.splitlines()[0]) for docstring in docstrings()}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                assert text is None or any(text.splitlines()[0] == first for _, first in seen), text


@pytest.mark.parametrize("place", [*WORLDS, *CLUSTER_WORLDS])
def test_a_world_has_its_snippet(place: str) -> None:
    assert place in {snippet.where for snippet in [*FENCES, *EXAMPLES]}


def test_a_broken_example_is_not_taken_for_a_drawing() -> None:
    docstring = Docstring("m", 1, "Text.\n\n    sink = Sink(client\n    sink.stage(call)\n\nMore.\n")
    (block,) = indented_blocks(docstring)
    assert (block.line, is_python(block.text)) == (3, False)
    assert statement_in(block.text) == "sink = Sink(client"


@pytest.mark.parametrize(("where", "line"), COMMANDS)
def test_a_command_line_is_one(where: str, line: str) -> None:
    commands.check(line, whole=True)


@pytest.mark.parametrize(("where", "mention"), MENTIONS)
def test_a_command_that_is_mentioned_exists_with_its_options(where: str, mention: str) -> None:
    commands.check(mention, whole=False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("reassemble demos", "there is no command 'demos'"),
        ("reassemble demo --plain memory", "No such option"),
        ("reassemble demo --plane memry", "'memry' is not one of"),
        ("reassemble demo --groups two", "Invalid value for '--groups'"),
        ("reassemble demo now", "Got unexpected extra argument"),
        ("reassemble run archive", "Missing option '--out'"),
        ("make dmeo", "the Makefile has no 'dmeo'"),
        ("reasemble demo", "no program that documents are known to name"),
    ],
)
def test_a_command_line_that_is_none_is_found(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        commands.check(line, whole=True)


def test_files_that_a_page_links_to_exist() -> None:
    missing = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        missing += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert missing == []
