"""The covering set: whole runs of many features at once, in which each pair of features that goes together occurs."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pairs import place as files
from tests.pairs.features import FEATURES, ITERATIONS, TEACHER, WEIGHTS
from tests.pairs.idle import idle
from tests.pairs.runs import Left, Surroundings, make
from tests.pairs.signs import SIGNS
from tests.pairs.table import kept_runs
from tests.support.engine_process import embedded_engine
from tests.support.figures_again import differing
from tests.support.flow_runs import Workplace, make_workplace


@pytest.fixture(scope="module")
def pair_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    place = make_workplace(tmp_path_factory.mktemp("pairs"))
    files.write(place.folder)
    place.call("server", "start")
    yield place
    place.call("server", "stop")


@pytest.fixture(scope="module")
def versions_bucket(s3_bucket: str) -> str:
    """Another bucket, which keeps what is removed."""
    import boto3

    client = boto3.client("s3")
    name = WEIGHTS.removeprefix("s3://")
    client.create_bucket(Bucket=name)
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    return WEIGHTS


def made(place: Workplace, names: list[str], bucket: str, weights: str, tmp_path: Path) -> Left:
    """The run of these features, its folder copied here where it lies in a bucket."""
    place.environment |= {name: here for name, here in os.environ.items() if name.startswith("AWS_")}
    url, own_weights = (f"{each}/{uuid.uuid4().hex}" for each in (bucket, weights))
    on_s3 = "s3" in names
    with ExitStack() as servers:
        teacher = engine = ""
        if any(TEACHER in FEATURES[name].settings.values() for name in names):
            served = embedded_engine(
                place.folder / "other", "--dtype", "float32", log=tmp_path / "teacher.log"
            )
            teacher, _ = servers.enter_context(served)
        if "external" in names:
            slots = ("--max-loaded-loras", "6")
            served = embedded_engine(place.folder / "model", *slots, log=tmp_path / "engine.log")
            engine, _ = servers.enter_context(served)
        around = Surroundings(teacher, engine, url, own_weights)
        root = url if on_s3 else str(tmp_path / "root")
        left = make(place, names, around, root, tmp_path / "root")
        verdict = place.call("verify", "a", "--root", root)
    assert "nothing is wrong" in verdict
    if on_s3:
        import s3fs

        s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"]).get(
            f"{url.removeprefix('s3://')}/a", str(tmp_path / "root" / "a"), recursive=True
        )
    return left


def without_sign(left: Left) -> list[str]:
    """Features of a run that left no sign, though nothing beside them silences them."""
    acting = [
        name
        for name in left.features
        if not any(idle(name, other) for other in left.features if other != name)
    ]
    return [name for name in acting if not SIGNS[name](left)]


ALONE = ("top_p", "streamed", "remote_limits", "external", "router", "weights_by_url")
"""Features whose sign no other feature leaves: it shows that the feature is on, and does not hold where it is off."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(kept_runs())), ids=lambda number: f"run-{number:02d}")
def test_features_act_side_by_side(
    pair_place: Workplace, s3_bucket: str, versions_bucket: str, tmp_path: Path, number: int
) -> None:
    left = made(pair_place, kept_runs()[number], s3_bucket, versions_bucket, tmp_path)
    assert f"{ITERATIONS} iterations complete" in left.out
    trained = Counter((row["sample_id"], index) for index, rows in enumerate(left.batches) for row in rows)
    assert trained
    assert max(trained.values()) == 1
    if not left.has("buffer") and not left.has("buffer_filter"):
        assert len({sample for sample, _ in trained}) == len(trained)
    assert without_sign(left) == []
    assert [name for name in ALONE if not left.has(name) and SIGNS[name](left)] == []
    assert differing(left.folder)[0] == []
