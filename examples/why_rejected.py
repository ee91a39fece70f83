"""Three broken rollouts in one group of four, and how to find out what was wrong with each.

A rejected rollout costs nobody else anything: its row is a placeholder that carries no weight. This script breaks a
rollout in each of three ways that happen on a cluster, finalizes the group, and asks.

    python examples/why_rejected.py
"""

from __future__ import annotations

import logging

import numpy as np

import rollout_reassembler as rr


def one_call(rollout_id: str, tokens: list[int]) -> rr.StagedCall:
    """A rollout of one call: two prompt tokens, then sampled ones."""
    sampled = len(tokens) - 2
    return rr.seal_call(
        rollout_id=rollout_id,
        model_call_id="call-0",
        token_ids_delta=np.array(tokens),
        token_mask_delta=np.float32([0, 0] + [1] * sampled),
        generation_log_probs_delta=np.float32([0, 0] + [-0.5] * sampled),
        weight_version=1,
    )


def receipt_of(call: rr.StagedCall) -> dict:
    return rr.RolloutReceipt(
        rollout_id=call.rollout_id,
        manifest=[rr.CallRecord.of(call, response_id="resp-0")],
        terminal_model_call_id="call-0",
        terminal_selection="declared",
    ).model_dump()


def main() -> None:
    # The log says what was expected and what came; the answer holds a code a rollout.
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    client = rr.build_data_plane_client(rr.DataPlaneConfig(impl="memory"))
    rr.register_staging_partition(client, "staging")
    rr.register_canonical_partition(client, "train")
    sink = rr.StagingSink(client, staging_partition="staging")

    rollout_ids = ["sound", "lost", "never-staged", "swapped"]
    calls = {rollout_id: one_call(rollout_id, [5, 6, 7, 8]) for rollout_id in rollout_ids}
    receipts: list[dict | None] = [receipt_of(call) for call in calls.values()]

    receipts[1] = None  # the agent's side lost it
    receipts[3] = receipts[0]  # the lists of receipts and rollouts are not in one order
    for rollout_id in ("sound", "lost", "swapped"):
        assert sink.stage(calls[rollout_id]).ok
    # "never-staged": the worker acknowledged a call that it had not staged.

    reassembler = rr.RolloutReassembler(
        client, partition_id="train", staging_partition="staging", pad_token_id=0, max_seq_len=1024
    )

    # Without publishing anything: one rollout at a time, with the detail.
    for rollout_id, receipt in zip(rollout_ids, receipts, strict=True):
        rollout = reassembler.finalize_rollout(rollout_id, receipt, reward=1.0)
        print(
            f"{rollout_id}: {'valid' if rollout.valid else f'{rollout.rejection_reason} ({rollout.rejection_detail})'}"
        )

    group = reassembler.finalize_group(
        "g0", rollout_ids, receipts, [1.0] * 4, mask_sample=None, fallback_weight_version=1, prompt_idx=0
    )
    rows = client.get_data(group.meta)
    print(f"{group.valid_row_count} of {group.total_row_count} rows valid; rejections: {group.rejections}")
    print("weights of the rows:", np.asarray(rows["sample_mask"]).tolist())
    print("counted as:", sorted(name for name in group.metrics if name.endswith("_count")))


if __name__ == "__main__":
    main()
