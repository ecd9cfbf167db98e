"""The lines that a command prints after a complete run: its results, and commands to look at them.

Reads only the run folder.
"""

import shlex
from pathlib import PurePosixPath

from millrace.connectors.mlflow.tracker import is_server
from millrace.connectors.storage.manifests.summaries import Committed
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.flows.driver.stored_run import evaluations

MOST_SETS = 3


def ending(config: RunConfig) -> list[str]:
    """A line each: the export, the best evaluation of each set, and the commands that show more."""
    root, name = config.storage.root, config.run.name
    folder = RunFolder(root, name)
    of_run = f"{name}{'' if root == 'runs' else f' --root {shlex.quote(root)}'}"
    uri = config.tracking.uri
    curves = uri if uri and is_server(uri) else f"millrace ui {of_run}"
    exports = folder.store.folders("exports")
    return [
        *(f"export   {folder.store.url_of(f'exports/{newest}')}" for newest in exports[-1:]),
        *_best(config, folder),
        f"look     millrace show {of_run}",
        f"curves   {curves}",
    ]


def _best(config: RunConfig, folder: RunFolder) -> list[str]:
    names = [held_out.name for held_out in config.evaluation.sets]
    files = [PurePosixPath(path).stem for name in names for path in folder.store.list(f"eval/{name}")]
    evaluated_by = {index for done in map(int, files) for index in (done - 1, done) if index >= 0}
    manifests = [folder.manifest(index) for index in sorted(evaluated_by)]
    found = evaluations(folder, [Committed.of(manifest) for manifest in manifests if manifest])
    lines = []
    for name in names:
        values = {done: of_sets[name] for done, of_sets in found.items() if name in of_sets}
        if not values:
            continue
        best = max(values, key=lambda done: values[done])
        before = f"; {values[0]:.3f} before training" if best and 0 in values else ""
        after = f"after iteration {best}" if best else "before training"
        lines.append(f"best     {name} {values[best]:.3f} {after}{before}")
    left = len(lines) - MOST_SETS
    return [*lines[:MOST_SETS], *([f"         and {left} more evaluation sets"] if left > 0 else [])]
