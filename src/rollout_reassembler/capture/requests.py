"""Requests as they are looked up, and a memory that makes each cost what was added to an earlier one.

An agent sends its whole history with every call. Its *prefix marks* (`fingerprint.py`) need each message read and
hashed; those of a history that begins with a request heard a moment ago are that request's, and then its own:

    heard     [u1]                  marks [m0 m1]
    request   [u1 a1 u2]            marks [m0 m1] + those of a1 and u2

Whether it begins with one is told by the bytes of its messages, so that nothing an agent changes in place, and no 1
for a True, is taken for what was heard.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout_reassembler.capture.fingerprint import Marks, is_model_authored, prefix_marks
from rollout_reassembler.capture.records import Message

_HELD = 8
_MARSHAL_WITHOUT_REFERENCES = 2
_LIST_HEADER_BYTES = 5


@dataclass(frozen=True)
class Request:
    """A request's messages: `prefixes[n]` are the marks of the first `n`, of which `heard` were heard before."""

    messages: Sequence[Message]
    prefixes: list[Marks]
    heard: int = 0

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Request:
        """Raises `UnreadableConversation`."""
        return cls(messages, prefix_marks(messages))

    @property
    def marks(self) -> Marks:
        """The marks of all its messages."""
        return self.prefixes[-1]

    def preamble(self) -> str:
        """The fingerprint of all up to the last turn that a model said."""
        spoken = next((at for at in range(len(self.messages), 0, -1) if is_model_authored(self.messages[at - 1])), 0)
        return self.prefixes[spoken].said


@dataclass
class RecentRequests:
    """The requests of one rollout heard last, as the length of their bytes, a hash of them, and their marks."""

    _held: OrderedDict[tuple[int, bytes], list[Marks]] = field(default_factory=OrderedDict)

    def read(self, messages: Sequence[Message]) -> Request:
        """The request, hashed from where it leaves the longest heard one. Raises `UnreadableConversation`."""
        image = _image(messages)
        if image is None:
            return Request.of(messages)
        body = memoryview(image)[_LIST_HEADER_BYTES:]
        for length, digest in sorted(self._held, reverse=True):
            begun = hashlib.sha256(body[:length])
            if length <= len(body) and begun.digest() == digest:
                marks = self._held[length, digest]
                prefixes = [*marks, *prefix_marks(messages[len(marks) - 1 :], marks[-1])[1:]]
                begun.update(body[length:])
                self._hold(len(body), begun.digest(), prefixes)
                return Request(messages, prefixes, heard=len(marks) - 1)
        prefixes = prefix_marks(messages)
        self._hold(len(body), hashlib.sha256(body).digest(), prefixes)
        return Request(messages, prefixes)

    def _hold(self, length: int, digest: bytes, prefixes: list[Marks]) -> None:
        self._held[length, digest] = prefixes
        self._held.move_to_end((length, digest))
        while len(self._held) > _HELD:
            self._held.popitem(last=False)


def _image(messages: Sequence[Message]) -> bytes | None:
    """The messages as bytes that are equal only for equal ones; `None` for what is not of plain types."""
    try:
        return marshal.dumps(list(messages), _MARSHAL_WITHOUT_REFERENCES)
    except ValueError:
        return None
