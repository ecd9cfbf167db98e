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
from millrace.core.fixed_texts import Logprobs, mean_gap
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
    prompts = family_runs.fixed_prompts(export)
    checksum, answers = await another_engine(place.folder / family, export, prompts)
    fresh = mean_gap(family_runs.trainer_logprobs(export, prompts), answers)
    # a gap that a fresh engine has too is rounding; one that it has not is a tensor that no sync brings
    print(
        f"{family}: {seen.prompt_gaps[-1]:.4f} nats after the last sync, {fresh:.4f} of an engine that started from the export"
    )
    assert checksum == seen.checksums[-1]
    assert max(seen.prompt_gaps) < family_runs.PROMPT_GAP or fresh == pytest.approx(
        seen.prompt_gaps[-1], rel=family_runs.SAME_GAP
    )


def test_a_whole_run_with_routing_replay(place: Workplace) -> None:
    run = family_runs.trained_by_a_run(place, "qwen3_moe", "replayed", rollout={"routing_replay": True})
    assert max(family_runs.check(run).prompt_gaps) < family_runs.PROMPT_GAP
    agreement = [step["routing_agreement"] for step in steps_of(run)]
    # a step moves the router, and the next one of its iteration still replays what the first weights chose
    assert all(0.9 < each <= 1 for each in agreement[::2]), agreement
    assert all(0.5 < each <= 1 for each in agreement[1::2]), agreement


async def another_engine(folder: Path, export: Path, prompts: list[list[int]]) -> tuple[str, Logprobs]:
    """Of an engine that started from an export: the hash of its checksums, and log-probabilities of prompts."""
    values = family_runs.configuration(folder, folder.name)
    values["engines"]["sglang"] = {**family_runs.SGLANG, "disable_decode_cuda_graph": True}
    values["engines"]["sglang"].pop("cuda_graph_max_bs_decode")
    server = EngineServer(RunConfig.model_validate(values).model_dump(mode="json"), 1, 2)
    try:
        state: dict[str, Any] = dict(server.start(str(export)))
        connection = Connection(state["url"], "another", state["key"])
        try:
            weights = SglangWeights(connection)
            answer, logprobs = await weights.checksum(), await weights.logprobs(prompts)
        finally:
            await connection.close()
    finally:
        server.stop()
    return hashlib.sha256(orjson.dumps(answer, option=orjson.OPT_SORT_KEYS)).hexdigest(), logprobs
