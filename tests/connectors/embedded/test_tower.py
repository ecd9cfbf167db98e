"""The embedded engine sees pictures as transformers' models do."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.sampling import RequestError, SamplingParams
from millrace.connectors.engines.embedded.slots import Request
from millrace.connectors.huggingface.tiny_vision import KINDS, build_tiny_vision
from millrace.core.contracts.images import DATA_URL
from tests.support.noise import as_file, noise


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = build_tiny_vision(tmp_path_factory.mktemp("model"), request.param)
    served = Engine(str(folder), max_running=16, max_total_tokens=8192, weight_version="0", seed=1)
    served.start()
    yield served
    served.stop()


def url(data: bytes) -> str:
    return DATA_URL + base64.b64encode(data).decode()


def pictures(engine: Engine) -> list[Any]:
    assert engine.tower
    side = engine.tower.rules.side
    return [noise(4 * side, 3 * side, 1), noise(2 * side, side, 2), noise(4 * side, 3 * side, 3)]


def asked(engine: Engine, ids: list[int], images: list[Any], tokens: int = 8) -> Request:
    """A request that has ended."""
    assert engine.tower
    done = threading.Event()
    prompt, seen = (
        engine.tower.expanded(ids, [url(as_file(each)) for each in images]) if images else (ids, None)
    )
    request = Request(
        rid="a",
        prompt=prompt,
        params=SamplingParams(
            max_new_tokens=tokens, logit_bias={str(i): -1e9 for i in engine.tower.rules.marks}
        ),
        seed=3,
        notify=lambda ended: done.set() if ended.finish else None,
        prompt_logprobs_from=0,
        seen=seen,
    )
    engine.submit(request)
    assert done.wait(60)
    return request


def by_transformers(engine: Engine, request: Request, images: list[Any]) -> list[float]:
    """Log-probabilities of the request's answer."""
    assert engine.tower
    rules = engine.tower.rules
    model = AutoModelForImageTextToText.from_pretrained(engine.folder).eval()
    ids = torch.tensor([request.prompt + request.output])
    seen: dict[str, Any] = {}
    if images:
        seen["pixel_values"] = torch.cat(
            [torch.from_numpy(rules.patches(np.asarray(each))) for each in images]
        )
        seen["image_grid_thw"] = torch.tensor([rules.grid(*each.size) for each in images])
        seen["mm_token_type_ids"] = (ids == rules.token).int()
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0].float()
    logits[:, list(rules.marks)] -= 1e9
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[len(request.prompt) - 1 + at, token]) for at, token in enumerate(request.output)]


def test_answers_are_as_likely_as_in_transformers_with_pictures_and_without(engine: Engine) -> None:
    assert engine.tower
    rules = engine.tower.rules
    one, other, _ = pictures(engine)
    place = [rules.marks[2], rules.token, rules.marks[3]]
    for ids, images in (
        ([5, *place, 6, 7], [one]),
        ([5, 6, *place, 7, *place, 8], [one, other]),
        ([5, 6, 7, 8], []),
    ):
        request = asked(engine, ids, images)
        wanted = by_transformers(engine, request, images)
        assert max(abs(a - b) for a, b in zip(wanted, request.logprobs, strict=True)) < 2e-5
        assert not set(request.output) & set(rules.marks)


def test_another_picture_gives_another_answer_and_the_same_one_is_found_again(engine: Engine) -> None:
    assert engine.tower
    rules = engine.tower.rules
    one, _, third = pictures(engine)
    ids = [9, rules.marks[2], rules.token, rules.marks[3], 6, 7]
    first, again, changed = (asked(engine, ids, [image]) for image in (one, one, third))
    assert first.prompt == changed.prompt
    assert again.cached_tokens == len(again.prompt) - 1
    assert again.logprobs == first.logprobs
    assert changed.cached_tokens == 0
    assert max(abs(a - b) for a, b in zip(first.logprobs, changed.logprobs, strict=True)) > 1e-3


def test_a_prompt_is_scored_with_its_pictures(engine: Engine) -> None:
    assert engine.tower
    rules = engine.tower.rules
    one, _, third = pictures(engine)
    ids = [5, rules.marks[2], rules.token, rules.marks[3], 6, 7]
    first, changed = (asked(engine, ids, [image]).prompt_logprobs for image in (one, third))
    assert [token for _, token in first] == [token for _, token in changed]
    assert first[1][0] == changed[1][0]  # before the picture
    assert first[-1][0] != changed[-1][0]


@pytest.mark.parametrize(
    ("ids", "data", "said"),
    [
        ([5], ["a"], "1 pictures, and input_ids has 0 places"),
        (["pad", "pad"], ["a"], "1 pictures, and input_ids has 2 places"),
        (["pad"], ["a"], "no data URL of a PNG file"),
        (["pad"], ["http://127.0.0.1/a.png"], "no data URL of a PNG file"),
        (["pad"], [DATA_URL + "####"], "number 0: "),
        (["pad"], [url(b"hello")], "bad image"),
        (["pad"], [url(as_file(noise(30, 30)))], "both sides must be multiples"),
        (["pad"], [7], "data URLs of PNG files are wanted"),
        (["pad"], {}, "data URLs of PNG files are wanted"),
    ],
)
def test_a_request_with_wrong_pictures_is_refused(
    engine: Engine, ids: list[Any], data: Any, said: str
) -> None:
    assert engine.tower
    with pytest.raises(RequestError, match=said):
        engine.tower.expanded([engine.tower.rules.token if one == "pad" else one for one in ids], data)


def test_a_folder_without_its_whole_tower_is_refused(tmp_path: Path, engine: Engine) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from millrace.connectors.engines.embedded.model import ModelError

    shutil.copytree(engine.folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "visual" in name)
    save_file({key: value for key, value in tensors.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="its tower is not whole"):
        Engine(str(tmp_path / "model"), max_running=16, max_total_tokens=512, weight_version="0", seed=1)


def test_weights_that_are_sent_are_also_those_of_the_tower(tmp_path: Path, engine: Engine) -> None:
    """As SGLang takes them. A picture that was seen before is seen again."""
    from millrace.connectors.engines.embedded.model import ModelError

    served = Engine(
        str(engine.folder), max_running=16, max_total_tokens=8192, weight_version="0", seed=1, dtype="float32"
    )
    assert served.tower
    ids, images = [2, served.tower.rules.token, 3], pictures(served)[:1]
    served.start()
    try:
        before = asked(served, ids, images)
        stored = {name: each.clone() for name, each in served.tensors.items()}
        assert any("visual" in name for name in stored)
        served.replace_tensors(
            {name: torch.zeros_like(each) for name, each in served.tower.tensors.items()}, "1"
        )
        blind = asked(served, ids, images)
        assert blind.prompt_logprobs != before.prompt_logprobs
        served.replace_tensors(stored, "2")
        assert asked(served, ids, images).prompt_logprobs == before.prompt_logprobs
        seen = dict(served.tower._kept)
        assert seen
        served.replace_tensors(stored, "2")
        served.update_from_disk(str(engine.folder), "2")
        assert dict(served.tower._kept) == seen
        served.replace_tensors({name: torch.zeros_like(each) for name, each in stored.items()}, "3")
        served.update_from_disk(str(engine.folder), "4")
        assert asked(served, ids, images).prompt_logprobs == before.prompt_logprobs
        with pytest.raises(ModelError, match=r"visual\.none is no tensor of the model served"):
            served.replace_tensors({**stored, "visual.none": torch.zeros(1)}, "5")
        assert served.weight_version == "4"
    finally:
        served.stop()
