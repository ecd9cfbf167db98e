"""The flow of the deployment train/file: a run of a YAML file that the worker's host has, as `millrace train` starts it.

Owns no loop: flows/train.py and flows/sft.py have theirs.
"""

from __future__ import annotations

from prefect import flow

from millrace.core.config.reading.load import load_config
from millrace.flows.driver.drive import DriveResult
from millrace.flows.sft import sft
from millrace.flows.train import train


@flow(name="train", flow_run_name="{path}")
async def train_file(path: str, overrides: tuple[str, ...] = ()) -> DriveResult:
    """Train the run of a file, by RL or supervised as the file says; the same run name resumes.

    Args:
        path: YAML file with the configuration. A relative path means the worker's folder.
        overrides: Fields to set: key=value, dotted, as in run.name=a.
    """
    config = load_config(path, overrides)
    return await (sft.fn if config.algorithm.supervised else train.fn)(config)
