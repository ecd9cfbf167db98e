"""A training run in Weights & Biases.

Owns the connection, which is wandb's own process. Mode, key and entity come from wandb's environment: WANDB_MODE, WANDB_API_KEY,
WANDB_ENTITY. Needs the extra `wandb`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from millrace.connectors.storage.local import home
from millrace.core.contracts.tracker import flat
from millrace.core.errors import ConfigError, MillraceError


class WandbTracker:
    """A run in Weights & Biases, under an id that follows from the run folder: started again it goes on."""

    def __init__(self, experiment: str, name: str, identity: str) -> None:
        """identity: of the run folder. Raises ConfigError if the package is not installed, MillraceError if it cannot start."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "the package wandb is not installed",
                where="tracking.trackers",
                remedy="pip install 'millrace[wandb]'",
            ) from error
        settings = wandb.Settings(
            console="off",  # what is printed stays here
            disable_code=True,
            disable_git=True,
            silent=True,
            x_save_requirements=False,
            x_disable_meta=True,  # it has the command line, and so every override
        )
        try:
            self._run = wandb.init(
                project=experiment,
                name=name,
                id=identity,
                resume="allow",
                dir=str(home()),
                settings=settings,
                reinit="create_new",
            )
        except wandb.errors.Error as error:
            raise MillraceError(
                f"wandb cannot start: {error}",
                where="tracking.trackers",
                remedy="export WANDB_API_KEY, or WANDB_MODE=offline; or take wandb out of the list",
            ) from error
        self._ended = False

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row. wandb takes no step before the newest one it has."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration as the run's config."""
        self._run.config.update(dict(flat(values)), allow_val_change=True)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Keep tags as entries of the summary: wandb's own tags are single words of at most 64 characters."""
        self._run.summary.update(dict(tags))

    def log_image(self, png: bytes, name: str, step: int) -> None:
        """Log a picture with the newest row."""
        import io

        import wandb
        from PIL import Image

        self._run.log({name: wandb.Image(Image.open(io.BytesIO(png)))}, step=step)

    def url(self) -> str:
        """The run's page, or without a server its folder, which `wandb sync` sends."""
        return str(self._run.settings.sync_dir if self._run.offline else self._run.url)

    def finish(self) -> None:
        """Mark the run finished."""
        self._end(0)

    def close(self) -> None:
        """End wandb's process; a run that is not finished counts as failed there until it goes on."""
        self._end(1)

    def _end(self, exit_code: int) -> None:
        if not self._ended:
            self._ended = True
            self._run.finish(exit_code=exit_code)
