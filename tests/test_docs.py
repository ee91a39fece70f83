"""The pages: links lead somewhere, tests they cite exist, tables are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import rollout_reassembler as rr

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "rollout_reassembler"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")]
OURS = "https://github.com/rollout-reassembler/rollout-reassembler/"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the docs site make them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith(OURS):
            kind, _, place = link.removeprefix(OURS).partition("/main/")
            link = f"/{place}" if kind in ("blob", "tree") else ""
        if not link or link.startswith(("http:", "https:", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        file = (ROOT / target[1:] if target.startswith("/") else path.parent / target) if target else path
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_that_a_page_cites_exists(path):
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text(encoding="utf-8")):
        assert (ROOT / file).exists(), file
        assert not name or name in functions_of(ROOT / file), f"{file}::{name}"


def test_a_page_is_in_the_reading_order_or_under_more():
    index = page("docs/index.md")
    assert re.search(r"^\*$", index, re.MULTILINE)
    for name in re.findall(r"^([\w-]+)$", "\n".join(re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL)), re.M):
        assert (ROOT / "docs" / f"{name}.md").exists(), name


def test_the_architecture_page_has_a_row_for_each_folder_and_no_other():
    folders = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)/` \|", page("docs/architecture.md"), re.MULTILINE)) == folders


def test_the_api_page_has_every_public_name_once():
    listed = re.findall(r"auto(?:class|function):: (\w+)", page("docs/api.md"))
    errors = {name for name in rr.__all__ if (SOURCES / "contract" / "errors.py").read_text().count(f"class {name}(")}
    expected = set(rr.__all__) - errors
    assert not expected.difference(listed), "docs/api.md lacks these"
    assert sorted(listed) == sorted(expected), "docs/api.md has names that are not public, or one twice"


def test_the_glossary_says_each_word_once():
    words = [
        word
        for terms in re.findall(r"^\| (.+?) \|", page("docs/glossary.md"), re.MULTILINE)[2:]
        for word in re.findall(r"\*\*(.+?)\*\*", terms)
    ]
    assert len(words) > 40
    assert len(set(words)) == len(words)
    assert words


def rejection_codes() -> set[str]:
    """Every code that finalizing can reject a rollout with, as the sources spell them."""
    codes: set[str] = set()
    for file in [*(SOURCES / "reassembly").glob("*.py"), SOURCES / "staging" / "source.py"]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                codes |= {k.value.value for k in node.keywords if k.arg == "code" and isinstance(k.value, ast.Constant)}
                name = getattr(node.func, "id", "")
                place = {"Rejection": 0, "rejected": 1, "refused": 0}.get(name)
                if place is not None and len(node.args) > place and isinstance(node.args[place], ast.Constant):
                    codes.add(node.args[place].value)
    return codes


@pytest.mark.parametrize("code", sorted(rejection_codes()))
def test_every_rejection_code_is_in_its_table(code):
    assert f"`{code}`" in page("docs/rejections.md")


def test_the_search_for_codes_finds_those_of_each_step():
    assert rejection_codes() >= {"missing_receipt", "missing_staging_row", "chain_hash_mismatch", "invalid_reward"}


def test_every_command_of_make_is_in_its_help():
    makefile = page("Makefile")
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert targets is not None
    assert set(targets[1].split()) == set(re.findall(r"^([\w-]+):.*  ## ", makefile, re.MULTILINE))
