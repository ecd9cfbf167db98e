"""Arrow schemas of everything a task hands to another, and their version.

Owns the columns and their types; knows nothing of where files lie. One row a sample unless said.
Text that may have any shape (messages, metadata, labels) is held as JSON text.
"""

from __future__ import annotations

import pyarrow as pa

VERSION = 1

_ids = [
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("group_id", pa.string(), nullable=False),
]

PROMPTS = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("iteration", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("epoch", pa.int32(), nullable=False),
        # order of drawing within the iteration; past rollout.prompts: reserve
        pa.field("ordinal", pa.int32(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),  # JSON: string or messages
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("label", pa.string()),  # JSON
        pa.field("metadata", pa.string()),  # JSON object
    ]
)

ROLLOUTS = pa.schema(
    [
        *_ids,
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("iteration", pa.int32(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),  # index of the sample within its group
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("metadata", pa.string()),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),  # prompt + response ids
        pa.field("response_length", pa.int32(), nullable=False),
        # decoded for reading and scoring; never tokenised again
        pa.field("response", pa.string(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),  # per response token
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),  # per response token
        pa.field(
            "policy_versions",
            pa.list_(pa.struct([pa.field("first_token", pa.int32()), pa.field("version", pa.int64())])),
            nullable=False,
        ),
        pa.field("engine_id", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("turns", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # completed, truncated, aborted, failed
        pa.field("reason", pa.string()),  # why it failed
        pa.field("timings", pa.map_(pa.string(), pa.float64()), nullable=False),  # seconds
    ]
)

REWARDS = pa.schema(
    [
        *_ids,
        pa.field("reward", pa.float64()),  # null unless scored
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        # scored, failed, timed_out, skipped (generation failed)
        pa.field("scoring", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("scoring_s", pa.float64(), nullable=False),
    ]
)

VERDICTS = pa.schema(
    [
        *_ids,
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("verdict", pa.string(), nullable=False),  # kept, dropped, returned
        pa.field("reason", pa.string()),
        # weight version that the sample's step produces; null unless kept
        pa.field("train_step", pa.int64()),
    ]
)

BATCH = pa.schema(
    [
        *ROLLOUTS,
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("scoring", pa.string(), nullable=False),
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("advantage", pa.float64()),  # null where the trainer computes it token by token
        pa.field("train_step", pa.int64(), nullable=False),
    ]
)

QUARANTINE = pa.schema(  # one row an unusable row of a source
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("excerpt", pa.string(), nullable=False),
    ]
)

EVALUATIONS = pa.schema(
    [
        pa.field("set", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("response", pa.string(), nullable=False),
        pa.field("response_length", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("scoring", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
    ]
)

SCHEMAS: dict[str, pa.Schema] = {
    "prompts": PROMPTS,
    "rollouts": ROLLOUTS,
    "rewards": REWARDS,
    "verdicts": VERDICTS,
    "batch": BATCH,
    "quarantine": QUARANTINE,
    "evaluations": EVALUATIONS,
}


def schema(name: str) -> pa.Schema:
    """The Arrow schema of a kind of table, carrying its name and version in the metadata."""
    return SCHEMAS[name].with_metadata({"millrace.table": name, "millrace.version": str(VERSION)})
