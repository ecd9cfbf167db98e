"""A tool of an MCP server: the policy asks a shop what things cost, and learns to. `python shop.py` is the server."""

from __future__ import annotations

import random
from typing import Any

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
ITEMS = {
    first + second: random.Random(first + second).randint(2, 60)
    for first in SYLLABLES
    for second in SYLLABLES
}


@server.tool()
def cost(item: str, count: int) -> int:
    """Say what some of the shop's items cost together."""
    if item not in ITEMS:
        raise ValueError(f"the shop has no {item}")
    return count * ITEMS[item]


def problem(rng: random.Random) -> dict[str, Any]:
    """What so many items cost. Of the dialogues to warm up on a third are right; others guess, or ask for one item."""
    item, count = rng.choice(list(ITEMS)), rng.randint(2, 20)
    total, one = str(cost(item, count)), str(cost(item, 1))
    right = [f"cost(item={item},count={count})", total, total]
    alone, guess = [f"cost(item={item},count=1)", one, one], [str(rng.randint(10, 999))]
    dialogue = rng.choice([right, alone, guess])
    return {"prompt": f"{count} {item}", "label": total, "dialogue": dialogue}


if __name__ == "__main__":
    server.run()
