"""Steps against the likeliest tokens of a served teacher, held against its weights and a plain Hugging Face policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from millrace.connectors.teachers.served_teacher import ResponseLogprobs, ServedTeacher
from millrace.connectors.trainers.rank import HeldOutSample
from millrace.core.config.algorithm.section import TeacherServer
from tests.support.engine_process import embedded_engine
from tests.support.plain_trainer import Plain
from tests.support.trainer_ranks import RankFailedError, Workers, configuration, samples, write_batch

K = 5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "data": (2, {}),
    "tensor": (2, {"tensor": 2, "sequence": True}),
    "pipeline": (2, {"pipeline": 2}),
    "context": (2, {"context": 2}),
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [{**row, "advantage": 0.0} for row in samples(1)]  # preset opd has none


@pytest.fixture(scope="module")
def teacher(model: Callable[..., Path]) -> Path:
    return model("qwen3", hidden_size=48)


@pytest.fixture(scope="module")
def answered(
    rows: list[dict[str, Any]], teacher: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The rows with what the teacher says of them, as the reward task stores it."""
    log = tmp_path_factory.mktemp("teacher") / "engine.log"
    with embedded_engine(teacher, "--dtype", "float32", log=log) as (url, _):
        server = ServedTeacher(TeacherServer.model_validate({"url": url, "top_k": K}))

        async def ask() -> list[ResponseLogprobs]:
            return [await server.logprobs(row["tokens"], row["response_length"]) for row in rows]

        answers = asyncio.run(ask())
    return [
        {
            **row,
            "teacher_logprobs": found.logprobs,
            "teacher_top_tokens": found.top_tokens,
            "teacher_top_logprobs": found.top_logprobs,
        }
        for row, found in zip(rows, answers, strict=True)
    ]


def kl(policy: Any, teacher: Any, row: dict[str, Any]) -> Tensor:
    """KL [R] of the policy's distribution over the teacher's K likeliest tokens and all others from the teacher's own."""
    tokens, size = torch.tensor([row["tokens"]]), row["response_length"]
    with torch.no_grad():
        theirs = teacher(tokens).logits[0, -size - 1 : -1].softmax(-1)
    ours = policy(tokens).logits[0, -size - 1 : -1].softmax(-1)
    tops = theirs.topk(K).indices
    p, q = ours.gather(1, tops), theirs.gather(1, tops)
    inside = (p * (p / q).log()).sum(-1)
    return inside + (1 - p.sum(-1)) * ((1 - p.sum(-1)) / (1 - q.sum(-1))).log()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_descends_the_kl_from_the_teachers_weights(
    workers: Workers,
    model: Callable[..., Path],
    teacher: Path,
    answered: list[dict[str, Any]],
    tmp_path: Path,
    layout: str,
) -> None:
    world, parallel = LAYOUTS[layout]
    served = {"url": "http://nowhere", "top_k": K}
    algorithm = {"preset": "opd", "distillation_coef": 0.5, "teacher_server": served}
    config = configuration(model(), world, algorithm=algorithm, parallel=parallel)
    with workers.group(config) as group:
        (step,) = group.train([1], write_batch(tmp_path, answered))
    plain = Plain(model())
    weights: Any = transformers.AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    masks = [torch.tensor(row["loss_mask"]) for row in answered]
    tokens = [kl(plain.model, weights, row) * mask for row, mask in zip(answered, masks, strict=True)]
    mean = torch.cat(tokens).sum() / torch.cat(masks).sum()
    assert step["teacher_kl"] == pytest.approx(mean.item(), rel=1e-4)
    assert step["loss"] == pytest.approx(0.5 * mean.item(), rel=1e-4)
    assert step["grad_norm"] == pytest.approx(plain.step(0.5 * mean), rel=1e-4)


@pytest.mark.parametrize("lacks", ["all of them", "some of a token's"])
def test_a_batch_without_the_likeliest_tokens_is_refused(
    workers: Workers,
    model: Callable[..., Path],
    answered: list[dict[str, Any]],
    tmp_path: Path,
    lacks: str,
) -> None:
    wrong = [dict(row) for row in answered]
    for name in ("teacher_top_tokens", "teacher_top_logprobs"):
        size = wrong[3]["response_length"]
        wrong[3][name] = None if lacks == "all of them" else wrong[3][name][: 2 * size]
    served = {"preset": "opd", "teacher_server": {"url": "http://nowhere", "top_k": K}}
    with (
        workers.group(configuration(model(), algorithm=served)) as group,
        pytest.raises(RankFailedError, match=rf"teacher_server.top_k.*1 of the step's 8 samples have no {K}"),
    ):
        group.train([1], write_batch(tmp_path, wrong))


def test_losses_of_texts_that_no_teacher_saw_are_those_of_a_run_without_one(
    workers: Workers, model: Callable[..., Path]
) -> None:
    """A sync compares engines and trainer on fixed texts, whatever the loss compares."""
    texts = [HeldOutSample([5, 6, 7, 8], [1, 1, 1]), HeldOutSample([9, 8, 7], [0, 1])]
    found = []
    for algorithm in ({"preset": "opd", "teacher_server": {"url": "http://nowhere", "top_k": K}}, {}):
        with workers.group(configuration(model(), algorithm=algorithm)) as group:
            found += group.call("losses", 0, texts)
    assert found[0] == found[1]
    assert min(found[0]) > 0
