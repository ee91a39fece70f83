"""Who gets a frame to a queue's processes, and what those hear who do not."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from rollout_reassembler.contract.errors import DataPlaneUnauthenticated, DataPlaneUnavailable
from rollout_reassembler.data_plane.base import FieldSpec
from rollout_reassembler.data_plane.config import DataPlaneConfig, Deadlines
from rollout_reassembler.data_plane.transfer_queue.keys import Keys, Mechanism
from tests.attacks import STRANGERS, malicious_frames, send
from tests.data_plane.plain_queue import PlainQueue, QueueHost, Server, in_a_call, with_keys

pytest.importorskip("transfer_queue")

DEADLINES = Deadlines(read=20, write=20, clear=20, metadata=20, connect=20)
MECHANISMS: list[Mechanism] = ["plain", "curve"]


@pytest.fixture(scope="module")
def host() -> Iterator[QueueHost]:
    host = QueueHost()
    yield host
    host.close()


def started(host: QueueHost, keys: Keys | None) -> PlainQueue:
    host.keys = keys
    return host.start_queue()


@pytest.fixture(params=MECHANISMS)
def queue(host: QueueHost, request: pytest.FixtureRequest) -> Iterator[PlainQueue]:
    queue = started(host, Keys.fresh(request.param))
    yield queue
    queue.stop()


def ports_of(queue: PlainQueue) -> dict[str, tuple[str, int]]:
    return {
        name: (server.address["ip"], port)
        for server in (queue.controller, queue.unit)
        for name, port in server.address["ports"].items()
    }


def use(queue: PlainQueue, partition: str) -> None:
    """A put, a read and a clear, by somebody with the keys."""
    plane = queue.connect(DEADLINES)
    plane.register_partition(partition, {"step": FieldSpec("int64")})
    plane.put_samples(["a"], partition, {"step": [1]})
    assert plane.get_samples(["a"], partition)["step"].tolist() == [1]
    plane.clear_samples(["a"], partition)
    plane.close()


def test_a_frame_from_a_stranger_is_never_unpickled(queue: PlainQueue, tmp_path: Path) -> None:
    ports = ports_of(queue)
    assert ports.keys() == {"handshake_socket", "request_handle_socket", "put_get_socket"}
    for name, (ip, port) in ports.items():
        for stranger in STRANGERS:
            assert not send(ip, port, malicious_frames(tmp_path / name), stranger), (name, stranger)
    use(queue, "p")
    assert list(tmp_path.iterdir()) == []


def test_on_a_trusted_network_anybodys_frame_runs_code(host: QueueHost, tmp_path: Path) -> None:
    """What `trusted_network` gives up, at each of the three ports; and a sign that the frames above are no duds."""
    queue = started(host, None)
    ports = ports_of(queue)
    for name, (ip, port) in ports.items():
        send(ip, port, malicious_frames(tmp_path / name), None)
    until = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < len(ports) and time.monotonic() < until:
        time.sleep(0.05)
    assert {path.name for path in tmp_path.iterdir()} == ports.keys()
    queue.stop()


def clients_of(queue: PlainQueue, keys: Keys | None) -> PlainQueue:
    """The same queue, for those with these keys."""

    return PlainQueue(
        *(Server(server.pid, with_keys(server.address, keys)) for server in (queue.controller, queue.unit))
    )


@pytest.mark.parametrize("kind", [None, *MECHANISMS])
def test_other_keys_are_an_error_that_says_so_long_before_the_deadline(
    queue: PlainQueue, kind: Mechanism | None
) -> None:
    other = clients_of(queue, Keys.fresh(kind) if kind else None)
    begun = time.monotonic()
    with pytest.raises(
        DataPlaneUnauthenticated, match=r"the queue's controller at .* does not let this client in"
    ) as e:
        other.connect(DEADLINES)
    assert time.monotonic() - begun < DEADLINES.connect / 2
    assert ("wants keys" in str(e.value)) == (kind is None)


@pytest.mark.parametrize("kind", MECHANISMS)
def test_keys_for_a_queue_without_any_are_an_error_that_says_so(host: QueueHost, kind: Mechanism) -> None:
    queue = started(host, None)
    with pytest.raises(DataPlaneUnauthenticated, match=f"it has no {kind} keys or others"):
        clients_of(queue, Keys.fresh(kind)).connect(DEADLINES)
    use(queue, "p")
    queue.stop()


def test_a_server_key_alone_lets_nobody_in(host: QueueHost, tmp_path: Path) -> None:
    keys = Keys.fresh("curve")
    queue = started(host, keys)
    half = Keys.fresh("curve").for_clients()
    half._server_public = keys._server_public
    with pytest.raises(DataPlaneUnauthenticated, match="these are not its curve keys"):
        clients_of(queue, half).connect(DEADLINES)
    for name, (ip, port) in ports_of(queue).items():
        assert not send(ip, port, malicious_frames(tmp_path / name), half)
    use(queue, "p")
    assert list(tmp_path.iterdir()) == []
    queue.stop()


def test_a_server_whose_doorkeeper_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    for mechanism in MECHANISMS:
        keys = Keys.fresh(mechanism)
        context: zmq.Context[Any] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        keys.serve(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert not send("127.0.0.1", port, [b"x"], keys.for_clients()), "it answered, though nobody serves"
        assert router.poll(1000), "who has the keys was not let in, so this shows nothing"
        alone: zmq.Context[Any] = zmq.Context()
        unguarded = alone.socket(zmq.ROUTER)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rollout_reassembler.data_plane.transfer_queue.keys._station", lambda *_: None)
            keys.serve(unguarded)
        port = unguarded.bind_to_random_port("tcp://127.0.0.1")
        send("127.0.0.1", port, [b"x"], keys.for_clients())
        assert not unguarded.poll(500)
        for socket, of in ((router, context), (unguarded, alone)):
            socket.close(linger=0)
            of.term()


def test_a_call_costs_no_new_handshake(queue: PlainQueue) -> None:
    plane = queue.connect(DEADLINES)
    for _ in range(5):
        in_a_call(plane, lambda call: plane._rows.controller.partitions(call))
    lines = plane._rows.sockets._idle
    assert [len(idle) for idle in lines.values()] == [1]
    assert next(plane._rows.sockets._numbers) == 1
    plane.close()


def secrets_of(keys: Keys) -> list[bytes]:
    return [value for name in Keys.__slots__ if isinstance(value := getattr(keys, name), bytes) and value]


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_keys_are_in_no_text(mechanism: Mechanism, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in their own, nor in that of the config which carries them, which TransferQueue logs."""
    from omegaconf import OmegaConf

    keys = Keys.fresh(mechanism)
    config = OmegaConf.create({"security": {"keys": keys}}, flags={"allow_objects": True})
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("transfer_queue").info("TransferQueue config: %s %r", config, keys)
    texts = [repr(keys), str(keys), repr(config), caplog.text, repr(vars(DataPlaneConfig()))]
    for secret in secrets_of(keys):
        assert not any(secret.decode() in text for text in texts)
    again = pickle.loads(pickle.dumps(config)).security["keys"]
    assert secrets_of(again) == secrets_of(keys)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_keys_are_fresh_and_clients_get_no_servers_secret(mechanism: Mechanism) -> None:
    one, other = Keys.fresh(mechanism), Keys.fresh(mechanism)
    assert not set(secrets_of(one)) & set(secrets_of(other))
    assert one.for_clients()._server_secret == b""
    assert one.for_clients()._password == one._password


def test_an_error_of_a_refused_client_holds_no_key(host: QueueHost) -> None:
    queue = started(host, Keys.fresh("plain"))
    keys = Keys.fresh("plain")
    with pytest.raises(DataPlaneUnavailable) as raised:
        clients_of(queue, keys).connect(DEADLINES)
    assert secrets_of(keys)[0].decode() not in str(raised.value) + repr(raised.value)
    queue.stop()
