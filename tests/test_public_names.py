"""What a user imports: each name from the package, each error from one module; and what a plain install says."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_reassembler as rr
from rollout_reassembler import capture
from rollout_reassembler.contract import errors

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "rollout_reassembler"
EXTRAS = ("jinja2", "matplotlib", "mooncake", "pyarrow", "ray", "tensordict", "torch", "transfer_queue", "zmq")


def errors_below(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from errors_below(child)


def error_names() -> list[str]:
    """Also those of files that nobody has imported: the names of all classes that descend from the root."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    names = {"ReassemblerError"}
    while found := {name for name, parents in bases.items() if parents & names} - names:
        names |= found
    return sorted(names)


def in_plain_install(code: str) -> str:
    """Run `code` where no extra is installed; what it printed."""
    hidden = "\n".join(f"sys.modules[{name!r}] = None" for name in EXTRAS)
    program = f"import sys\n{hidden}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", error_names())
def test_an_error_is_in_the_one_module_and_imports_from_the_package(name):
    assert getattr(errors, name).__module__ == errors.__name__
    assert getattr(rr, name) is getattr(errors, name)
    assert name in rr.__all__


def test_the_walk_finds_every_error_that_is_loaded():
    assert {kind.__name__ for kind in errors_below(errors.ReassemblerError)} <= set(error_names())


@pytest.mark.parametrize("name", error_names())
def test_an_error_has_its_row_in_the_table(name):
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows.count(name) == 1


def test_the_table_names_the_builtin_that_an_error_also_is():
    _, faults = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("## Faults")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", faults, re.MULTILINE)
    assert rows
    for name, builtin in rows:
        assert issubclass(getattr(rr, name), getattr(builtins, builtin))


@pytest.mark.parametrize("name", rr.__all__)
def test_a_public_name_is_there_and_listed(name):
    assert getattr(rr, name) is not None
    assert name in dir(rr)
    assert not name.startswith("_")


def test_names_of_capture_import_from_the_package():
    assert {name: getattr(rr, name) for name in capture.__all__} == {
        name: getattr(capture, name) for name in capture.__all__
    }


def test_the_forbidden_names_import_though_they_are_not_listed():
    from rollout_reassembler import _FORBIDDEN_RPC_KEYS

    assert "input_ids" in _FORBIDDEN_RPC_KEYS


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'RolloutReasembler'"):
        rr.RolloutReasembler  # noqa: B018


def test_the_docstring_names_only_what_is_there():
    groups = rr.__doc__[rr.__doc__.index("All public names") :]
    assert set(re.findall(r"`(\w+)`", groups)) - {"ImportError", "CallRecord"} <= set(rr.__all__)


def test_a_plain_install_runs_the_memory_plane_and_says_what_the_rest_needs():
    said = in_plain_install(
        "import rollout_reassembler as rr\n"
        "rr.build_data_plane_client(rr.DataPlaneConfig(impl='memory'))\n"
        "def tell(make):\n"
        "    try: make()\n"
        "    except rr.MissingExtra as error: print(error)\n"
        "tell(lambda: rr.ReassemblerPool)\n"
        "tell(lambda: rr.create_rollout_reassembler_actors)\n"
        "tell(lambda: rr.iter_batches)\n"
        "tell(lambda: rr.build_data_plane_client(rr.DataPlaneConfig(impl='transfer_queue')))\n"
        "tell(lambda: rr.build_data_plane_client(rr.DataPlaneConfig(impl='transfer_queue', backend='mooncake_cpu')))\n"
        "print('torch' in dir(rr), 'ReassemblerPool' in dir(rr), issubclass(rr.MissingExtra, ImportError))\n"
    )
    lines = [re.sub(r"'\w+', which", "LIBRARY, which", line) for line in said.splitlines()]
    needs = "needs LIBRARY, which is not installed: pip install"
    assert lines == [
        f"rollout_reassembler.ReassemblerPool {needs} 'rollout-reassembler[ray]'",
        f"rollout_reassembler.create_rollout_reassembler_actors {needs} 'rollout-reassembler[ray]'",
        f"rollout_reassembler.iter_batches {needs} 'rollout-reassembler[trainer]'",
        f"the data plane on TransferQueue {needs} 'rollout-reassembler[ray]'",
        f"the data plane on Mooncake {needs} 'rollout-reassembler[ray,mooncake]'",
        "False True True",
    ]


def test_importing_the_package_loads_no_extra():
    loaded = in_plain_install(
        "for name in list(sys.modules):\n"
        "    if sys.modules[name] is None: del sys.modules[name]\n"
        "import rollout_reassembler\n"
        f"print([name for name in {EXTRAS!r} if name in sys.modules])\n"
    )
    assert loaded == "[]\n"
