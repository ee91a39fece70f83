"""Where the reference arm keeps its rows: the same queue as ours, or a dict where there is no queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Columns = dict[str, torch.Tensor]
"""Column name to a dense tensor `[rows, …]` or a jagged one, one cell a row."""


class ReferenceRows(Protocol):
    """Rows by key, in partitions."""

    def put(self, partition: str, keys: list[str], columns: Columns, tags: list[dict[str, Any]] | None = None) -> None:
        """Write these columns of these rows."""

    def get(self, partition: str, keys: list[str], names: list[str]) -> Columns:
        """These columns of these rows, in the order of `keys`."""

    def clear(self, partition: str, keys: list[str]) -> None:
        """Remove these rows."""


class QueueRows:
    """TransferQueue's public key-value calls, in a process that is attached to a running queue."""

    def put(self, partition: str, keys: list[str], columns: Columns, tags: list[dict[str, Any]] | None = None) -> None:
        import transfer_queue
        from tensordict import TensorDict

        fields = TensorDict(columns, batch_size=[len(keys)])
        transfer_queue.kv_batch_put(keys, partition, fields, tags)

    def get(self, partition: str, keys: list[str], names: list[str]) -> Columns:
        import transfer_queue

        batch = transfer_queue.kv_batch_get(keys, partition, names)
        if len(batch) != len(keys) or set(batch.keys()) != set(names):
            raise RuntimeError(f"the queue returned {len(batch)} of {len(keys)} rows, columns {sorted(batch.keys())}")
        return {name: batch[name] for name in names}

    def clear(self, partition: str, keys: list[str]) -> None:
        import transfer_queue

        transfer_queue.kv_clear(keys, partition)


class HeldRows:
    """The same rows in a dict of this process: the cost of the format and the verifier, without a queue."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def put(self, partition: str, keys: list[str], columns: Columns, tags: list[dict[str, Any]] | None = None) -> None:
        cells = {name: column.unbind() for name, column in columns.items()}
        for index, key in enumerate(keys):
            row = self._cells.setdefault((partition, key), {})
            row.update({name: column[index].clone() for name, column in cells.items()})

    def get(self, partition: str, keys: list[str], names: list[str]) -> Columns:
        rows = [self._cells[partition, key] for key in keys]
        return {name: _column([row[name] for row in rows]) for name in names}

    def clear(self, partition: str, keys: list[str]) -> None:
        for key in keys:
            self._cells.pop((partition, key), None)


def _column(cells: Sequence[torch.Tensor]) -> torch.Tensor:
    if cells[0].ndim == 0:
        return torch.stack(list(cells))
    return torch.nested.as_nested_tensor(list(cells), layout=torch.jagged)
