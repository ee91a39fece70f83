"""For people who ask why a request continues nothing: the nearest message that was recorded, and where it differs.

In come the messages that pass a ledger in this process, each behind the fingerprint of what stands before it; out
comes a line about a request that no recorded call leads to. The ledger's files hold no text, so another process that
goes on with a rollout only tells which message is the first unknown one. Nothing here decides anything.

    known     [u "add 2 and 3", a "I add them."]
    request   [u "add 2 and 3", a "I'll add them.", u "go on"]
    line      message 1 differs from the nearest recorded one: recorded 'assistant: I add …', came …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rollout_reassembler.capture.fingerprint import shown
from rollout_reassembler.capture.records import Message

_MAX_CHARS = 1 << 20
_EXCERPT_CHARS = 40


@dataclass
class KnownMessages:
    """The messages of one rollout's calls, by what stands before them; those that came first, up to a megabyte."""

    _behind: dict[str, list[str]] = field(default_factory=dict)
    _chars: int = 0

    def add(self, messages: Sequence[Message], before: Sequence[str]) -> None:
        """Remember messages; `before[i]` is the fingerprint of all that stands before `messages[i]`."""
        for message, prefix in zip(messages, before, strict=False):
            said = shown(message)
            held = self._behind.setdefault(prefix, [])
            if said not in held and self._chars + len(said) <= _MAX_CHARS:
                held.append(said)
                self._chars += len(said)

    def nearest(self, messages: Sequence[Message], before: Sequence[str]) -> str:
        """Where a request leaves all that is known; empty when it leaves nothing, or nothing is known."""
        for at, (message, prefix) in enumerate(zip(messages, before, strict=False)):
            held, came = self._behind.get(prefix, []), shown(message)
            if came in held:
                continue
            if not held:
                return f"message {at} is the first that this process has not heard"
            recorded = max(held, key=lambda said: _common(said, came))
            place = _common(recorded, came)
            return (
                f"message {at} differs from the nearest recorded one: "
                f"recorded {_excerpt(recorded, place)}, came {_excerpt(came, place)}"
            )
        return ""


def _common(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _excerpt(text: str, place: int) -> str:
    start, end = max(place - _EXCERPT_CHARS // 2, 0), place + _EXCERPT_CHARS // 2
    return repr(f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}")
