"""Which fields hold the path of something that a run reads. Knows no section.

A relative one in a YAML file means that file's folder. What a run writes (storage.root, sync.directory, tracking.uri) is no
such path: it means the working directory, as `--root` of the other commands does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reads:
    """Annotation of a field whose value, or each item of it, is a path that a run reads.

    or_name: it may be the name of a model on Hugging Face instead.
    """

    or_name: bool = False


READS = Reads()
