"""The demo's chat tokenizer: a byte-level BPE, trained in well under a second on sentences made here.

In come chat messages, out go token ids, and the other way round. Three things hold:

- Every id decodes. The alphabet is all 256 bytes, so whatever a policy samples is some text, with U+FFFD where its
  bytes are no UTF-8.
- Text is never a turn. `<|im_end|>` inside a message's content becomes ordinary tokens; only this file writes the
  special ids.
- A conversation is the concatenation of its messages. `render_message` never looks at its neighbours, so the next
  prompt is the tokens one already has plus those of what was added.

What does *not* hold is `encode(decode(ids)) == ids`: a sampled sequence is one of many that spell its text, and the
encoder only ever returns its favourite. That is why captured tokens must not be rebuilt from messages.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"

VOCAB_SIZE = 1024
CORPUS_SENTENCES = 600


class Message(TypedDict):
    """One chat message as an agent sees it."""

    role: str
    content: str


class DemoTokenizer:
    """Messages to ids and back.

    >>> tokenizer = build_tokenizer()
    >>> prompt = tokenizer.render_conversation([{"role": "user", "content": "What is 2 + 3?"}])
    >>> prompt += tokenizer.generation_header()
    >>> print(tokenizer.decode(prompt, skip_special=False))
    <|im_start|>user
    What is 2 + 3?<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """

    def __init__(self, bpe: Tokenizer) -> None:
        self._bpe = bpe
        self._newline = self.encode("\n")
        self.vocab_size: int = bpe.get_vocab_size()
        self.im_start_id = self._special_id(IM_START)
        self.im_end_id = self._special_id(IM_END)
        self.pad_id = self._special_id(PAD)

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; never a special id, whatever the text spells."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of any ids in the vocabulary, as an agent would receive it; U+FFFD where bytes are no UTF-8."""
        return str(self._bpe.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def render_message(self, message: Message) -> list[int]:
        """`<|im_start|>role\\ncontent<|im_end|>\\n`"""
        content = self.encode(message["content"])
        return [*self._header(message["role"]), *content, self.im_end_id, *self._newline]

    def render_conversation(self, messages: Sequence[Message]) -> list[int]:
        """The messages one after the other, with no generation header."""
        return [token for message in messages for token in self.render_message(message)]

    def generation_header(self) -> list[int]:
        """`<|im_start|>assistant\\n`: what a prompt ends with, and an assistant's rendered message begins with."""
        return self._header("assistant")

    def close_turn(self, generated: Sequence[int]) -> list[int]:
        """What the template still owes after a sampled turn: `\\n`, and `<|im_end|>` before it if none was sampled.

        A next prompt is `prompt + generated + close_turn(generated) + render_message(...) + generation_header()`.
        """
        sampled_stop = len(generated) > 0 and generated[-1] == self.im_end_id
        return list(self._newline) if sampled_stop else [self.im_end_id, *self._newline]

    def _header(self, role: str) -> list[int]:
        return [self.im_start_id, *self.encode(role), *self._newline]

    def _special_id(self, token: str) -> int:
        token_id: int | None = self._bpe.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no special token {token!r}; build_tokenizer() trains one that has")
        return token_id


def build_tokenizer() -> DemoTokenizer:
    """Train the tokenizer; the same ids for the same text in every process."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    # Otherwise an agent could forge a turn by writing `<|im_end|>` into a message.
    bpe.encode_special_tokens = True
    return DemoTokenizer(bpe)


_SUBJECTS = ("the agent", "a student", "the calculator", "our search tool", "the weather service", "the file browser")
_VERBS = ("adds", "multiplies", "looks up", "compares", "rounds", "converts", "counts", "sorts", "summarises", "checks")
_OBJECTS = ("the prices", "two numbers", "the distances", "all temperatures", "the open tickets", "every log line")
_PLACES = ("Zürich", "Kraków", "São Paulo", "München", "東京", "Αθήνα", "Reykjavík", "Київ")
_UNITS = ("km", "°C", "€", "kg", "%", "µs", "m²")
_TOOLS = ("calculator", "search", "weather", "read_file", "calendar", "convert_units")
_MARKS = ("✓", "→", "…", "🙂", "—", "½")


def _corpus() -> Iterator[str]:
    rng = random.Random(20)
    yield from ("system", "user", "assistant", "tool") * 8
    makers = (_arithmetic, _tool_call, _tool_result, _chatter)
    for number in range(CORPUS_SENTENCES):
        yield makers[number % len(makers)](rng)


def _arithmetic(rng: random.Random) -> str:
    left, right = rng.randint(2, 999), rng.randint(2, 99)
    sign, value = rng.choice((("+", left + right), ("-", left - right), ("*", left * right)))
    asked = rng.choice(("What is", "Please compute", "Work out", "How much is"))
    return f"{asked} {left} {sign} {right}? The answer is {value}."


def _tool_call(rng: random.Random) -> str:
    expression = f'{{"expression": "{rng.randint(1, 500)} + {rng.randint(1, 500)}"}}'
    arguments = rng.choice((expression, f'{{"city": "{rng.choice(_PLACES)}"}}'))
    return f'I will call a tool. <tool_call>{{"name": "{rng.choice(_TOOLS)}", "arguments": {arguments}}}</tool_call>'


def _tool_result(rng: random.Random) -> str:
    amount = f"{rng.uniform(0, 900):.2f} {rng.choice(_UNITS)}"
    return f"<tool_response>{rng.choice(_PLACES)}: {amount}, status ok {rng.choice(_MARKS)}</tool_response>"


def _chatter(rng: random.Random) -> str:
    subject, verb, thing = rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS)
    ending = rng.choice(("and reports the result", "before the next turn", f"in {rng.choice(_PLACES)}", "step by step"))
    return f"{subject.capitalize()} {verb} {thing} {ending}{rng.choice(('.', '!', '?', ' ' + rng.choice(_MARKS)))}"
