"""What a plane holds, in values that compare bit by bit."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np

from rollout_reassembler.contract.errors import SchemaViolation
from rollout_reassembler.data_plane.base import DataPlaneClient
from tests.captures import CANONICAL, STAGING

RECORDS = f"{CANONICAL}.groups"
LOST = f"{STAGING}.lost"

Cells = tuple[tuple[str, str, tuple[int, ...], bytes], ...]
Contents = dict[str, tuple[Cells, str]]


def contents_of(plane: DataPlaneClient, partition: str) -> Contents:
    """Each row of a partition: its columns as (name, dtype, shape, bytes), and its tags as JSON."""
    if not plane.is_registered(partition):
        return {}
    tags = plane.list_samples(partition)
    if partition == LOST:  # when a rollout was marked is another time each time
        return dict.fromkeys(sorted(tags), ((), "{}"))
    return {key: (_cells(plane, partition, key), json.dumps(tags[key], sort_keys=True)) for key in sorted(tags)}


def whole_plane(plane: DataPlaneClient) -> dict[str, Contents]:
    return {partition: contents_of(plane, partition) for partition in (STAGING, CANONICAL, RECORDS, LOST)}


def published(plane: DataPlaneClient, sample_ids: list[str]) -> list[dict[str, Any]]:
    """The canonical rows under these ids, a dict of columns each."""
    return [row for _, row in plane.get_samples(sample_ids, CANONICAL).rows()]


_COLUMNS = {
    STAGING: ("call", "extras"),
    CANONICAL: (
        "input_ids",
        "input_lengths",
        "token_mask",
        "generation_logprobs",
        "sample_mask",
        "prompt_ids_for_adv",
        "total_reward",
        "mask_sample",
        "truncated",
        "routed_experts",
    ),
    RECORDS: (),
    LOST: (),
}


def _cells(plane: DataPlaneClient, partition: str, key: str) -> Cells:
    """The columns that the row has; a torn put leaves some of them out, and routes may not be registered."""
    cells = []
    for name in _COLUMNS[partition]:
        with suppress(SchemaViolation):
            batch = plane.get_samples([key], partition, [name], partial=True)
            for value in batch[name]:
                array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)
                cells.append((name, str(array.dtype), array.shape, array.tobytes()))
    return tuple(cells)
