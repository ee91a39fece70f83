"""Worker side of staging: make calls durable, many at a time, and say honestly which are.

    sink = StagingSink(dp_client, staging_partition="staging")
    result = sink.stage(call)          # from any thread; returns when the row is durable
    if not result.ok: ...              # the call is not durable; result.error says why

A data plane pays per call, not per row, so calls that are staged at the same time share one put:
the first to arrive takes all that wait and writes them, the next batch gathers meanwhile. With
`window_s` above 0 the first waits that long for company. A batch that fails is retried call by
call, so that one bad record never costs its batch mates. Whatever the client or `route_shape` raises is
an answer, since the model's answer waits for it; what no plane is expected to raise is logged with its traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout_reassembler.contract.digests import encode_extras
from rollout_reassembler.contract.errors import (
    ContractError,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    ReassemblerError,
)
from rollout_reassembler.contract.records import StagedCall, StageResult
from rollout_reassembler.data_plane.base import RowStore
from rollout_reassembler.staging.codec import RouteShape, pack_call
from rollout_reassembler.staging.places import Staged, as_places, place_of
from rollout_reassembler.staging.routes import route_shape
from rollout_reassembler.staging.schema import CALL_FIELD, EXTRAS_FIELD, ROLLOUT_TAG, STAGED_AT_TAG

LOGGER = logging.getLogger(__name__)


@dataclass
class _Pending:
    """One encoded call on its way: done once a put has answered for it, with an error if it is not durable."""

    staging_key: str
    place: str
    rollout_id: str
    value: bytes
    extras: bytes
    done: bool = False
    error: str = "interrupted before the data plane answered"

    @property
    def result(self) -> StageResult:
        if self.error:
            return StageResult(ok=False, error=self.error)
        return StageResult(ok=True, staging_key=self.staging_key)


class StagingSink:
    """Stages calls into one partition. Safe to share between the threads of a worker.

    `route_shape` tells what routes a call's extras hold, for the plan of router replay; `window_s` is
    how long, in seconds, a put waits for other calls, `max_batch_bytes` bounds one put.
    """

    def __init__(
        self,
        dp_client: RowStore,
        *,
        staging_partition: str,
        window_s: float = 0.0,
        max_batch_bytes: int = 64 << 20,
        route_shape: Callable[[StagedCall], RouteShape] = route_shape,
    ) -> None:
        self._client = dp_client
        self._partition = staging_partition
        self._window_s = window_s
        self._max_batch_bytes = max_batch_bytes
        self._route_shape = route_shape
        self._waiting: list[_Pending] = []
        self._turn = threading.Condition()
        self._writing = False

    def stage(self, record: StagedCall) -> StageResult:
        """Make one call durable. Bad data and a failing plane raise nothing; the result says so."""
        pending = self._encode(record)
        if isinstance(pending, StageResult):
            return pending
        with self._turn:
            self._waiting.append(pending)
            while self._writing and not pending.done:
                self._turn.wait()
            if pending.done:
                return pending.result
            self._writing = True
        try:
            if self._window_s:
                time.sleep(self._window_s)
            while not pending.done:
                self._write_next_batch()
        finally:
            with self._turn:
                self._writing = False
                self._turn.notify_all()
        return pending.result

    def stage_all(self, records: Sequence[StagedCall]) -> list[StageResult]:
        """Stage several calls in as few puts as their bytes allow; results in the same order."""
        encoded = [self._encode(record) for record in records]
        waiting = [pending for pending in encoded if isinstance(pending, _Pending)]
        while waiting:
            self._write(self._take_batch(waiting))
        return [pending.result if isinstance(pending, _Pending) else pending for pending in encoded]

    def clear(self, keys: Sequence[str | Staged]) -> None:
        """Remove staged rows: staged calls, manifest rows, or places (`FinalizedGroup.staging_keys`).

        Raises `RequestError` for a bare staging key, and `DataPlaneError`.
        """
        if keys:
            self._client.clear_samples(as_places(keys), self._partition)

    def _encode(self, record: StagedCall) -> _Pending | StageResult:
        try:
            routes = self._route_shape(record)
            extras = encode_extras(record.extras) if record.extras is not None else b""
            return _Pending(record.staging_key, place_of(record), record.rollout_id, pack_call(record, routes), extras)
        except ContractError as error:
            return StageResult(ok=False, error=str(error))
        except Exception as error:
            LOGGER.exception("call %r of rollout %r cannot be staged", record.model_call_id, record.rollout_id)
            return StageResult(ok=False, error=_told(error))

    def _write_next_batch(self) -> None:
        with self._turn:
            batch = self._take_batch(self._waiting)
        try:
            self._write(batch)
        finally:
            with self._turn:
                self._turn.notify_all()

    def _take_batch(self, waiting: list[_Pending]) -> list[_Pending]:
        """Take what fits one put off the front; a call that comes twice waits for the next put."""
        batch: list[_Pending] = []
        places: set[str] = set()
        size = 0
        while waiting and waiting[0].place not in places:
            size += len(waiting[0].value) + len(waiting[0].extras)
            if batch and size > self._max_batch_bytes:
                break
            places.add(waiting[0].place)
            batch.append(waiting.pop(0))
        return batch

    def _write(self, batch: list[_Pending]) -> None:
        """Write a batch; every call in it is done afterwards, durable or with its error."""
        try:
            error = self._tried(batch)
            if error is not None and len(batch) > 1 and not _is_lost(error):
                self._write_one_by_one(batch)
            else:
                _settle(batch, error)
        finally:
            for pending in batch:
                pending.done = True

    def _write_one_by_one(self, batch: list[_Pending]) -> None:
        """Find the record whose fault a refusal was. A plane that is gone by now is gone for the rest as well."""
        for index, pending in enumerate(batch):
            error = self._tried([pending])
            _settle([pending], error)
            if error is not None and _is_lost(error):
                _settle(batch[index + 1 :], error)
                return

    def _tried(self, batch: list[_Pending]) -> Exception | None:
        try:
            self._put(batch)
        except DataPlaneError as error:
            return error
        except Exception as error:
            LOGGER.exception("a put of %d calls raised what no data plane should", len(batch))
            return error
        return None

    def _put(self, batch: list[_Pending]) -> None:
        staged_at = self._client.now()
        self._client.put_samples(
            [pending.place for pending in batch],
            self._partition,
            {CALL_FIELD: [p.value for p in batch], EXTRAS_FIELD: [p.extras for p in batch]},
            [{ROLLOUT_TAG: p.rollout_id, STAGED_AT_TAG: staged_at} for p in batch],
        )


def _is_lost(error: Exception) -> bool:
    """Whether the plane is silent or gone: so it is for each call alone, after a deadline each."""
    return isinstance(error, DataPlaneTimeout | DataPlaneUnavailable)


def _settle(batch: list[_Pending], error: Exception | None) -> None:
    for pending in batch:
        pending.error = "" if error is None else _told(error)


def _told(error: Exception) -> str:
    """What an error says; with its type, where that is none of ours."""
    return str(error) if isinstance(error, ReassemblerError) else f"{type(error).__name__}: {error}"
