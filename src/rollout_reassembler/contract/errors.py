"""Every error a caller can catch by name. All of them import from `rollout_reassembler` too.

Two families, and they never mix. A `ContractError` says that some *data* is wrong: it costs one
rollout, which becomes a placeholder under the error's `code`. Everything else (a lost data plane, a
misused call, a conflict) is a fault of the system or of the caller: it is raised, and nothing is
published or cleared because of it.

Most errors also are the builtin that a caller knows already (`ValueError`, `TimeoutError`, …). All of them
survive pickling: what was raised in an actor is what its caller catches.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEYS_SHOWN = 3


class ReassemblerError(Exception):
    """Root of all errors that this package raises on purpose."""


class ContractError(ReassemblerError, ValueError):
    """Data that breaks the wire contract. `code` is the machine-readable reason."""

    code = "invalid"

    def __init__(self, detail: str, *, code: str | None = None) -> None:
        self.code = code or type(self).code
        self.detail = detail
        super().__init__(f"{self.code}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_contract_error, (type(self), self.detail, self.code)


def _rebuild_contract_error(kind: type[ContractError], detail: str, code: str) -> ContractError:
    return kind(detail, code=code)


class InvalidReceipt(ContractError):
    """A receipt that is not one: wrong shape, unknown field, contradictory state."""

    code = "invalid_receipt"


class BoundExceeded(InvalidReceipt):
    """A receipt larger than its reader accepts; the detail names the bound."""


class InvalidStagedCall(ContractError):
    """A staged row that cannot be a staged call, or whose bytes do not hash to its digest."""

    code = "invalid_staging_row"


class InvalidRoutes(ContractError):
    """A routed-experts payload that is malformed or does not fit its call."""

    code = "invalid_routed_experts"


class InvalidRoutePlan(ContractError):
    """A route plan that contradicts itself, or an encoded one that cannot be read."""

    code = "invalid_route_plan"


class RouteFailure(ContractError):
    """A route plan that could not be executed; `code` is one of `reassembly.routes.FAILURE_CODES`."""


class VerificationError(ContractError):
    """Receipt and staged rows do not prove each other; `code` is one of the verification codes."""


class UnreadableConversation(ContractError):
    """Messages that are not plain JSON objects, so that nothing can be looked up by them."""

    code = "unreadable_conversation"


class InvalidLedger(ContractError):
    """A ledger with a whole line that is no row of it, as a newer writer would leave."""

    code = "invalid_ledger"


class RequestError(ReassemblerError, ValueError):
    """A request whose own shape is wrong: a part missing, of another length or type. Nothing was read or changed."""


class RpcPayloadError(ReassemblerError, TypeError):
    """Something other than metadata was about to cross an RPC.

    `path` says where it sits, for example `rpc.receipts[3]['manifest'][0]['token_ids']`.
    """

    def __init__(self, path: str, found: str) -> None:
        self.path = path
        self.found = found
        super().__init__(f"{path}: {found}")

    def __reduce__(self) -> tuple[object, ...]:
        return RpcPayloadError, (self.path, self.found)


class GroupConflict(ReassemblerError):
    """Another request was finalized under this group id, or another group's row lies under a sample id of it."""


class RequestCrashedActor(ReassemblerError, RuntimeError):
    """The actor died each time it tried this request. Nothing of the group is lost; asking again is safe."""


class RequestDeadlineExceeded(ReassemblerError, TimeoutError):
    """The pool's deadline passed. An actor may still finish the request; asking again is safe."""


class PoolClosed(ReassemblerError, RuntimeError):
    """The pool was closed, or its Ray was shut down, before this request was answered. Asking again is safe."""


class CallClosed(ReassemblerError, RuntimeError):
    """A call was completed, failed or aborted a second time."""


class LedgerConflict(ReassemblerError, RuntimeError):
    """A ledger was told two different things about one call, or of a call it never admitted."""


class MissingExtra(ReassemblerError, ImportError):
    """A feature whose libraries are not installed. The message has the `pip install` that brings them."""


class BadArchive(ReassemblerError, ValueError):
    """The archive can't be read. The message is one line for the person who named it."""


class DataPlaneError(ReassemblerError, RuntimeError):
    """A data-plane call failed. Says which call, on which partition, for which keys."""

    def __init__(
        self,
        what: str,
        *,
        call: str = "",
        partition: str = "",
        keys: Sequence[str] = (),
        seconds: float | None = None,
    ) -> None:
        self.what = what
        self.call = call
        self.partition = partition
        self.keys = tuple(keys)
        self.seconds = seconds
        super().__init__(self._message())

    def for_group(self, group_id: str) -> DataPlaneError:
        """The same error, naming the prompt group whose finalization it stopped."""
        what = f"group {group_id!r} was not finalized and its staged rows are as they were: {self.what}"
        return type(self)(what, call=self.call, partition=self.partition, keys=self.keys, seconds=self.seconds)

    def _message(self) -> str:
        where = f"{self.call}({self.partition!r})" if self.call and self.partition else self.call or self.partition
        parts = [f"{where}: {self.what}" if where else self.what]
        if self.keys:
            more = f", … {len(self.keys)} in all" if len(self.keys) > _KEYS_SHOWN else ""
            parts.append(f"keys {', '.join(map(repr, self.keys[:_KEYS_SHOWN]))}{more}")
        if self.seconds is not None:
            parts.append(f"after {self.seconds:.1f} s")
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.what, self.call, self.partition, self.keys, self.seconds)
        return _rebuild_data_plane_error, (type(self), *state)


def _rebuild_data_plane_error(
    kind: type[DataPlaneError], what: str, call: str, partition: str, keys: tuple[str, ...], seconds: float | None
) -> DataPlaneError:
    return kind(what, call=call, partition=partition, keys=keys, seconds=seconds)


class DataPlaneTimeout(DataPlaneError, TimeoutError):
    """A data-plane call did not answer within its deadline. Whether it took effect is unknown."""


class WriteFenced(DataPlaneTimeout):
    """A write whose process stood still while the plane was quiesced: the rest of it was not sent. Repeat it."""


class RowsCondemned(DataPlaneError):
    """A sweep is about to clear these rows, which were written in part: nothing was written. Put them again later."""


class DataPlaneUnavailable(DataPlaneError, ConnectionError):
    """The data plane, or the part of it that holds these rows, cannot be reached."""


class PlaneLost(DataPlaneError):
    """Staged rows are missing, and the plane is not the one that they were staged on, or has lost them all.

    Nothing was published, recorded or cleared. Stage the rollouts again and send the same request; or give
    them up knowingly, by sending it with `accept_lost=True`: what is missing becomes placeholders.
    """


class CheckpointDamaged(DataPlaneError):
    """A file of a checkpoint is cut, changed, missing or of another checkpoint. Nothing was loaded."""


class DataPlaneUnauthenticated(DataPlaneUnavailable):
    """A process of the data plane does not take this client's keys: it belongs to another plane, or to a later one."""


class PartitionNotRegistered(DataPlaneError):
    """The partition was never registered: register it once, before actors start."""


class SchemaViolation(DataPlaneError, ValueError):
    """A write that does not fit the partition's registered fields. Nothing was written."""


class RowsMissing(DataPlaneError, LookupError):
    """Some of the rows asked for are not there, or not readable. `keys` names exactly those."""


class StagedRowsMissing(RowsMissing):
    """Some of the staged calls asked for are not in the staging partition. `keys` names them."""
