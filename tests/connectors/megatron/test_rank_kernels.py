"""A rank compiles into its host's folder of kernels, with what placement.kernel_cache has, and gives what is new after a step."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

from millrace.connectors.host.kernel_folders import kernel_key
from millrace.connectors.storage.kernel_cache import KernelCache
from tests.support.flow_runs import Patience
from tests.support.tiny_models import save_tiny_model
from tests.support.trainer_ranks import VOCAB, Workers, configuration, samples, write_batch

FILE = "launcher.so"


def compiled(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / FILE).write_text("kernel")


def taken(_: object, name: str) -> bool:
    return (Path(os.environ["TRITON_CACHE_DIR"]) / name / FILE).is_file()


def compile_one(_: object, name: str) -> None:
    compiled(Path(os.environ["TRITON_CACHE_DIR"]), name)


def test_a_rank_takes_kernels_before_its_first_step_and_gives_after_it(tmp_path: Path) -> None:
    stored, new = uuid.uuid4().hex, uuid.uuid4().hex
    other = KernelCache(str(tmp_path / "store"), kernel_key(), tmp_path / "other", print)
    compiled(tmp_path / "other" / "triton", stored)
    assert other.give() == 1
    config = configuration(save_tiny_model(tmp_path / "model", "qwen3", VOCAB), device="auto")
    config["placement"]["kernel_cache"] = str(tmp_path / "store")
    workers = Workers()
    try:
        with workers.group(config) as ranks:
            assert ranks.run(taken, stored) == [True]
            ranks.run(compile_one, new)
            assert other.take() == 0
            ranks.train([1], write_batch(tmp_path / "batch", samples(1)))
            patience = Patience(30)
            while other.take() == 0:
                assert patience.left
                time.sleep(0.05)
    finally:
        workers.close()
    assert (tmp_path / "other" / "triton" / new / FILE).is_file()
