"""The folders follow the way of the data: imports go down, never in a circle."""

from __future__ import annotations

import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGE = "rollout_reassembler"


def floors() -> list[set[str]]:
    """The folders from the top down, those of one floor together, as pyproject.toml tells import-linter."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (contract for contract in settings["contracts"] if contract["id"] == "floors")
    return [{folder.strip() for folder in layer.split("|")} for layer in contract["layers"]]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Each module with what it imports from this package."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def folder_of(module: str) -> str | None:
    """`None` for what lies beside the folders: the package itself and `__main__`."""
    name = module.partition(".")[2].partition(".")[0]
    return None if name in ("", "__main__") else name


def test_no_import_goes_up_or_aside(imports: dict[str, set[str]]) -> None:
    height = {folder: -index for index, floor in enumerate(floors()) for folder in floor}
    assert height.keys() == {folder_of(module) for module in imports} - {None}
    assert height["capture"] == height["staging"]
    wrong = [
        f"{module} imports {imported}"
        for module, all_imported in imports.items()
        for imported in all_imported
        if (here := folder_of(module)) and (there := folder_of(imported)) != here
        if (there is None and here != "cli") or (there and height[there] >= height[here])
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    inside = {module: {name for name in names if name != PACKAGE} for module, names in imports.items()}
    tuple(TopologicalSorter(inside).static_order())
