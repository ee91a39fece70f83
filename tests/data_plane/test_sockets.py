"""Round trips over real sockets, with peers that do what the queue's own processes would not."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import zmq
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from rollout_reassembler.contract.errors import DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable
from rollout_reassembler.data_plane.transfer_queue.calls import CallSite, Peer
from rollout_reassembler.data_plane.transfer_queue.sockets import QueueSockets, all_bodies

SITE = CallSite("test", "p", ["a"])
QUESTION = (ZMQRequestType.GET_LIST_PARTITIONS, {})

Answers = Callable[[int], list[list[bytes]]]
"""What a peer sends up the line for the so-manieth request."""


def partitions(*ids: str) -> list[bytes]:
    message = ZMQMessage.create(ZMQRequestType.LIST_PARTITIONS_RESPONSE, "peer", {"partition_ids": list(ids)})
    return [bytes(frame) for frame in message.serialize()]


def refusal(what: str) -> list[bytes]:
    message = ZMQMessage.create(ZMQRequestType.REQUEST_ERROR, "peer", {"message": what})
    return [bytes(frame) for frame in message.serialize()]


@contextmanager
def peer(answers: Answers) -> Iterator[Peer]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    done = threading.Event()

    def serve() -> None:
        count = 0
        while not done.is_set():
            if router.poll(50):
                sender, *_ = router.recv_multipart()
                for answer in answers(count):
                    router.send_multipart([sender, *answer])
                count += 1
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Peer("a peer", "127.0.0.1", port)
    finally:
        done.set()
        thread.join()
        context.term()


@pytest.fixture
def sockets() -> Iterator[QueueSockets]:
    sockets = QueueSockets()
    yield sockets
    sockets.close(5)


def ask(sockets: QueueSockets, of: Peer, seconds: float = 5.0) -> list[str]:
    with sockets.call(SITE, seconds) as call:
        ids: list[str] = call.ask(of, *QUESTION)["partition_ids"]
        return ids


def dead_peer() -> Peer:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        return Peer("a dead peer", "127.0.0.1", held.getsockname()[1])


@pytest.mark.parametrize("garbage", [[b"garbage"], [b"\xc1\xfe\xed", b"no pickle"], [b""]], ids=repr)
def test_an_answer_that_cannot_be_read_is_an_error_of_the_plane(sockets: QueueSockets, garbage: list[bytes]) -> None:
    with peer(lambda count: [garbage if count == 0 else partitions("p")]) as odd:
        with pytest.raises(DataPlaneError, match=r"test\('p'\): a peer at .*: its answer cannot be read"):
            ask(sockets, odd)
        assert ask(sockets, odd) == ["p"]


def test_a_refusal_has_the_words_of_its_peer_and_waits_for_the_other_answers(sockets: QueueSockets) -> None:
    with peer(lambda count: [refusal("not today") if count == 0 else partitions(str(count))]) as moody:
        with (
            pytest.raises(DataPlaneError, match=r"a peer at 127\.0\.0\.1:\d+: not today"),
            sockets.call(SITE, 5) as call,
        ):
            all_bodies([call.send(moody, *QUESTION) for _ in range(3)])
        assert ask(sockets, moody) == ["3"]


def test_answers_are_those_of_their_requests(sockets: QueueSockets) -> None:
    with peer(lambda count: [partitions(str(count))]) as counting, sockets.call(SITE, 5) as call:
        replies = [call.send(counting, *QUESTION) for _ in range(5)]
        assert [reply.body()["partition_ids"] for reply in replies] == [[str(count)] for count in range(5)]


def test_a_late_answer_is_not_that_of_the_next_call(sockets: QueueSockets) -> None:
    may_answer = threading.Event()

    def late(count: int) -> list[list[bytes]]:
        if count == 0:
            may_answer.wait(10)
        return [partitions(str(count))]

    with peer(late) as slow:
        with pytest.raises(DataPlaneTimeout, match=r"no answer from a peer at .* after 0\.3 s"):
            ask(sockets, slow, 0.3)
        may_answer.set()
        assert ask(sockets, slow) == ["1"]


def test_an_answer_that_nobody_asked_for_is_not_that_of_the_next_call(sockets: QueueSockets) -> None:
    with peer(lambda count: [partitions(str(count)), partitions("twice")]) as talkative:
        assert ask(sockets, talkative) == ["0"]
        # The second answer comes up after the call: a moment later, as the socket is used again only then.
        line = sockets._idle[talkative][0]
        assert line.dealer.poll(5000)
        assert ask(sockets, talkative) == ["1"]


def test_a_call_that_is_broken_off_leaves_no_answer_to_the_next(sockets: QueueSockets) -> None:
    was_asked = threading.Event()

    def answer(count: int) -> list[list[bytes]]:
        was_asked.set()
        return [partitions(str(count))]

    def break_off(of: Peer) -> None:
        with sockets.call(SITE, 5) as call:
            call.send(of, *QUESTION)
            assert was_asked.wait(5)
            raise KeyboardInterrupt

    with peer(answer) as counting:
        with pytest.raises(KeyboardInterrupt):
            break_off(counting)
        assert ask(sockets, counting) == ["1"]


def test_a_dead_peer_is_noticed_behind_one_that_only_stalls(sockets: QueueSockets) -> None:
    with (
        peer(lambda _: []) as silent,
        pytest.raises(DataPlaneUnavailable, match=r"a dead peer .* is gone: it refuses connections"),
        sockets.call(SITE, 30) as call,
    ):
        all_bodies([call.send(silent, *QUESTION), call.send(dead_peer(), *QUESTION)])


def test_a_client_of_before_a_fork_says_so_in_the_child(sockets: QueueSockets) -> None:
    with peer(lambda count: [partitions(str(count))]) as counting:
        assert ask(sockets, counting) == ["0"]
        child = os.fork()
        if child == 0:
            try:
                ask(sockets, counting)
            except DataPlaneUnavailable as error:
                os._exit(0 if "before a fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask(sockets, counting) == ["1"]


def test_others_may_end_the_context_that_all_share(sockets: QueueSockets) -> None:
    zmq.Context.instance()
    with peer(lambda count: [partitions(str(count))]) as counting:
        assert ask(sockets, counting) == ["0"]
        zmq.Context.instance().destroy()
        assert ask(sockets, counting) == ["1"]


def test_a_client_that_nobody_closes_keeps_nobody_waiting() -> None:
    with peer(lambda count: [partitions(str(count))]) as counting:
        assert ask(QueueSockets(), counting) == ["0"]
        assert ask(QueueSockets(), counting) == ["1"]


def test_many_threads_share_a_client(sockets: QueueSockets) -> None:
    found: list[str] = []
    with peer(lambda count: [partitions(str(count))]) as counting:

        def work() -> None:
            for _ in range(20):
                found.extend(ask(sockets, counting, 30))

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(int, found)) == list(range(640))
