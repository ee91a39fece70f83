"""The demo's policy: a small Qwen3-MoE with random weights, which samples the rollouts and afterwards judges them.

It stands for both ends of a training run. As the *inference engine* it decodes token by token with a KV cache, at
temperature 1, and reports what an engine reports: the sampled ids, their logprobs, and the experts of every token it
ran. As the *trainer* it scores a finished row in one forward pass without a cache. Same weights, different kernels and
shapes: where a row holds exactly the tokens that were sampled, the two agree to float rounding, and nowhere else.

Which tokens an engine runs is the fine point. A sampled token is run only when something follows it, so the last one
of a turn has no route until the next turn's prefill computes it ("the boundary"). For a prompt of 3 and 2 sampled
tokens, then a prompt that adds 2 and 1 sampled token, in one session:

    position          0  1  2  3  4  5  6  7
    turn 1            p  p  p  g  g                routes of 0..3  (routes_start 0)
    turn 2                        .  p  p  g       routes of 4..6  (routes_start 4: the boundary, then the carry)

The last token, 7, has no route: nothing ran it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout_reassembler.demo.tokenizer import DemoTokenizer, build_tokenizer

TokenIds = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Routes = npt.NDArray[np.int16]

LAYERS = 4
HIDDEN = 64
EXPERTS = 8
TOP_K = 2
# Matrices this small do not gain from a second thread, and on a busy machine its waiting costs several times the work.
TORCH_THREADS = 1
# About one step in so many ends the turn, whatever the context.
MEAN_TURN_TOKENS = 64


@dataclass
class Session:
    """What an engine keeps of one conversation: the KV cache, and the exact ids it covers. For one caller at a time."""

    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    cache: DynamicCache | None = None

    def uncovered_from(self, prompt_ids: TokenIds) -> int:
        """Where the prompt leaves the cache: `len(token_ids)` if it goes on after exactly these ids, else 0."""
        covered = len(self.token_ids)
        goes_on = len(prompt_ids) > covered and np.array_equal(prompt_ids[:covered], self.token_ids)
        return covered if goes_on else 0


@dataclass(frozen=True)
class Generation:
    """One turn as the engine reports it.

    `routed_experts[i]` are the experts of position `routes_start + i` of prompt + generation, best first. They cover
    what this call ran: the prompt from where the cache ended, and all sampled tokens but the last.
    """

    token_ids: TokenIds  # [G]
    logprobs: Floats  # [G]
    routes_start: int
    routed_experts: Routes  # [n, L, K]
    finished: bool  # a stop token ended the turn, not the token limit

    def routes_between(self, start: int, stop: int) -> Routes:
        """Routes of the positions `start..stop` as `[stop - start, L, K]`; -1 wherever this call ran nothing."""
        routes = np.full((stop - start, *self.routed_experts.shape[1:]), -1, dtype=np.int16)
        positions = np.arange(self.routes_start, self.routes_start + len(self.routed_experts))
        asked = (positions >= start) & (positions < stop)
        routes[positions[asked] - start] = self.routed_experts[asked]
        return routes


@dataclass(frozen=True)
class TeacherForced:
    """A whole row scored in one pass. Position 0 has no logprob, which is 0.0 here."""

    logprobs: Floats  # [T], of token t given the tokens before it
    routed_experts: Routes  # [T, L, K], best first
    route_margins: Floats  # [T, L], router logit of the last chosen expert minus that of the best one left out


class DemoPolicy:
    """The model behind both ends; safe to share between threads, which then take turns.

    >>> policy = DemoPolicy(seed=0)
    >>> prompt = np.array([*policy.tokenizer.encode("What is 2 + 3?"), *policy.tokenizer.generation_header()])
    >>> stop_ids = [policy.tokenizer.im_end_id]
    >>> session = Session()
    >>> turn = policy.generate(prompt, max_new_tokens=8, stop_ids=stop_ids, seed=1, session=session)
    >>> row = policy.teacher_force(np.concatenate([prompt, turn.token_ids]))
    >>> bool(np.abs(row.logprobs[len(prompt) :] - turn.logprobs).max() < 1e-4)
    True

    Building one sets torch's thread count for the whole process.
    """

    def __init__(self, seed: int = 0, tokenizer: DemoTokenizer | None = None) -> None:
        torch.set_num_threads(TORCH_THREADS)
        self.tokenizer = tokenizer or build_tokenizer()
        self.model = _build_model(self.tokenizer, seed)
        self._gate_outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._turn = threading.Lock()
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(self._on_gate)

    def generate(
        self,
        prompt_ids: TokenIds,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        seed: int,
        session: Session | None = None,
    ) -> Generation:
        """Sample one turn after `prompt_ids` `[P]`, at temperature 1, up to a stop token (kept) or `max_new_tokens`.

        A session whose ids the prompt goes on from is not computed again; any other session starts anew. Either way it
        then covers the prompt and all sampled tokens but the last. The tokens depend on the prompt and `seed` alone.
        """
        if len(prompt_ids) == 0 or max_new_tokens < 1:
            raise ValueError(f"expected a prompt and room for a token, got {len(prompt_ids)=} and {max_new_tokens=}")
        session = Session() if session is None else session
        prompt_ids = np.asarray(prompt_ids, dtype=np.int64)
        routes_start = session.uncovered_from(prompt_ids)
        cache = session.cache if routes_start else None
        cache = DynamicCache(config=self.model.config) if cache is None else cache
        with self._turn, torch.inference_mode():
            tokens, logprobs, routes = self._sample(
                prompt_ids[routes_start:], cache, max_new_tokens, frozenset(stop_ids), seed
            )
        session.token_ids = np.concatenate([prompt_ids, tokens[:-1]])
        session.cache = cache
        return Generation(tokens, logprobs, routes_start, routes, finished=int(tokens[-1]) in stop_ids)

    def teacher_force(self, token_ids: TokenIds) -> TeacherForced:
        """Score a row `[T]` in one forward pass over all of it, without a cache."""
        row = torch.tensor(token_ids, dtype=torch.int64)
        with self._turn, torch.inference_mode():
            logits, experts, margins = self._run(row, cache=None)
            given_before = torch.log_softmax(logits[:-1], dim=-1)
            logprobs = given_before.gather(1, row[1:, None])[:, 0]
        return TeacherForced(
            logprobs=np.concatenate([np.zeros(1, dtype=np.float32), logprobs.numpy()]),
            routed_experts=experts.numpy().astype(np.int16),
            route_margins=margins.numpy(),
        )

    def _sample(
        self, pending_ids: TokenIds, cache: DynamicCache, max_new_tokens: int, stop_ids: frozenset[int], seed: int
    ) -> tuple[TokenIds, Floats, Routes]:
        """Prefill `pending_ids` into the cache, then decode: ids `[G]`, logprobs `[G]`, routes of all tokens run."""
        rng = torch.Generator().manual_seed(seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        routes: list[torch.Tensor] = []
        pending = torch.as_tensor(pending_ids)
        while True:
            logits, experts, _ = self._run(pending, cache, last_only=True)
            routes.append(experts)
            distribution = torch.log_softmax(logits[-1], dim=-1)
            pending = torch.multinomial(distribution.exp(), 1, generator=rng)
            tokens.append(int(pending))
            logprobs.append(float(distribution[pending]))
            if tokens[-1] in stop_ids or len(tokens) == max_new_tokens:
                break
        return (
            np.array(tokens, dtype=np.int64),
            np.array(logprobs, dtype=np.float32),
            torch.cat(routes).numpy().astype(np.int16),
        )

    def _run(
        self, token_ids: torch.Tensor, cache: DynamicCache | None, *, last_only: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One forward pass over ids `[n]`: logits `[n or 1, V]`, experts `[n, L, K]`, route margins `[n, L]`."""
        self._gate_outputs.clear()
        output = self.model(
            input_ids=token_ids[None], cache=cache, use_cache=cache is not None, logits_to_keep=1 if last_only else 0
        )
        experts = torch.stack([chosen for _, chosen in self._gate_outputs], dim=1)
        router_logits = torch.stack([logits for logits, _ in self._gate_outputs], dim=1)
        ranked = router_logits.topk(TOP_K + 1, dim=-1).values
        return output.logits[0], experts, ranked[..., TOP_K - 1] - ranked[..., TOP_K]

    def _on_gate(self, gate: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        """Keep what one layer's gate decided: the indices it sent the tokens to, not a second top-k of its logits."""
        router_logits, _, chosen = output
        self._gate_outputs.append((router_logits, chosen))


def _build_model(tokenizer: DemoTokenizer, seed: int) -> Qwen3MoeForCausalLM:
    """A float32 model in eval mode; equal seeds give equal weights."""
    config = Qwen3MoeConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.im_end_id,
        dtype=torch.float32,
    )
    model = Qwen3MoeForCausalLM(config)
    model.train(False)
    model.set_attn_implementation("eager")
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        _draw_weights(model, rng)
        _draw_routers(model, rng)
        _set_turn_length(model, tokenizer)
    return model


def _draw_weights(model: Qwen3MoeForCausalLM, rng: torch.Generator) -> None:
    """Normal weights; what a layer adds to the residual stream is small beside the embedding, as in a trained model."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            continue
        scale = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
        scale *= 0.3 if "o_proj" in name or "down_proj" in name else 1.0
        scale *= 2.0 if "lm_head" in name else 1.0
        weight.normal_(0.0, scale, generator=rng)


def _draw_routers(model: Qwen3MoeForCausalLM, rng: torch.Generator) -> None:
    """Each expert reads one channel of its own.

    A sum of many channels comes out a rounding apart in prefill and decode, and a near tie of two experts then falls
    two ways. One product does not depend on the order of a sum: what is left is the rounding of the layers below.
    """
    for layer in model.model.layers:
        channels = 1 + torch.randperm(HIDDEN - 1, generator=rng)[:EXPERTS]
        router = layer.mlp.gate.weight
        router.zero_()
        router[torch.arange(EXPERTS), channels] = 2.0


def _set_turn_length(model: Qwen3MoeForCausalLM, tokenizer: DemoTokenizer) -> None:
    """Make turns end, at a rate that the context hardly moves; and never sample the other special tokens.

    Random weights would sample `<|im_end|>` once in a vocabulary. Channel 0 is the same for all tokens, so that a head
    row which reads only it is a constant logit.
    """
    constant = 4.0
    model.model.embed_tokens.weight[:, 0] = constant
    head = model.lm_head.weight
    head[:, 0] = 0.0
    after_norm = constant / (1 + constant**2 / HIDDEN) ** 0.5
    # The other logits are normal; their variance is the head's 2², less the share of the norm that channel 0 takes.
    variance = 2.0**2 * (1 - after_norm**2 / HIDDEN)
    stop_logit = np.log(tokenizer.vocab_size / MEAN_TURN_TOKENS) + variance / 2
    for token_id, logit in (
        (tokenizer.im_end_id, stop_logit),
        (tokenizer.im_start_id, -20.0),
        (tokenizer.pad_id, -20.0),
    ):
        head[token_id] = 0.0
        head[token_id, 0] = logit / after_norm
