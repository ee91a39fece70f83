"""A training loop of your own around Rollout Reassembler, in one process.

The policy here is a table of logits over 16 tokens, so that everything fits on a page; an engine and a trainer take its
place. Each step samples N rollouts for a prompt, finalizes them as one group, and moves the table towards the rollouts
that were rewarded. The reward is the share of even tokens among the sampled ones, so it rises.

    python examples/own_loop.py
"""

from __future__ import annotations

import numpy as np

import rollout_reassembler as rr

VOCABULARY = 16
ROLLOUTS = 8
TURNS = 2
SAMPLED = 6
STEPS = 60
LEARNING_RATE = 20.0


class Policy:
    """Logits `[VOCABULARY]`, the same at every position, and the version that trained them."""

    def __init__(self) -> None:
        self.logits = np.zeros(VOCABULARY)
        self.version = 0

    def log_probs(self) -> np.ndarray:
        """Log probabilities `[VOCABULARY]`."""
        return self.logits - np.log(np.exp(self.logits).sum())

    def sample(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sampled token ids `[SAMPLED]` and their log probabilities `[SAMPLED]`."""
        log_probs = self.log_probs()
        tokens = rng.choice(VOCABULARY, SAMPLED, p=np.exp(log_probs))
        return tokens, log_probs[tokens].astype(np.float32)


def stage_rollout(
    rollout_id: str, policy: Policy, sink: rr.StagingSink, rng: np.random.Generator
) -> tuple[dict, float]:
    """One rollout of TURNS calls. Each call's tokens are staged; what comes back is a receipt and a reward."""
    parent: rr.StagedCall | None = None
    sequence = np.empty(0, np.int64)
    manifest: list[rr.CallRecord] = []
    sampled: list[np.ndarray] = []
    for turn in range(TURNS):
        carried = np.array([1, 2, 3] if turn == 0 else [9])  # the prompt, then a tool's result
        tokens, log_probs = policy.sample(rng)
        call = rr.seal_call(
            rollout_id=rollout_id,
            model_call_id=f"call-{turn}",
            parent=parent,
            prefix_token_ids=sequence,
            token_ids_delta=np.concatenate([carried, tokens]),
            token_mask_delta=np.repeat(np.float32([0, 1]), [len(carried), len(tokens)]),
            generation_log_probs_delta=np.concatenate([np.zeros(len(carried), np.float32), log_probs]),
            weight_version=policy.version,
        )
        result = sink.stage(call)
        assert result.ok, result.error
        manifest.append(rr.CallRecord.of(call, response_id=f"{rollout_id}-{turn}"))
        sequence = np.concatenate([sequence, call.token_ids_delta])
        sampled.append(tokens)
        parent = call
    receipt = rr.RolloutReceipt(
        rollout_id=rollout_id,
        manifest=manifest,
        terminal_model_call_id=manifest[-1].model_call_id,
        terminal_selection="declared",
    )
    return receipt.model_dump(), float(np.mean(np.concatenate(sampled) % 2 == 0))


def train(policy: Policy, rows: rr.SampleBatch) -> None:
    """One REINFORCE step with the group's mean as the baseline. Masked rows and carried tokens have no say."""
    votes = ~np.asarray(rows["mask_sample"])
    rewards = np.asarray(rows["total_reward"], np.float64)
    advantages = np.where(votes, rewards - rewards[votes].mean(), 0.0)
    gradient = np.zeros(VOCABULARY)
    count = 0.0
    for tokens, mask, advantage in zip(rows["input_ids"], rows["token_mask"], advantages, strict=True):
        gradient += advantage * np.bincount(tokens, weights=mask, minlength=VOCABULARY)
        gradient -= advantage * mask.sum() * np.exp(policy.log_probs())
        count += mask.sum()
    policy.logits += LEARNING_RATE * gradient / count
    policy.version += 1


def main() -> None:
    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    sink = rr.StagingSink(client, staging_partition="staging")
    reassembler = rr.RolloutReassembler(
        client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=1024
    )
    policy, rng = Policy(), np.random.default_rng(0)
    for step in range(STEPS):
        group_id = f"step-{step}"
        rollout_ids = [f"{group_id}/r{i}" for i in range(ROLLOUTS)]
        receipts, rewards = zip(*(stage_rollout(r, policy, sink, rng) for r in rollout_ids), strict=True)
        group = reassembler.finalize_group(
            group_id,
            rollout_ids,
            receipts,
            rewards,
            mask_sample=None,
            fallback_weight_version=policy.version,
            prompt_idx=0,
        )
        train(policy, client.get_data(group.meta))
        client.clear_samples(group.meta.sample_ids, "train")
        if step in (0, STEPS - 1):
            trained = group.canonical_output_tokens
            print(
                f"step {step}: {group.valid_row_count} of {group.total_row_count} rows valid, "
                f"{trained} tokens trained, weight version {group.group_min_wv}, mean reward {np.mean(rewards):.2f}"
            )
    print(f"left in the plane: {len(client.list_samples('staging'))} staged, {len(client.list_samples('train'))} rows")


if __name__ == "__main__":
    main()
