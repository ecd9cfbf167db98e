"""A training run as TensorBoard's event files, below MILLRACE_HOME.

Owns the files of one run folder. They are in `tensorboard/EXPERIMENT/IDENTITY`, so that `tensorboard --logdir` on the experiment's
folder shows all of its runs. Needs the extra `tensorboard`, but neither TensorFlow nor torch.
"""

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.connectors.host.local_files import home
from millrace.core.errors import ConfigError
from millrace.core.plain_text import whole
from millrace.core.tracker import flat

PNG_SIZE = slice(16, 24)  # width and height, big-endian, in a PNG's header


class TensorboardTracker:
    """The event files of a run. Every attempt writes a new file into the same folder."""

    def __init__(self, experiment: str, identity: str, first_step: int) -> None:
        """first_step: points of earlier attempts from this step on are hidden, since they are logged again.

        Raises ConfigError if the package is not installed.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "the package tensorboard is not installed",
                where="tracking.trackers",
                remedy="pip install 'millrace[tensorboard]'",
            ) from error
        self.folder = log_folder() / re.sub(r"[^\w.-]", "-", experiment) / identity
        self._event, self._writer = Event, EventFileWriter(str(self.folder), flush_secs=5)
        self._writer.add_event(
            Event(wall_time=time.time(), step=first_step, session_log=SessionLog(status=SessionLog.START))
        )

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one event with a scalar per metric. Skips values that are not finite."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._write(Summary(value=values), step)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Write the configuration as hyperparameters, which TensorBoard's HParams page filters by."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        numbers = (bool, int, float, str)
        params = {
            name: value if isinstance(value, numbers) else whole(str(value)) for name, value in flat(values)
        }
        self._write(hparams_pb(params, trial_id=self.folder.name), 0)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Write tags as text."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        for name, value in tags.items():
            metadata = create_summary_metadata(display_name=name, description="")
            text = make_tensor_proto(whole(value).encode())
            self._write(Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=text)]), 0)

    def log_image(self, png: bytes, name: str, step: int) -> None:
        """Write a picture."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = (int.from_bytes(png[PNG_SIZE][at : at + 4], "big") for at in (0, 4))
        image = Summary.Image(encoded_image_string=png, width=width, height=height)
        self._write(Summary(value=[Summary.Value(tag=name, image=image)]), step)

    def url(self) -> str:
        """The run's folder."""
        return str(self.folder)

    def finish(self) -> None:
        """Write what is buffered. Event files have no mark for the end of a run."""
        self.close()

    def close(self) -> None:
        """Write what is buffered, and end the writer's thread."""
        self._writer.close()

    def _write(self, summary: Any, step: int) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()


def log_folder() -> Path:
    """The folder to start TensorBoard on."""
    return home() / "tensorboard"
