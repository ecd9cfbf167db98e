"""The trainer's own log-probabilities one type wider, in every layout, and the limit that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.core.config.trainer import Parallel
from millrace.core.logprob_gap import MULTIPLE, LogprobGuard
from tests.support.slow_members import slow_but
from tests.support.trainer_ranks import (
    OF_FSDP,
    Group,
    RankFailedError,
    Workers,
    configuration,
    log_probabilities,
    samples,
    write_batch,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "data": {},
    "tensor": {"parallel": {"tensor": 2}},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "virtual stages": {"parallel": {"pipeline": 2, "virtual": 2}},
    "context": {"parallel": {"context": 2}},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "expert": {"parallel": {"expert": 2}},
    "tensor of experts": {"parallel": {"expert_tensor": 2}},
    "tensor and sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
}
CASES = [("qwen3", name) for name in LAYOUTS] + [("qwen3_moe", name) for name in EXPERTS]
CASES += [("qwen3_next", "tensor and sequence")]
Logprobs = dict[str, list[float]]  # by sample


def wider_log_probabilities(rank: Any, batch_url: str) -> Logprobs:
    """As `log_probabilities`, computed one type wider. Raises AssertionError if anything of the model is another afterwards."""
    passes, inner = rank.learner.passes, rank.learner.policy.inner

    def state() -> dict[str, Any]:
        weights = {
            name: (id(w), w.dtype, w.data_ptr(), w.double().sum().item())
            for name, w in inner.named_parameters()
        }
        return {**weights, "settings": (inner.config.pipeline_dtype, inner.config.moe_router_dtype)}

    before, narrow = state(), passes.logprobs

    def wide(packs: Any) -> Any:
        del passes.logprobs  # which `wider_logprobs` calls
        return passes.wider_logprobs(packs)

    passes.logprobs = wide
    found = log_probabilities(rank, batch_url)
    assert passes.logprobs == narrow
    assert state() == before
    return found


def round_weights(rank: Any) -> None:
    for weight in rank.learner.policy.inner.parameters():
        weight.data.copy_(weight.data.bfloat16())


def largest(one: Logprobs, other: Logprobs) -> float:
    assert one.keys() == other.keys()
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))


@pytest.fixture(scope="module")
def truth(workers: Workers, model: Callable[..., Path], batch: str) -> dict[str, Logprobs]:
    """Log-probabilities of float32 trainers whose weights are rounded to bfloat16, by family."""
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in CASES):
        with workers.group(configuration(model(kind, num_hidden_layers=4))) as group:
            group.run(round_weights)
            found[kind] = group.run(log_probabilities, batch.format(1))[0]
    return found


def compare(group: Group, narrow: Logprobs, folder: Path) -> None:
    """A batch whose log-probabilities are the trainer's own is trained; one that is far off is refused, and says why."""
    rows = samples(1)
    for row in rows:
        row["rollout_logprobs"] = [0.7 * value for value in narrow[row["sample_id"]]]
    message = r"RefusedStepError: step 1: .*since rounding to bfloat16 makes 0\.00.*It looks like \w"
    with pytest.raises(RankFailedError, match=message):
        group.step(1, write_batch(folder / "off", rows), LogprobGuard())
    for row in rows:
        row["rollout_logprobs"] = narrow[row["sample_id"]]
    url = write_batch(folder / "right", rows)
    step = group.step(1, url, LogprobGuard())[0]
    assert step["logprob_gap_mean"] < 1e-5 < 1e-4 < step["logprob_gap_floor"] < 0.01
    assert step["logprob_gap_limit"] == pytest.approx(MULTIPLE * step["logprob_gap_floor"])


def test_every_way_to_cut_the_model_is_in_the_tables() -> None:
    cut = {
        name
        for table in (LAYOUTS, EXPERTS)
        for changes in table.values()
        for name in changes.get("parallel", {})
    }
    assert cut == set(Parallel.model_fields) - OF_FSDP


@pytest.mark.parametrize(
    ("kind", "layout"),
    slow_but(CASES, ("qwen3", "one rank"), ("qwen3", "pipeline"), ("qwen3_moe", "tensor and sequence")),
)
def test_bfloat16_weights_compute_as_in_float32(
    workers: Workers,
    model: Callable[..., Path],
    batch: str,
    truth: dict[str, Logprobs],
    tmp_path: Path,
    kind: str,
    layout: str,
) -> None:
    """Every bfloat16 number is a float32 number: a trainer whose weights are float32 ones of the same values says the same."""
    world = 1 if layout == "one rank" or "recompute" in layout else 2
    changes = (LAYOUTS if kind == "qwen3" else EXPERTS)[layout]
    with workers.group(
        configuration(model(kind, num_hidden_layers=4), world, dtype="bfloat16", **changes)
    ) as group:
        narrow = group.run(log_probabilities, batch.format(1))[0]
        found = group.run(wider_log_probabilities, batch.format(1))[0]
        assert group.run(log_probabilities, batch.format(1))[0] == narrow, "the measure leaves no trace"
        compare(group, narrow, tmp_path)
    assert largest(found, truth[kind]) < 2e-5 < largest(narrow, truth[kind])


def test_float32_weights_compute_as_in_float64(
    workers: Workers, model: Callable[..., Path], batch: str
) -> None:
    from transformers import AutoModelForCausalLM

    with workers.group(configuration(model())) as group:
        narrow = group.run(log_probabilities, batch.format(1))[0]
        found = group.run(wider_log_probabilities, batch.format(1))[0]
    plain = AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float64)
    expected = {}
    for row in samples(1):
        tokens = torch.tensor([row["tokens"]])
        with torch.no_grad():
            logprobs = plain(tokens).logits[0, :-1].log_softmax(-1)
        expected[row["sample_id"]] = logprobs.gather(1, tokens[0, 1:, None])[
            -row["response_length"] :, 0
        ].tolist()
    assert largest(found, expected) < 1e-6
    assert largest(found, expected) < largest(narrow, expected)


def test_a_floor_of_a_surer_policy_is_measured_again_before_a_step_is_refused(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path
) -> None:
    with workers.group(configuration(model(), dtype="bfloat16")) as group:
        narrow = group.run(log_probabilities, batch.format(1))[0]
        rows = samples(1)
        for row in rows:
            row["rollout_logprobs"] = [value + 0.0008 for value in narrow[row["sample_id"]]]
        url = write_batch(tmp_path, rows)
        step = group.step(1, url, LogprobGuard(floor=1e-5))[0]
    assert step["logprob_gap_floor"] > 1e-4, "what the run goes on with"


@pytest.mark.parametrize("world", slow_but([1, 2], 1))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_are_bit_for_bit_those_without_the_measure(
    workers: Workers, model: Callable[..., Path], batch: str, tmp_path: Path, dtype: str, world: int
) -> None:
    """Casting parameters in place took their gradients' hooks from them."""
    found = []
    for guards in ([None, None], [LogprobGuard(), LogprobGuard()]):
        with workers.group(configuration(model(), world, dtype=dtype)) as group:
            urls = []
            narrow = group.run(log_probabilities, batch.format(1))[0]
            for step in (1, 2):
                rows = samples(step)
                for row in rows:
                    own = narrow.get(row["sample_id"]) or [-4.6] * row["response_length"]
                    row["rollout_logprobs"] = own
                urls.append(write_batch(tmp_path / str(step), rows))
            made = [group.step(1, urls[0], guards[0])[0]]
            made += [group.step(2, urls[1], guards[1] and LogprobGuard(limit=9.0))[0]]
            found.append([{name: step[name] for name in ("loss", "grad_norm", "entropy")} for step in made])
    assert found[0] == found[1]
