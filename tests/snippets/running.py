"""Running a snippet as its reader would: in order, at the top level of a module, `await` allowed."""

from __future__ import annotations

import ast
import asyncio
import inspect
from typing import Any

from tests.snippets.pages import Snippet


def run(snippet: Snippet, names: dict[str, Any]) -> None:
    """Run a snippet over `names`, which it adds to. Its errors point at the page and the line."""
    text = "\n" * (snippet.line - 1) + snippet.text
    code = compile(text, snippet.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaited = eval(code, names)
    if inspect.iscoroutine(awaited):
        asyncio.run(awaited)
