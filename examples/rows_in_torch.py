"""Canonical rows as torch batches, and a policy-gradient loss over them. Needs the extra `trainer`.

python examples/rows_in_torch.py
"""

from __future__ import annotations

import numpy as np
import torch

import rollout_reassembler as rr

VOCABULARY = 32


def finalized_group(client: rr.DataPlaneClient) -> rr.FinalizedGroup:
    """A group of four rollouts of different lengths; the last one lost its receipt and is a placeholder."""
    sink = rr.StagingSink(client, staging_partition="staging")
    rng = np.random.default_rng(0)
    receipts: list[dict | None] = []
    for index, sampled in enumerate([3, 5, 2, 4]):
        call = rr.seal_call(
            rollout_id=f"r{index}",
            model_call_id="call-0",
            token_ids_delta=np.concatenate([np.array([1, 2]), rng.integers(3, VOCABULARY, sampled)]),
            token_mask_delta=np.float32([0, 0] + [1] * sampled),
            generation_log_probs_delta=np.float32([0, 0] + [-3.0] * sampled),
            weight_version=1,
        )
        assert sink.stage(call).ok
        receipt = rr.RolloutReceipt(
            rollout_id=call.rollout_id,
            manifest=[rr.CallRecord.of(call, response_id="resp-0")],
            terminal_model_call_id="call-0",
            terminal_selection="declared",
        )
        receipts.append(receipt.model_dump())
    receipts[-1] = None
    reassembler = rr.RolloutReassembler(
        client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=64
    )
    return reassembler.finalize_group(
        "g0",
        [f"r{i}" for i in range(4)],
        receipts,
        [1.0, 0.0, 0.5, 0.0],
        mask_sample=None,
        fallback_weight_version=1,
        prompt_idx=0,
    )


def advantages(batch: rr.TrainBatch) -> torch.Tensor:
    """Reward minus the mean of the rows that vote, `[B]`; 0 for the others."""
    votes = ~batch.mask_sample
    return torch.where(votes, batch.total_reward - batch.total_reward[votes].mean(), 0.0)


def loss(model: torch.nn.Module, batch: rr.TrainBatch) -> torch.Tensor:
    """The policy-gradient loss of a padded batch: a token's logits come from the position before it."""
    logits = model(batch.input_ids[:, :-1])  # [B, S - 1, VOCABULARY]
    taken = torch.log_softmax(logits, -1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    weight = batch.token_mask[:, 1:] * batch.sample_mask[:, None]  # 0 for carried tokens, padding, placeholders
    ratio = torch.exp(taken - batch.generation_logprobs[:, 1:])  # against what the policy sampled with
    return -(ratio * advantages(batch)[:, None] * weight).sum() / weight.sum()


def main() -> None:
    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    group = finalized_group(client)

    (padded,) = rr.iter_batches(client, group.meta, batch_size=4, layout="padded", pad_token_id=0)
    print("padded:", list(padded.input_ids.shape), "lengths", padded.input_lengths.tolist())
    (packed,) = rr.iter_batches(client, group.meta, batch_size=4, layout="packed", pad_token_id=0)
    print("packed:", list(packed.input_ids.shape), "cu_seqlens", packed.cu_seqlens.tolist())

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model, padded)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    print("trained tokens:", int((padded.token_mask * padded.sample_mask[:, None]).sum()))
    print("the loss falls:", losses == sorted(losses, reverse=True))


if __name__ == "__main__":
    main()
