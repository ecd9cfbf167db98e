"""What the kinds of engine need, can do and lack: one description a kind instead of questions about its name.

A section of engines (millrace.core.config.engines) names the kinds that it may be. How a kind is started and called is in
millrace.connectors.engines.kinds.
"""

from dataclasses import dataclass
from typing import Literal

Transport = Literal["disk", "ipc", "broadcast"]


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine."""

    name: str
    runs_on: Literal["gpu", "cpu", "elsewhere"]  # elsewhere: millrace neither starts it nor gives it a place
    fields: str = ""  # fields of its section that no other kind reads
    transports: frozenset[Transport] = frozenset({"disk", "ipc", "broadcast"})  # ways to give it new weights
    has_grammar: bool = True  # whether it can hold answers to a grammar: json_schema, regex, ebnf
    prefills_apart: bool = True  # whether one can prefill and another decode (engines.prefill)
    sizes_cache: bool = True  # its KV cache fills the memory that it has; else its section says the size

    @property
    def started(self) -> bool:
        """Whether millrace starts, ends and configures it."""
        return self.runs_on != "elsewhere"


SGLANG = EngineKind("sglang", "gpu", "engines.gpus engines.nodes engines.sglang")
EMBEDDED = EngineKind(
    "embedded",
    "cpu",
    "engines.threads engines.max_running engines.max_total_tokens",
    transports=frozenset({"disk", "broadcast"}),
    has_grammar=False,
    prefills_apart=False,
    sizes_cache=False,
)
EXTERNAL = EngineKind("external", "elsewhere")
