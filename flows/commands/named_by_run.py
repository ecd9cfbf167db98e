"""What a configuration makes a command import, start and join: code, programs and addresses. Pure.

A run's folder is trusted like a program, since it can name these. Commands that read a run's folder print them first.
"""

import shlex
from collections.abc import Iterator

from millrace.core.config import RunConfig
from millrace.core.tracker import flat

OURS = "millrace."
SGLANG = "engines.sglang."  # some of its options run code: trust_remote_code, custom_weight_loader
KERNELS = "placement.kernel_cache"
ADDRESSES = ("placement.ray_address",)  # need not look like a URL


def named_by_run(config: RunConfig) -> list[str]:
    """A line for each import with its origin, each started program and each joined address, with its field."""
    lines = [*_named(config)]
    if any(line.startswith("imports") for line in lines) and config.run.import_from:
        lines.append(f"looks for modules in {', '.join(config.run.import_from)} (run.import_from)")
    return lines


def _named(config: RunConfig) -> Iterator[str]:
    for field, value in flat(config.model_dump(mode="json")):
        name = field.rpartition(".")[2]
        if not value:
            continue
        if field.startswith(SGLANG):
            yield f"gives SGLang {name} = {value} ({field})"
            continue
        if field == KERNELS:  # code, though it looks like no module
            yield f"takes compiled kernels from {value} ({field})"
            continue
        imports = name == "function" or field == "trainer.rank"
        if isinstance(value, str) and (imports and not value.startswith(OURS) or name == "register"):
            yield f"imports {value} ({field})"
        elif name == "command":
            command = value if isinstance(value, str) else shlex.join(map(str, value))
            yield f"starts {command} ({field})"
        elif field in ADDRESSES or (isinstance(value, str) and "://" in value):
            yield f"uses {value} ({field})"
        elif isinstance(value, list):
            yield from (f"uses {item} ({field})" for item in value if isinstance(item, str) and "://" in item)
