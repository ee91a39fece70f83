"""The docs site: the pages of this folder, and an API reference made of the docstrings.

Built by `make docs` with warnings as errors, so that a link, a name or a table that leads nowhere fails the build.
"""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version
from typing import Any

from sphinx.application import Sphinx

project = "Rollout Reassembler"
author = "The Rollout Reassembler authors"
copyright = author
version = release = installed_version("rollout-reassembler")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton", "sphinxcontrib.mermaid"]
exclude_patterns = ["img/*.json"]
html_theme = "furo"
html_title = project
html_theme_options = {
    "source_repository": "https://github.com/rollout-reassembler/rollout-reassembler/",
    "source_branch": "main",
    "source_directory": "docs/",
}

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# What every pydantic model has, and what pydantic's own pages say about it.
_PYDANTIC = re.compile(r"model_\w+|_\w+")


def as_restructured_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are Markdown as far as they go: `code`, and indented blocks that are shown as they stand."""
    text = "\n".join(lines)
    text = re.sub(r"(?<!`)`([^`\n]+)`(?!`)", r"``\1``", text)
    paragraphs = re.split(r"\n{2,}", text)
    for at, paragraph in enumerate(paragraphs[1:], start=1):
        is_block = paragraph.startswith("    ")
        if is_block and not paragraphs[at - 1].startswith("    "):
            paragraphs[at - 1] += "\n\n::"
    lines[:] = "\n\n".join(paragraphs).splitlines()


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    return True if _PYDANTIC.fullmatch(name) else None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-skip-member", skip)
