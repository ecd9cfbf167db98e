"""Which fields hold the path of something that a run reads. Knows no section.

A relative path in a YAML file is relative to that file's folder. Paths that a run writes to (storage.root, sync.directory,
tracking.uri) are relative to the working directory, like `--root` of the other commands.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reads:
    """Annotation of a field whose value, or each item of it, is a path that a run reads.

    or_name: the value may be the name of a model on Hugging Face instead.
    """

    or_name: bool = False


READS = Reads()
