"""The README's snippets: the first runs as it stands, the others at least use names that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rollout_reassembler

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_first_snippet_runs() -> None:
    exec(compile(SNIPPETS[0], "README.md", "exec"), {})


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_public_name_in_a_snippet_exists(snippet: str) -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(snippet))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rr"
    }
    assert used
    assert used <= set(rollout_reassembler.__all__)


def test_files_that_the_readme_links_to_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (README.parent / link).exists()]
