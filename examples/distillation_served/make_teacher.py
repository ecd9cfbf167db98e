"""Make the quickstart's sums, its warmed-up model, and a teacher: that model, trained three times as long on answers."""

from __future__ import annotations

from pathlib import Path

from millrace.core.config.reading.load import load_config
from millrace.flows.quickstart import make_teacher, prepare

HERE = Path(__file__).parent

if __name__ == "__main__":
    config = load_config(str(HERE / "student.yaml"))
    prepare(config)
    make_teacher(config, Path(config.model.path).parent / "teacher")
