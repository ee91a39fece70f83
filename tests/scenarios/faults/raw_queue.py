"""Writing to a queue as any TransferQueue client may: with no schema, no checks, and none of our columns."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from tests.captures import STAGING
from tests.data_plane.plain_queue import in_a_call


def raw_put(
    plane: Any, key: str, fields: dict[str, Any] | None = None, tags: dict[str, Any] | None = None, *, to: str = STAGING
) -> None:
    """What `transfer_queue.kv_put` does, over the sockets of a connected plane."""
    in_a_call(plane, lambda call: _put(call, plane._rows, key, fields, tags, to))


def _put(
    call: Any, rows: Any, key: str, fields: dict[str, Any] | None, tags: dict[str, Any] | None, partition: str
) -> None:
    from transfer_queue.metadata import extract_field_schema
    from transfer_queue.utils.zmq_utils import ZMQRequestType

    meta = rows.controller.meta_of(call, partition, [key], create=True)
    if fields is not None:
        values = TensorDict(fields, batch_size=1)
        rows._store.put(call, meta, {name: _unbound(values[name]) for name in fields})
        schema = extract_field_schema(values)
        for column in schema.values():
            if shapes := column.get("per_sample_shapes"):
                column["per_sample_shapes"] = dict(zip(meta.global_indexes, shapes, strict=True))
        news = {"partition_id": partition, "global_indexes": meta.global_indexes, "field_schema": schema}
        # Refused or not: the queue's own client only logs that.
        call.ask(rows.controller.peer, ZMQRequestType.NOTIFY_DATA_UPDATE, news)
    if tags is not None:
        rows._send_tags(call, partition, meta, [tags]).body()


def _unbound(column: Any) -> list[Any]:
    return list(column.unbind()) if hasattr(column, "is_nested") else column.tolist()
