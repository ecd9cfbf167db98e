"""Dialogues about prices, in which the assistant looks a price up with a tool; and a tiny model that learns them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from millrace import RunConfig
from millrace.connectors.huggingface.tiny import build_tiny_model

ITEMS = ("pens", "cups", "maps", "hats", "keys", "nuts", "jars", "lids")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]
TRAINED, HELD_OUT = 2000, 100


def prepare(config: RunConfig) -> None:
    """Write the dialogues, and a model of random weights at config.model.path unless it exists."""
    model = Path(config.model.path)
    if (model / "config.json").exists():
        return
    model.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(config.run.seed)
    write(model.parent / "train.jsonl", [row(rng) for _ in range(TRAINED)])
    write(model.parent / "held_out.jsonl", [row(rng) for _ in range(HELD_OUT)])
    build_tiny_model(model, tools=True, seed=config.run.seed)


def row(rng: random.Random) -> dict[str, Any]:
    """A dialogue. In one of four the assistant first says a wrong price, which is not to be learnt."""
    item, cost, limit = rng.choice(ITEMS), rng.randint(1, 9), rng.randint(1, 9)
    call = {"name": "price", "arguments": json.dumps({"item": item})}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"What do {item} cost?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "id": "1", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": str(cost)},
    ]
    if rng.random() < 0.25:
        wrong = {"role": "assistant", "content": f"{item} cost {10 - cost}.", "train": False}
        messages += [wrong, {"role": "user", "content": "Look again."}]
    messages += [
        {"role": "assistant", "content": f"{item} cost {cost}."},
        {"role": "user", "content": f"Is that over {limit}?"},
        {"role": "assistant", "content": "Yes." if cost > limit else "No."},
    ]
    kind = "corrected" if len(messages) > 6 else "plain"
    return {"messages": messages, "tools": TOOLS, "metadata": {"kind": kind}}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
