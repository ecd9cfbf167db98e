"""How a driver takes over the open iterations of the driver before it, after it has the lease and before it works.

Owns which parts of these iterations count from then on. Knows nothing of what the parts hold.
"""

from __future__ import annotations

from millrace.connectors.storage.files import in_threads
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.parts import PART_FOLDERS, take_over_parts
from millrace.connectors.storage.run_folder import EAGER, RunFolder

WRITERS = ("rollout", "reward", "evaluate_before", "evaluate")  # tasks whose records name parts


def take_over(folder: RunFolder) -> int:
    """Record the parts that earlier drivers left in open iterations, so that their later writes do not count; remove their chunks.

    Returns the index of the first open iteration.
    """
    assert folder.store.fence is not None, "the lease comes first"
    first, token = folder.first_open_iteration(), folder.store.fence.token
    if token > 1:
        for index in range(first, folder.last_begun(first) + 1):
            opened = folder.iteration(index)
            take_over_parts(opened, PART_FOLDERS, token, folder.owner.run_id, _recorded(folder, index))
            opened.remove(EAGER, recursive=True)
    return first


def _recorded(folder: RunFolder, index: int) -> dict[str, set[str]]:
    """The parts named in records of finished tasks, by folder. Empty on a local disk, whose listings are complete."""
    if folder.store.local:
        return {}
    records = in_threads(IterationFiles(folder, index).record, WRITERS)
    named = {file["path"] for record in records if record for file in record["files"]}
    return {kind: {path for path in named if path.startswith(f"{kind}/")} for kind in PART_FOLDERS}
