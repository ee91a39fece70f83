"""A worker's memory of whole sequences: what the next turn's prompt must begin with.

A call's *sequence* is all tokens from its root to its last sampled one. The worker that served the
parent usually serves the child a moment later, so it keeps the sequences it saw last, within a
budget of tokens (8 bytes each; the default of 8 M tokens is 64 MB). What fell out of it is read
from the staging partition again, at the cost of one read of the parent's chain.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from rollout_reassembler.contract.digests import Integers

DEFAULT_MAX_TOKENS = 8_000_000


@dataclass(frozen=True)
class _Sequence:
    chain_hash: str
    token_ids: Integers


class PrefixCache:
    """The sequences used last, by staging key. Safe to share between threads."""

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens_held = 0
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str, chain_hash: str) -> Integers | None:
        """The sequence int64 `[cum_len]` of the call staged under `key`, if it is the one with this chain hash."""
        with self._lock:
            found = self._sequences.get(key)
            if found is None or found.chain_hash != chain_hash:
                return None
            self._sequences.move_to_end(key)
            return found.token_ids

    def put(self, key: str, chain_hash: str, token_ids: Integers) -> None:
        """Remember a sequence, and forget those unused for longest when they no longer fit beside it."""
        token_ids.flags.writeable = False
        with self._lock:
            self._forget(key)
            if len(token_ids) > self._max_tokens:
                return
            self._sequences[key] = _Sequence(chain_hash, token_ids)
            self._tokens_held += len(token_ids)
            while self._tokens_held > self._max_tokens:
                self._forget(next(iter(self._sequences)))

    def _forget(self, key: str) -> None:
        gone = self._sequences.pop(key, None)
        if gone is not None:
            self._tokens_held -= len(gone.token_ids)

    def __len__(self) -> int:
        return len(self._sequences)
