"""A training run in Weights & Biases.

Owns the connection, a process started by wandb. Mode, key and entity come from wandb's environment variables: WANDB_MODE,
WANDB_API_KEY, WANDB_ENTITY. Needs the extra `wandb`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, cast

from millrace.connectors.host.local_files import home
from millrace.core.errors import ConfigError, MillraceError, TrackerError
from millrace.core.tracker import flat

P = ParamSpec("P")


def _taken(
    call: Callable[Concatenate[WandbTracker, P], None],
) -> Callable[Concatenate[WandbTracker, P], None]:
    """Decorator: an error of wandb, or of the connection to its process, is raised as TrackerError."""

    @wraps(call)
    def taken(self: WandbTracker, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(self, *args, **kwargs)
        except Exception as error:
            # wandb's error types have only Exception in common
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "wandb":
                raise
            raise TrackerError(f"wandb refuses the data: {error}", where="tracking.trackers") from error

    return cast("Callable[Concatenate[WandbTracker, P], None]", taken)


class WandbTracker:
    """A run in Weights & Biases. Its id is the run folder's identity, so a restart continues the same run."""

    def __init__(self, experiment: str, name: str, identity: str) -> None:
        """identity: the run folder's. Raises ConfigError if the package is not installed, MillraceError if it cannot start."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "the package wandb is not installed",
                where="tracking.trackers",
                remedy="pip install 'millrace[wandb]'",
            ) from error
        settings = wandb.Settings(
            console="off",  # do not upload what is printed
            disable_code=True,
            disable_git=True,
            silent=True,
            x_save_requirements=False,
            x_disable_meta=True,  # it would upload the command line, with all overrides
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

    @_taken
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row. wandb ignores steps before its newest."""
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    @_taken
    def log_params(self, values: Mapping[str, Any]) -> None:
        """Keep the configuration as the run's config."""
        self._run.config.update(dict(flat(values)), allow_val_change=True)

    @_taken
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Keep tags as entries of the summary: wandb's own tags are single words of at most 64 characters."""
        self._run.summary.update(dict(tags))

    @_taken
    def log_image(self, png: bytes, name: str, step: int) -> None:
        """Log a picture with the newest row."""
        import io

        import wandb
        from PIL import Image

        self._run.log({name: wandb.Image(Image.open(io.BytesIO(png)))}, step=step)

    def url(self) -> str:
        """The run's page; offline its folder, which `wandb sync` uploads."""
        return str(self._run.settings.sync_dir if self._run.offline else self._run.url)

    def finish(self) -> None:
        """Mark the run finished."""
        self._end(0)

    def close(self) -> None:
        """End wandb's process. wandb shows an unfinished run as failed until it is resumed."""
        self._end(1)

    @_taken
    def _end(self, exit_code: int) -> None:
        if not self._ended:
            self._run.finish(exit_code=exit_code)
            self._ended = True
