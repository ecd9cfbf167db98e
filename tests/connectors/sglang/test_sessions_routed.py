"""Rollouts of several turns from a mixture of experts: on every way in which a prompt grows, each token has the experts that the
engine chose when it was first asked for what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.connectors.engines.client import AskedExperts, GenerateRequest
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.routed_experts import RoutingFormat
from millrace.tasks.generation.sessions.runner import MadeSample
from tests.connectors.sglang.test_sessions_exact import ENDED, PATHS, QUICK
from tests.support.engine_process import embedded_engine, peaked_model
from tests.support.session_engines import EnginePlace, dispatcher_of
from tests.support.slow_members import slow_but

Make = Callable[..., EnginePlace]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peaked_model(tmp_path_factory.mktemp("mixture") / "model", 0, experts=4, tools=True)


@pytest.fixture(scope="module")
def engine(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_engine(mixture, "--dtype", "float32", log=tmp_path_factory.mktemp("routed") / "log") as (
        url,
        _,
    ):
        yield url


def fed(sample: MadeSample) -> int:
    """The tokens before the last one that was generated."""
    last = max(place for place, mask in enumerate(sample.loss_mask) if mask)
    return len(sample.prompt_ids) + last


async def asked_again(client: SglangClient, sample: MadeSample, form: RoutingFormat) -> bytes:
    """The experts that the engine chooses when it is asked for the whole sample as one prompt."""
    request = GenerateRequest(
        input_ids=[*sample.prompt_ids, *sample.response_ids],
        sampling_params={"max_new_tokens": 1},
        rid=f"again-{sample.sample_id}",
        progress_timeout_s=60,
        experts=AskedExperts(form, 0),
    )
    routed = (await client.generate(request)).routed
    assert routed is not None
    return routed.data


@pytest.mark.parametrize("way", slow_but(PATHS, *QUICK))
async def test_each_token_has_the_experts_of_the_engine(
    client: SglangClient, places: Make, mixture: Path, way: str
) -> None:
    form = RoutingFormat.of(architecture(read_hf_config(str(mixture))))
    assert form is not None
    session, _, _ = PATHS[way]
    place = places(
        mixture, dispatcher_of(client), session, form=form, **(ENDED if "environment" in session else {})
    )
    made = await place.run()
    for sample in made:
        assert sample.routed is not None
        assert len(sample.routed) == fed(sample) * form.width, (
            "a row for each token that was fed, and no other"
        )
        assert sample.routed == (await asked_again(client, sample, form))[: len(sample.routed)]
    rows = list(place.rows)
    segments = [row for row in rows if row.kind == "segment"]
    assert all(row.routed_experts for row in segments)
    # taken up in the midst, it is the same
    assert await place.run(0, rows[: len(rows) // 2 + 1]) == made
