"""Each family in a whole run on one GPU that trainer and SGLang share: log-probabilities, weights and the export."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from millrace.connectors.engines.process import EngineServer
from millrace.connectors.engines.sglang.connection import Connection
from millrace.connectors.engines.sglang.engine_weights import SglangWeights
from millrace.core.config import RunConfig
from millrace.core.families.registry import BUILT_IN
from tests.support import family_runs
from tests.support.flow_runs import Workplace
from tests.support.gpu_workplace import steps_of

pytestmark = pytest.mark.timeout(900)


def test_the_installed_sglang_has_a_class_of_each_family_that_it_serves_and_no_other() -> None:
    classes = family_runs.entry_classes()
    assert classes
    assert {each.name for each in BUILT_IN if each.model_class in classes} == set(family_runs.RUNS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """One Prefect server for the runs of all families."""
    place = Workplace(tmp_path_factory.mktemp("families"))
    place.call("server", "start")
    yield place
    place.call("server", "stop")


@pytest.mark.parametrize("family", family_runs.RUNS)
async def test_a_whole_run_and_another_engine_has_the_same_weights_from_its_export(
    place: Workplace, family: str
) -> None:
    run = family_runs.trained_by_a_run(place, family)
    seen = family_runs.check(run)
    export = family_runs.check_export(run)
    assert await checksum_of_another_engine(place.folder / family, export) == seen.checksums[-1]


def test_a_whole_run_with_routing_replay(place: Workplace) -> None:
    run = family_runs.trained_by_a_run(place, "qwen3_moe", "replayed", rollout={"routing_replay": True})
    family_runs.check(run)
    agreement = [step["routing_agreement"] for step in steps_of(run)]
    # a step moves the router, and the next one of its iteration still replays what the first weights chose
    assert all(0.9 < each <= 1 for each in agreement[::2]), agreement
    assert all(0.5 < each <= 1 for each in agreement[1::2]), agreement


async def checksum_of_another_engine(folder: Path, export: Path) -> str:
    """Hash of the checksums of an engine that started from an export."""
    values = family_runs.configuration(folder, folder.name)
    values["engines"]["sglang"] = {**family_runs.SGLANG, "disable_decode_cuda_graph": True}
    values["engines"]["sglang"].pop("cuda_graph_max_bs_decode")
    server = EngineServer(RunConfig.model_validate(values).model_dump(mode="json"), 1, 2)
    try:
        state: dict[str, Any] = dict(server.start(str(export)))
        connection = Connection(state["url"], "another", state["key"])
        try:
            answer = await SglangWeights(connection).checksum()
        finally:
            await connection.close()
    finally:
        server.stop()
    return hashlib.sha256(orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)).hexdigest()
