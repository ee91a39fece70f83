"""What a client asks the queue's controller, and tells it. Each is a round trip.

The controller numbers rows with *global indexes*, and hands an index out again once its row was
cleared. It answers a question about keys without saying which of them it does not know, and it
reports a column only if all rows asked for have it.
"""

from __future__ import annotations

from typing import Any

from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.zmq_utils import ZMQRequestType

from rollout_reassembler.data_plane.base import Tags
from rollout_reassembler.data_plane.transfer_queue.calls import Peer
from rollout_reassembler.data_plane.transfer_queue.sockets import Call, Reply

_SET_ASIDE = "rollout_reassembler.set_aside"
_SET_ASIDE_AT_ONCE = 8192


class QueueController:
    """The controller of one queue, as its clients see it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def send(self, call: Call, request: ZMQRequestType, body: dict[str, Any]) -> Reply:
        return call.send(self.peer, request, body)

    def ask(self, call: Call, request: ZMQRequestType, body: dict[str, Any]) -> dict[str, Any]:
        """One round trip to the controller; the body of its answer."""
        return call.ask(self.peer, request, body)

    def meta_of(self, call: Call, partition: str, keys: list[str], *, create: bool = False) -> BatchMeta:
        """Numbers, tags and common columns of those rows that are there, or of all once they are created."""
        return self.send_numbering(call, partition, keys, create=create).body()["metadata"]

    def send_numbering(self, call: Call, partition: str, keys: list[str], *, create: bool) -> Reply:
        question = {"keys": keys, "partition_id": partition, "create": create}
        return self.send(call, ZMQRequestType.KV_RETRIEVE_META, question)

    def keys_of(self, call: Call, partition: str, meta: BatchMeta) -> list[str | None]:
        """The key of each row of `meta`; `None` for one that was cleared meanwhile."""
        if len(meta) == 0:
            return []
        question = {"global_indexes": meta.global_indexes, "partition_id": partition}
        answer = self.ask(call, ZMQRequestType.KV_RETRIEVE_KEYS, question)
        keys: list[str | None] = answer["keys"]
        return keys

    def readable(self, call: Call, partition: str, wanted: list[str], meta: BatchMeta, names: list[str]) -> list[str]:
        """Those of `wanted` whose every column was announced: neither unknown, nor half written, nor being cleared."""
        keys = self.keys_of(call, partition, meta)
        produced = self.produced(call, partition, names)
        readable = {key for key, index in zip(keys, meta.global_indexes, strict=True) if index in produced}
        return [key for key in wanted if key in readable]

    def produced(self, call: Call, partition: str, names: list[str]) -> set[int]:
        """The global indexes of all rows of the partition that hold these columns."""
        question = {"partition_id": partition, "data_fields": names}
        answer = self.ask(call, ZMQRequestType.GET_PRODUCTION, question)
        indexes, status = answer["global_index"], answer["production_status"]
        if indexes is None or status is None:
            return set()
        return set(indexes[(status == 1).all(dim=1)].tolist())

    def count_ready(self, call: Call, partition: str, task: str, names: list[str]) -> int:
        produced = self.produced(call, partition, names)
        indexes, status = self.consumption(call, partition, task)
        if indexes is None or status is None:
            return 0
        return len(produced.difference(indexes[status == 1].tolist()))

    def consumption(self, call: Call, partition: str, task: str) -> tuple[Any, Any]:
        """The global indexes of the partition's rows, and which of them the task has claimed (1)."""
        question = {"partition_id": partition, "task_name": task}
        answer = self.ask(call, ZMQRequestType.GET_CONSUMPTION, question)
        return answer["global_index"], answer["consumption_status"]

    def cells(self, call: Call, partition: str, column: str) -> dict[int, Any]:
        """What is kept with this column, by global index, also of rows that a clear has hidden and not removed."""
        meta = self.ask(call, ZMQRequestType.GET_PARTITION_META, {"partition_id": partition})["metadata"]
        if not meta:
            return {}
        rows = zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
        return {index: row[column] for index, row in rows if column in row}

    def list_all(self, call: Call, partition: str) -> dict[str, Tags]:
        """All keys of the partition with their tags."""
        answer = self.ask(call, ZMQRequestType.KV_LIST, {"partition_id": partition})
        tags: dict[str, Tags] = answer["partition_info"].get(partition, {})
        return tags

    def partitions(self, call: Call) -> list[str]:
        """The ids of all partitions. Any controller that is there answers this."""
        request = ZMQRequestType.GET_LIST_PARTITIONS
        ids: list[str] = self.ask(call, request, {})["partition_ids"]
        return ids

    def set_numbers_aside(self, call: Call, count: int) -> None:
        """Have the controller hand out this many other numbers before one that is freed comes back.

        It gives freed numbers to new rows, the longest free ones first; of a new queue none is free. A call
        that numbered its rows and is then held up would meet other rows under them soon.
        """
        for start in range(0, count, _SET_ASIDE_AT_ONCE):
            keys = [str(number) for number in range(start, min(start + _SET_ASIDE_AT_ONCE, count))]
            self.meta_of(call, _SET_ASIDE, keys, create=True)
        request = ZMQRequestType.CLEAR_PARTITION
        self.ask(call, request, {"partition_id": _SET_ASIDE})
