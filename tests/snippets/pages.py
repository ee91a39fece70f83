"""Every piece of code that the README, the docs and the docstrings show, and where it stands.

What counts as code, so that none is passed over in silence:

- In a Markdown page code names its language; a fence without one may not look like code. `python` fences run in the
  order of their page, in one namespace; one with a `title="name.py"` is a script of its own. `sh` fences are commands.
- In a docstring an indented block is code if Python can read it, and a drawing if not. A drawing may not look like
  code: a line that begins like a statement means that somebody's example is broken. Sessions (`>>>`) are doctests.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"", "python", "sh", "text", "mermaid", "json", "toml", "yaml"}
"""What a fence may be; directives of the documentation's builder, as `{toctree}`, apart."""

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STATEMENT = re.compile(
    r"^\s*(?:import |from \S+ import |with .*:|(?:async )?for .*:|assert |def |class |@|return |raise "
    r"|[\w.\[\]\"']+(?:, [\w.]+)* = .*\(|[\w.]+\([^)]*\)\s*(?:#.*)?$)"
)


@dataclass(frozen=True)
class Snippet:
    """One piece of code: the page or module it is in, the line it begins at, and its text."""

    where: str
    line: int
    text: str
    language: str = "python"
    title: str | None = None

    def __str__(self) -> str:
        return f"{self.where}:{self.line}"


def fences(page: Path) -> list[Snippet]:
    """All fences of a Markdown page, whatever their language."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        language, _, rest = fence[1].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, fence.start()) + 2
        name = str(page.relative_to(ROOT))
        found.append(Snippet(name, line, fence[2], language, title[1] if title else None))
    return found


@dataclass(frozen=True)
class Docstring:
    module: str
    line: int
    text: str


def docstrings() -> list[Docstring]:
    """Every docstring in the package: of modules, classes and functions, and those behind an assignment."""
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found.append(Docstring(module, node.lineno, _dedented(node.value.value)))
    return found


def _dedented(text: str) -> str:
    """A docstring without the indentation of its own code."""
    first, *rest = text.expandtabs().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first, *(line[margin:] for line in rest)])


def indented_blocks(docstring: Docstring) -> list[Snippet]:
    """The indented parts of a docstring, code and drawings, each dedented."""
    blocks: list[Snippet] = []
    lines: list[str] = []
    start = 0
    for number, line in enumerate([*docstring.text.split("\n"), "end"]):
        if line.startswith("    "):
            start = start if lines else number
            lines.append(line)
        elif lines and not line.strip():
            lines.append("")
        elif lines:
            text = "\n".join(line[4:] for line in lines).rstrip() + "\n"
            blocks.append(Snippet(docstring.module, docstring.line + start, text))
            lines = []
    return blocks


def is_python(text: str) -> bool:
    try:
        compile(text, "docstring", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return True


def statement_in(text: str) -> str | None:
    """The first line that begins like a statement of Python, for blocks that are none."""
    return next((line.strip() for line in text.splitlines() if _STATEMENT.match(line)), None)
