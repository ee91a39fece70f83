"""What of a running plane another machine reaches: a port scan from a network namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.queue,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="makes network namespaces: root, iproute2"),
]

_SCAN = """
import json, socket, sys
said = {}
for port in sys.argv[2:]:
    try:
        with socket.create_connection((sys.argv[1], int(port)), 2) as knock:
            knock.settimeout(1)
            try:
                knock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
                said[port] = repr(knock.recv(32))
            except TimeoutError:
                said[port] = "nothing"
            except ConnectionError:
                said[port] = "hangs up"
    except OSError:
        pass
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Machines:
    """Two namespaces with a wire between them: the plane's machine, at `address`, and another one."""

    plane: str
    other: str
    address: str

    def run(self, namespace: str, *command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, *command], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    def scan(self, namespace: str, address: str, ports: list[str]) -> dict[str, str]:
        """What each open port says to a frame of nobody it knows."""
        said: dict[str, str] = json.loads(self.run(namespace, sys.executable, "-c", _SCAN, address, *ports))
        return said


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    here, there = f"rr-{os.getpid()}-a", f"rr-{os.getpid()}-b"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)

    made: list[str] = []
    try:
        for name in (here, there):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", here, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", there)
        for name, address in ((here, "10.211.7.1"), (there, "10.211.7.2")):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        # Ray takes the address of the interface that leads elsewhere; nothing is sent there.
        ip("-n", here, "route", "add", "default", "via", "10.211.7.2")
        yield Machines(here, there, "10.211.7.1")
    finally:
        for name in made:
            ip("netns", "del", name)


@contextmanager
def a_plane(
    machines: Machines, home: Path, security: str = "auto", **environment: str
) -> Iterator[list[tuple[str, str, int]]]:
    """The ports of a driver with a plane in the first namespace. It still serves when the block has ended."""
    command = [sys.executable, "-m", "tests.data_plane.scenarios.listening_plane", security]
    driver = subprocess.Popen(
        ["ip", "netns", "exec", machines.plane, *command],
        env={**os.environ, "HOME": str(home), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(home / "log").open("w"),
        text=True,
    )
    assert driver.stdout is not None
    try:
        said = driver.stdout.readline()
        assert said, (home / "log").read_text()[-4000:]
        yield [(name, address, port) for name, address, port in json.loads(said)]
        told, _ = driver.communicate("", timeout=60)
        assert told.strip() == "[0, 1, 2]", (home / "log").read_text()[-4000:]
    finally:
        driver.kill()
        driver.wait()


def told(ports: list[tuple[str, str, int]], said: dict[str, str]) -> str:
    lines = [f"  {name} {address}:{port}: {said[str(port)]}" for name, address, port in ports if str(port) in said]
    return "\n".join([f"{len(said)} of {len(ports)} ports are open to another machine", *sorted(lines)])


def test_another_machine_reaches_no_port_of_a_plane_on_loopback(machines: Machines, tmp_path: Path) -> None:
    with a_plane(machines, tmp_path) as ports:
        numbers = [str(port) for _, _, port in ports]
        assert {"gcs_server", "raylet"} <= {name for name, _, _ in ports}
        assert machines.scan(machines.plane, "127.0.0.1", numbers).keys() == set(numbers), (
            "the scan finds what is there"
        )
        said = machines.scan(machines.other, machines.address, numbers)
        print(told(ports, said))
        assert said == {}


@pytest.mark.parametrize("security", ["auto", "trusted_network"])
def test_a_frame_that_another_machine_sends_to_a_plane_on_a_network_runs_no_code(
    machines: Machines, tmp_path: Path, security: str
) -> None:
    """To each open port go frames whose unpickling runs code. On a trusted network they do: they are no duds."""
    marker = tmp_path / "it ran"
    with a_plane(machines, tmp_path, security, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1") as ports:
        open_ports = machines.scan(machines.other, machines.address, [str(port) for _, _, port in ports])
        print(told(ports, open_ports))
        assert open_ports
        machines.run(machines.other, sys.executable, "-m", "tests.attacks", str(marker), machines.address, *open_ports)
        assert marker.exists() == (security == "trusted_network")
