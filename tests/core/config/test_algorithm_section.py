"""Presets, overrides, and the combinations that are refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from millrace.core.config.algorithm import Algorithm, Cispo, Clipped, Gae, GroupRelative, Gspo
from millrace.core.config.algorithm.presets import PRESETS, Preset
from millrace.core.config.algorithm.rules import problems
from millrace.core.config.run_config import RunConfig
from tests.support.wrong_configs import GOOD


def configured(algorithm: dict[str, Any], rollout: dict[str, Any], **sections: Any) -> RunConfig:
    given = {**GOOD, "trainer": {}, "algorithm": algorithm, "rollout": rollout, **sections}
    return RunConfig.model_validate(given)


def found(
    algorithm: dict[str, Any],
    rollout: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **sections: Any,
) -> list[str]:
    config = configured(algorithm, {**(rollout or {}), "sampling": sampling or {}}, **sections)
    return [problem.field for problem in problems(config)]


def test_every_preset_is_named_and_its_fields_are_concrete() -> None:
    assert set(PRESETS) == set(get_args(Preset))
    for name, fields in PRESETS.items():
        assert within(fields, Algorithm(preset=name).model_dump()), name


def within(part: Any, whole: Any) -> bool:
    """Whether all that a preset says is in the resolved section; a bare string names a kind."""
    if isinstance(part, dict):
        return all(within(value, whole[name]) for name, value in part.items())
    return bool(part == whole or (isinstance(whole, dict) and part == whole["kind"]))


def test_given_fields_override_the_preset_and_nested_ones_keep_the_rest() -> None:
    algorithm = Algorithm(preset="dapo", loss={"clip_low": 0.5}, overlong={"factor": 2})
    assert algorithm.loss == Clipped(clip_low=0.5, clip_high=0.28)
    assert algorithm.aggregation == "token_mean"
    assert algorithm.overlong is not None
    assert algorithm.overlong.factor == 2
    assert Algorithm(preset="dapo", overlong=None).overlong is None


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ({"preset": "gspo"}, Gspo(clip_low=3e-4, clip_high=4e-4)),
        ({"preset": "gspo", "loss": "gspo"}, Gspo(clip_low=3e-4, clip_high=4e-4)),
        ({"preset": "gspo", "loss": {"clip_low": 0.1}}, Gspo(clip_low=0.1, clip_high=4e-4)),
        ({"preset": "dapo", "loss": {"kind": "clipped"}}, Clipped(clip_high=0.28)),
        ({"preset": "dapo", "loss": "cispo"}, Cispo()),
        ({"preset": "gspo", "loss": {"kind": "cispo", "clip_low": 1.0}}, Cispo(clip_low=1.0)),
        ({"loss": {"clip_high": 0.5}}, Clipped(clip_high=0.5)),
    ],
    ids=str,
)
def test_a_loss_of_the_presets_kind_keeps_its_fields_and_another_kind_none(
    given: dict[str, Any], loss: Any
) -> None:
    assert Algorithm(**given).loss == loss


def test_estimators_are_switched_like_losses() -> None:
    assert Algorithm(preset="dr_grpo").advantage == GroupRelative(divide_by_std=False)
    assert Algorithm(preset="dr_grpo", advantage="gae").advantage == Gae()
    assert Algorithm(preset="ppo", advantage={"lam": 0.9}).advantage == Gae(lam=0.9)
    assert Algorithm(preset="ppo", advantage="group_relative").critic is None


def test_no_preset_is_grpo() -> None:
    assert Algorithm() == Algorithm(preset="grpo")


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_section_stays_what_it_is(name: str) -> None:
    algorithm = Algorithm(preset=name)
    assert Algorithm.model_validate(algorithm.model_dump(mode="json")) == algorithm


@pytest.mark.parametrize(
    "bad",
    [
        {"preset": "ppoo"},
        {"preset": ["grpo"]},
        {"clip": 0.2},
        {"loss": {"clip_low": 1.5}},
        {"loss": {"kind": "function", "function": "x"}},
        {"loss": "function"},
        {"loss": {"kind": "cispo", "dual_clip": 3}},
        {"loss": {"kind": "reinforce", "clip_low": 0.1}},
        {"advantage": {"kind": "max_rl", "epsilon": 0.1}},
        {"advantage": {"critic": {}}},
        {"aggregation": "per_rollout"},
    ],
)
def test_unknown_presets_keys_and_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Algorithm(**bad)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_sense(name: str) -> None:
    algorithm = {"preset": name} | ({"teacher": "teacher"} if name == "opd" else {})
    assert found(algorithm, {"samples_per_prompt": 4}) == []


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "max_rl", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_is_refused_for_group_estimators(preset: str) -> None:
    assert found({"preset": preset}, {"samples_per_prompt": 1}) == ["rollout.samples_per_prompt"]


@pytest.mark.parametrize("algorithm", [{"preset": "ppo"}, {"preset": "reinforce_plus_plus"}, {"loss": "sft"}])
def test_a_group_of_one_is_fine_without_groups(algorithm: dict[str, Any]) -> None:
    assert found(algorithm, {"samples_per_prompt": 1}) == []


CORRECTED = {"correction": {"kind": "truncate"}}


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [
        ({"advantage": "none"}, "algorithm.advantage"),
        ({"distillation_coef": 1}, "algorithm.teacher"),
        ({"teacher": "x"}, "algorithm.distillation_coef"),
        ({"overlong": {"buffer_tokens": 1000}}, "algorithm.overlong.buffer_tokens"),
        ({"preset": "max_rl", "overlong": {}}, "algorithm.overlong"),
        ({"preset": "ppo", "loss": "gspo"}, "algorithm.loss"),
        ({"preset": "gspo", "distillation_coef": 1, "teacher": "x"}, "algorithm.loss"),
        ({"loss": {"dual_clip": 1.1}}, "algorithm.loss.dual_clip"),
        ({"loss": {"kind": "sapo", "temperatures": [0, 1]}}, "algorithm.loss.temperatures"),
        ({"loss": "sft", "kl_coef": 0.1}, "algorithm.kl_coef"),
        ({"kl_coef": 0.1, "kl_placement": "reward"}, "algorithm.kl_placement"),
        ({"kl_coef": 0.1, "kl_kind": "k1"}, "algorithm.kl_kind"),
        ({"preset": "ppo", "kl_coef": 0.1, "kl_unbiased": True}, "algorithm.kl_unbiased"),
        ({"kl_target": 0.1}, "algorithm.kl_coef"),
        ({"reference_update_steps": 10}, "algorithm.reference_update_steps"),
        ({"correction": {"low": 3}}, "algorithm.correction.low"),
        ({"correction": {"kind": "mask", "low": 1.1}}, "algorithm.correction.low"),
        ({"old_logprobs": "rollout", **CORRECTED}, "algorithm.old_logprobs"),
        ({"correction": {"kind": "icepop"}}, "algorithm.correction"),
        ({"correction": {"kind": "icepop", "low": 0.5, "level": "sequence_product"}}, "algorithm.correction"),
        ({"loss": "sft", **CORRECTED}, "algorithm.correction"),
        ({"loss": "sft", "correction": {"max_token_age": 1}}, "algorithm.correction.max_token_age"),
        ({"preset": "gspo", "correction": {"max_token_age": 1}}, "algorithm.correction.max_token_age"),
    ],
)
def test_senseless_combinations_are_refused(algorithm: dict[str, Any], field: str) -> None:
    # two problems of one field are one refusal
    assert list(dict.fromkeys(found(algorithm))) == [field]


def test_reinforce_takes_one_step_an_iteration() -> None:
    assert found({"preset": "rloo"}, trainer={"passes": 1}) == []
    assert found({"preset": "rloo"}, trainer={"passes": 2}) == ["algorithm.loss"]


def test_unbiased_k1_may_stand_in_the_loss() -> None:
    assert found({"kl_coef": 0.1, "kl_kind": "k1", "kl_unbiased": True}) == []


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)])
@pytest.mark.parametrize(
    "algorithm",
    [
        CORRECTED,
        {"correction": {"veto": 0.01}},
        {"correction": {"opsm_delta": 0.1}},
        {"old_logprobs": "rollout"},
    ],
)
def test_ratios_against_the_engine_refuse_truncated_sampling(
    name: str, value: float, algorithm: dict[str, Any]
) -> None:
    assert found(algorithm, sampling={name: value}) == [f"rollout.sampling.{name}"]
    assert found({}, sampling={name: value}) == []


def test_greedy_sampling_and_filters_without_variance_are_refused() -> None:
    assert found({}, sampling={"temperature": 0}) == ["rollout.sampling.temperature"]
    only = {"drop_zero_variance": True}
    assert found({"preset": "ppo"}, {"samples_per_prompt": 1}, filter=only) == ["filter.drop_zero_variance"]


def test_all_problems_come_at_once_with_reason_and_remedy() -> None:
    algorithm = {"loss": {"dual_clip": 1.1}, "kl_target": 1, "correction": {"low": 3}}
    many = list(problems(configured(algorithm, {"samples_per_prompt": 1})))
    assert len(many) == 4
    assert all(p.reason and p.remedy for p in many)


@pytest.mark.parametrize(
    ("loss", "low", "high"), [("gspo", 3e-4, 4e-4), ("cispo", 1.0, 4.0), ("clipped", 0.2, 0.2)]
)
def test_a_loss_has_the_clip_range_of_its_paper_with_and_without_its_preset(
    loss: str, low: float, high: float
) -> None:
    alone = Algorithm(loss=loss).loss  # type: ignore[arg-type]
    assert isinstance(alone, Clipped | Gspo | Cispo)
    assert (alone.clip_low, alone.clip_high) == (low, high)
    if loss in PRESETS:
        assert Algorithm(preset=loss).loss == alone  # type: ignore[arg-type]
