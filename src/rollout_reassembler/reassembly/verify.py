"""Receipt × staged calls → one proven row, or the reason why there is none.

Comes in: a receipt, and its calls in manifest order, as packed values (`prove_rollout`) or each already proven
to hash to its own digest (`verify_and_linearize`). Goes out: the chain from its root to the receipt's terminal
as one `LinearizedRow`. In between, the claims that tie them together are checked in a fixed order, and the first
one that fails gives its code:

    receipt state → one row per manifest row, each equal to it → the call graph → the chain's hashes

Worked example. Manifest: a (root), b and b' (both children of a; b' was abandoned), c (child of b);
terminal c. All four rows are compared with the manifest, so an abandoned call cannot hide bad
bytes; the graph may hold any number of branches; only a, b, c become the row:

    tokens  = a.delta + b.delta + c.delta        mask, log probabilities likewise
    chain   = H(H(H(∅, a), b), c), each link equal to what the manifest row says
    terminal's cumulative hash = H(tokens)

Codes and their order are those of `nemo_gym.token_id_capture.staging.rebuild` (nemo-gym 0.7.0).
Cost: each of the chain's tokens is hashed twice here (chain, cumulative) over bytes as they were
staged, 16 bytes a token; the graph is walked once, in linear time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from rollout_reassembler.contract.digests import (
    CUMULATIVE_DOMAIN,
    EXTRAS_DIGEST_VERSION,
    Floats,
    Integers,
    encoded_chain_link,
    u64,
)
from rollout_reassembler.contract.errors import ContractError, InvalidStagedCall, VerificationError
from rollout_reassembler.contract.records import CallRecord, RolloutReceipt, StagedCall
from rollout_reassembler.reassembly.branches import cut
from rollout_reassembler.staging.codec import (
    LISTED_FIELDS,
    PackedCall,
    RouteShape,
    pack_call,
    unpack_call,
    unpack_listed,
)
from rollout_reassembler.staging.source import prove_call


class WeightVersionSpan(NamedTuple):
    """Tokens `[start, end)` of the row were added by a call that this weight version admitted."""

    model_call_id: str
    start: int
    end: int
    weight_version: int


class LinkSpan(NamedTuple):
    """How many tokens of the row a call carried in, then generated."""

    model_call_id: str
    carry_len: int
    generation_len: int


class ExtrasCommitment(NamedTuple):
    """What a chain call's extras must hash to. Says nothing about their presence."""

    model_call_id: str
    extras_digest_version: int
    extras_digest: str


class LinearizedRow(NamedTuple):
    """A proven chain, root to terminal. `token_ids` int64 `[T]`, `token_mask` and `logprobs` float32 `[T]`.

    The lists have one entry a call of the chain, each in chain order. `owned` says which calls are trained in
    this row: all of them, unless the row is one of several of its rollout. A call that is not is context: its
    mask and log probabilities are 0.
    """

    rollout_id: str
    token_ids: Integers
    token_mask: Floats
    logprobs: Floats
    calls: tuple[PackedCall, ...]
    owned: tuple[bool, ...]

    @property
    def model_call_ids(self) -> list[str]:
        return [call.model_call_id for call in self.calls]

    @property
    def call_ids(self) -> list[str]:
        return self.model_call_ids

    @property
    def prompt_len(self) -> int:
        """The root's carry, in tokens."""
        return self.calls[0].carry_len or 0

    @property
    def weight_versions(self) -> list[int]:
        return [call.weight_version for call in self.calls]

    @property
    def weight_version_spans(self) -> list[WeightVersionSpan]:
        # A call's positions in its chain are its positions in the row.
        return [
            WeightVersionSpan(call.model_call_id, call.prev_len, call.cum_len, call.weight_version)
            for call in self.calls
        ]

    @property
    def link_spans(self) -> list[LinkSpan]:
        carries = [(call, call.carry_len or 0) for call in self.calls]
        return [LinkSpan(call.model_call_id, carry, call.delta_len - carry) for call, carry in carries]

    @property
    def extras_commitments(self) -> list[ExtrasCommitment]:
        return [ExtrasCommitment(call.model_call_id, EXTRAS_DIGEST_VERSION, call.extras_digest) for call in self.calls]

    @property
    def route_shapes(self) -> list[RouteShape]:
        return [call.routes for call in self.calls]


def verify_and_linearize(receipt: RolloutReceipt, calls: Sequence[StagedCall | PackedCall]) -> LinearizedRow:
    """Prove `calls` (in manifest order) against `receipt` and linearize its terminal chain.

    Raises `VerificationError`, whose `code` names the first claim that does not hold.
    """
    check_receipt_state(receipt)
    return _linearize(receipt, _match_rows(receipt, calls))


def prove_rollout(receipt: RolloutReceipt, values: Sequence[bytes]) -> LinearizedRow:
    """Prove packed `values` (in manifest order) against `receipt` and linearize its terminal chain.

    Each value was found under its manifest row's key, and the receipt's keys are those of its calls, as admission
    has checked. Raises `InvalidStagedCall` for a value that is not its key's call, and `VerificationError` as
    `verify_and_linearize` does.
    """
    listed = unpack_listed(values, receipt.rollout_id, receipt.manifest)
    calls = [call for call in listed if call is not None]
    if len(calls) < len(listed):
        entries = zip(listed, receipt.manifest, values, strict=True)
        return verify_and_linearize(receipt, [call or prove_call(r.staging_key, value) for call, r, value in entries])
    check_receipt_state(receipt)
    return _linearize(receipt, {call.model_call_id: call for call in calls})


class ProvenForest(NamedTuple):
    """All rows of a rollout, earliest leaf first, and what could not be proven, by call id.

    `sampled_tokens` counts those of all calls that were proven, in a row or not.
    """

    rows: tuple[LinearizedRow, ...]
    faults: dict[str, ContractError]
    sampled_tokens: int


def prove_forest(
    receipt: RolloutReceipt,
    values: Sequence[bytes | None],
    *,
    keep_retries: bool = False,
    max_tokens: int | None = None,
) -> ProvenForest:
    """Prove packed `values` (in manifest order, `None` where there is none) and cut them into rows.

    What cannot be proven costs the chains that hold it; the terminal's chain must be sound. A chain of more than
    `max_tokens` is no row. Raises
    `VerificationError` and `InvalidStagedCall` as `prove_rollout` does where the receipt itself contradicts
    itself, or a call of the terminal's chain cannot be proven (`missing_staging_row` where it is not there).
    """
    check_receipt_state(receipt)
    terminal_chain = _terminal_chain(receipt)
    calls, faults = _each_proven(receipt, values)
    links: dict[str, bytes] = {}
    for record in sorted(receipt.manifest, key=attrgetter("cum_len")):  # a parent ends before its child
        call_id, parent_id = record.model_call_id, record.parent_call_id
        if call_id not in calls or (parent_id is not None and parent_id not in links):
            continue
        try:
            links[call_id] = _checked_link(calls[call_id], links[parent_id] if parent_id is not None else b"")
        except VerificationError as error:
            faults[call_id] = error
    for record in terminal_chain:
        if record.model_call_id in faults:
            raise faults[record.model_call_id]
    _check_cumulative_hash([calls[record.model_call_id] for record in terminal_chain])
    sound = {call_id: calls[call_id] for call_id in links}
    segments = cut(
        receipt.manifest,
        sound,
        terminal=receipt.terminal_model_call_id,
        keep_retries=keep_retries,
        max_tokens=max_tokens,
    )
    rows = [
        _joined(receipt.rollout_id, [sound[call_id] for call_id in segment.call_ids], segment.owned)
        for segment in segments
    ]
    sampled = sum(call.delta_len - (call.carry_len or 0) for call in sound.values())
    return ProvenForest(tuple(rows), faults, sampled)


def _each_proven(
    receipt: RolloutReceipt, values: Sequence[bytes | None]
) -> tuple[dict[str, PackedCall], dict[str, ContractError]]:
    """Each manifest row's call where its value is that call, and why it is not where it isn't, by call id."""
    calls: dict[str, PackedCall] = {}
    faults: dict[str, ContractError] = {}
    for record, value in zip(receipt.manifest, values, strict=True):
        try:
            if value is None:
                raise InvalidStagedCall(f"{record.staging_key!r} is missing", code="missing_staging_row")
            (listed,) = unpack_listed([value], receipt.rollout_id, [record])
            call = listed or prove_call(record.staging_key, value)
            _match_fields(receipt.rollout_id, record, call)
            calls[record.model_call_id] = call
        except (InvalidStagedCall, VerificationError) as error:
            faults[record.model_call_id] = error
    return calls, faults


def check_receipt_state(receipt: RolloutReceipt) -> None:
    """Refuse a receipt that cannot be trained, before any of its rows are read."""
    if receipt.failure_reason is not None:
        raise VerificationError(receipt.failure_reason, code="rollout_failed")
    if receipt.capture_poisoned:
        raise VerificationError("the receipt says that capture was poisoned", code="capture_poisoned")
    if not receipt.manifest:
        raise VerificationError("the receipt lists no call", code="empty_manifest")
    if len({record.model_call_id for record in receipt.manifest}) != len(receipt.manifest):
        raise VerificationError("a model_call_id is listed twice", code="duplicate_manifest_row")
    if len({record.staging_key for record in receipt.manifest}) != len(receipt.manifest):
        raise VerificationError("a staging key is listed twice", code="duplicate_staging_key")


def _match_rows(receipt: RolloutReceipt, calls: Sequence[StagedCall | PackedCall]) -> dict[str, PackedCall]:
    """Each manifest row's call, equal to it in every field. Keyed by call id, in manifest order."""
    if len(calls) != len(receipt.manifest):
        raise VerificationError(f"{len(calls)} rows for {len(receipt.manifest)} calls", code="row_count_mismatch")
    listed = {record.model_call_id for record in receipt.manifest}
    packed: dict[str, PackedCall] = {}
    for record, call in zip(receipt.manifest, calls, strict=True):
        if call.model_call_id in packed:
            raise VerificationError(f"call {call.model_call_id!r} comes twice", code="duplicate_snapshot")
        if call.model_call_id != record.model_call_id:
            code = "snapshot_order_mismatch" if call.model_call_id in listed else "snapshot_identity_mismatch"
            raise VerificationError(f"expected call {record.model_call_id!r}, got {call.model_call_id!r}", code=code)
        _match_fields(receipt.rollout_id, record, call)
        packed[call.model_call_id] = call if isinstance(call, PackedCall) else _prove(call)
    return packed


def _prove(call: StagedCall) -> PackedCall:
    """A record's packed form. Records prove themselves when made, unless they were made unvalidated."""
    try:
        return unpack_call(pack_call(call))
    except InvalidStagedCall as error:
        raise VerificationError(f"call {call.model_call_id!r}: {error.detail}", code="corrupt_digest") from error


_MATCHED_FIELDS = tuple(name for name in LISTED_FIELDS if name != "model_call_id")
_matched_fields = attrgetter(*_MATCHED_FIELDS)


def _match_fields(rollout_id: str, record: CallRecord, row: StagedCall | PackedCall) -> None:
    if row.rollout_id != rollout_id:
        raise VerificationError(f"call {row.model_call_id!r} belongs to {row.rollout_id!r}", code="wrong_rollout")
    staged, listed = _matched_fields(row), _matched_fields(record)
    if staged != listed:
        pairs = zip(_MATCHED_FIELDS, staged, listed, strict=True)
        name, found, expected = next(pair for pair in pairs if pair[1] != pair[2])
        raise VerificationError(
            f"call {row.model_call_id!r}: staged {found!r}, listed {expected!r}", code=f"wrong_{name}"
        )


def _terminal_chain(receipt: RolloutReceipt) -> list[CallRecord]:
    """The chain that ends in the receipt's terminal, root first, after checking the whole graph.

    Lengths grow strictly from parent to child (a delta is never empty), so a graph whose links
    agree in length has no cycle; looking at each link once is enough. Where one does not agree, a
    cycle that an earlier call leads into is what is reported.
    """
    by_id = {record.model_call_id: record for record in receipt.manifest}
    for position, record in enumerate(receipt.manifest):
        if record.parent_call_id is None:
            continue
        parent = by_id.get(record.parent_call_id)
        if parent is None:
            _refuse_cycle(receipt.manifest[:position], by_id)
            raise VerificationError(
                f"call {record.model_call_id!r} names the absent parent {record.parent_call_id!r}",
                code="missing_parent",
            )
        if parent.cum_len != record.prev_len:
            _refuse_cycle(receipt.manifest[:position], by_id)
            raise VerificationError(
                f"call {record.model_call_id!r} starts at {record.prev_len}, its parent ends at {parent.cum_len}",
                code="parent_length_mismatch",
            )
    terminal = by_id.get(receipt.terminal_model_call_id or "")
    if terminal is None:
        raise VerificationError(f"terminal {receipt.terminal_model_call_id!r} is not listed", code="missing_terminal")
    chain = [terminal]
    while (parent_id := chain[-1].parent_call_id) is not None:
        chain.append(by_id[parent_id])
    chain.reverse()
    return chain


def _refuse_cycle(records: Sequence[CallRecord], by_id: Mapping[str, CallRecord]) -> None:
    """Raise `lineage_cycle` if the parents of one of these calls lead in a circle. Linear: no call is walked twice."""
    acyclic: set[str] = set()
    for record in records:
        walked: set[str] = set()
        cursor: CallRecord | None = record
        while cursor is not None and cursor.model_call_id not in acyclic:
            if cursor.model_call_id in walked:
                raise VerificationError(f"a cycle reaches call {cursor.model_call_id!r}", code="lineage_cycle")
            walked.add(cursor.model_call_id)
            cursor = by_id.get(cursor.parent_call_id or "")
        acyclic |= walked


def _linearize(receipt: RolloutReceipt, proven: Mapping[str, PackedCall]) -> LinearizedRow:
    """Put the terminal chain's deltas end to end, checking the graph, each link and then the whole."""
    chain = [proven[record.model_call_id] for record in _terminal_chain(receipt)]
    link = b""
    for call in chain:
        link = _checked_link(call, link)
    row = _joined(receipt.rollout_id, chain, (True,) * len(chain))
    _check_cumulative_hash(chain)
    return row


def _checked_link(call: PackedCall, parent_link: bytes) -> bytes:
    """The call's chain hash, raw, once it extends its parent's and is carry, then generation."""
    link = encoded_chain_link(parent_link, call.encoded_token_ids)
    if link.hex() != call.chain_hash:
        raise VerificationError(
            f"call {call.model_call_id!r} does not extend its parent's chain", code="chain_hash_mismatch"
        )
    if call.carry_len is None:
        raise VerificationError(
            f"the mask of call {call.model_call_id!r} is not carry, then generation", code="invalid_mask_order"
        )
    if call.carry_len == call.delta_len:
        raise VerificationError(f"call {call.model_call_id!r} generated no token", code="empty_generation")
    return link


def _check_cumulative_hash(chain: Sequence[PackedCall]) -> None:
    terminal = chain[-1]
    cumulative = hashlib.sha256(CUMULATIVE_DOMAIN + u64(terminal.cum_len))
    for call in chain:
        cumulative.update(call.encoded_token_ids[8:])
    if cumulative.hexdigest() != terminal.cumulative_hash:
        raise VerificationError(
            f"the cumulative hash of terminal {terminal.model_call_id!r} does not cover the row's tokens",
            code="cumulative_hash_mismatch",
        )


def _joined(rollout_id: str, chain: Sequence[PackedCall], owned: tuple[bool, ...]) -> LinearizedRow:
    """The chain's deltas end to end; what is sampled in a call that the row does not own is context."""
    runs = [length for call in chain for length in (call.carry_len or 0, call.delta_len - (call.carry_len or 0))]
    masks = [float(trained) for own in owned for trained in (False, own)]
    log_probs = [
        call.encoded_log_probs if own else bytes(4 * call.delta_len) for call, own in zip(chain, owned, strict=True)
    ]
    return LinearizedRow(
        rollout_id=rollout_id,
        token_ids=np.frombuffer(b"".join(call.encoded_token_ids[8:] for call in chain), ">i8").astype(np.int64),
        token_mask=np.repeat(np.array(masks, np.float32), runs),
        logprobs=np.frombuffer(b"".join(log_probs), ">f4").astype(np.float32),
        calls=tuple(chain),
        owned=owned,
    )
