"""An inference worker and an agent that know nothing of each other, and the receipt that comes out.

Two sides, two objects. The agent's side (a proxy in front of the engine, say) has a `CaptureLedger`: it finds each
request's parent from the messages and writes down what became of it. The worker's side has a `CallRecorder`: it knows
the exact tokens, cuts out what the call added, and stages that before it answers. What passes between them holds no
token: an admission one way, coordinates back.

The agent asks, uses a tool, asks again; then its HTTP client repeats the second request, and
it keeps the second answer.

    python examples/staging_worker.py
"""

from __future__ import annotations

import tempfile

import numpy as np

import rollout_reassembler as rr

Message = dict[str, str]


class Engine:
    """Stands for an inference engine: words are tokens, and each answer is a made-up word with its log probability."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.answers = 0

    def tokenize(self, messages: list[Message]) -> list[int]:
        for word in (word for message in messages for word in f"<{message['role']}> {message['content']}".split()):
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for m in messages for word in f"<{m['role']}> {m['content']}".split()]

    def generate(self, prompt: list[int]) -> tuple[str, np.ndarray, np.ndarray]:
        self.answers += 1
        text = f"answer-{self.answers}"
        self.words.append(text)
        return text, np.array([len(self.words) - 1]), np.array([-0.5 * self.answers], np.float32)


class Server:
    """What stands between agent and engine: one model call, start to end."""

    def __init__(self, engine: Engine, recorder: rr.CallRecorder, ledger: rr.CaptureLedger) -> None:
        self.engine, self.recorder, self.ledger = engine, recorder, ledger

    def chat(self, rollout_id: str, messages: list[Message]) -> Message:
        admission = self.ledger.admit(rollout_id, messages, model_call_id=f"call-{self.engine.answers}")
        call = self.recorder.begin_call(admission)  # stamps the weight version
        prefix = call.prefix_token_ids.tolist()  # the parent's exact tokens: a history is never tokenized again
        answered = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        added = messages[answered + 1 :] if prefix else messages
        prompt = [*prefix, *self.engine.tokenize(added)]
        text, tokens, log_probs = self.engine.generate(prompt)
        coords = self.recorder.complete_call(call, prompt, tokens, log_probs)  # durable when this returns
        answer = {"role": "assistant", "content": text}
        self.ledger.record(admission, coords, response_id=f"resp-{text}", output=answer)  # before the agent sees it
        parent = f"continues {admission.parent_call_id}" if admission.parent_call_id else "is a root"
        print(f"{admission.model_call_id} {parent}: {coords.delta_len} tokens added, {coords.disposition}")
        return answer


def main() -> None:
    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    recorder = rr.CallRecorder(
        rr.StagingSink(client, staging_partition="staging"),
        weight_version=lambda: 7,  # ask your trainer
        source=rr.StagingSource(client, staging_partition="staging"),  # parents that another worker served
    )
    with tempfile.TemporaryDirectory() as directory:
        ledger = rr.CaptureLedger(directory)
        server = Server(Engine(), recorder, ledger)

        messages = [{"role": "user", "content": "what is the weather"}]
        messages.append(server.chat("r1", messages))
        messages.append({"role": "tool", "content": "sunny"})
        server.chat("r1", messages)  # the answer is lost on its way, and the request sent again
        kept = server.chat("r1", messages)

        receipt = ledger.receipt("r1", reward=1.0, output=kept)
    print(f"terminal {receipt.terminal_model_call_id}, chosen by {receipt.terminal_selection}")

    reassembler = rr.RolloutReassembler(
        client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=1024
    )
    group = reassembler.finalize_group(
        "g0", ["r1"], [receipt.model_dump()], [1.0], mask_sample=None, fallback_weight_version=7, prompt_idx=0
    )
    rows = client.get_data(group.meta)
    told = [
        f"[{server.engine.words[token]}]" if is_sampled else server.engine.words[token]
        for token, is_sampled in zip(rows["input_ids"][0], rows["token_mask"][0], strict=True)
    ]
    print("the row, sampled tokens in brackets:", " ".join(told))


if __name__ == "__main__":
    main()
