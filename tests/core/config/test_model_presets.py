"""Presets of models: published sizes, layouts that fit, and a checkpoint that is another model is refused field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from millrace.core.config import RunConfig, rules
from millrace.core.config.model_preset import differences, preset_values
from millrace.core.config.parts.from_preset import is_from_preset
from millrace.core.config.plan.preset_memory import KINDS, layout_memory, preset_config
from millrace.core.config.reading.findings import all_fields
from millrace.core.families.architecture import architecture
from millrace.core.families.config_file import read_hf_config, resolved
from millrace.core.families.presets import PRESETS
from millrace.core.families.registry import family_of
from millrace.flows.preflight.check_model import ReadModel, check_model
from tests.core.config.test_form import SCHEMA, submitted

# as the indices of the published weights count them, a tied output layer once; in billions where only that is published
PUBLISHED: dict[str, int | float] = {
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-instruct-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79.67,
    # of texts alone
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 34.66,
    "qwen3.5-397b-a17b": 396.35,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32.57,
    "glm4.7-flash": 29.94,
    "moonlight-16b-a3b": 15.96,
    "deepseek-v3": 671.03,
    "kimi-k2": 1026.41,
    "kimi-k2-thinking": 1026.41,
    "glm4.5-106b-a12b": 106.85,
    "glm4.5-355b-a32b": 352.8,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# models that others ship launch files for, and the family that a preset of them waits for
WAITING = {
    "glm5-744b-a40b": "glm_moe_dsa",
    "glm5.2-744b-a40b": "glm_moe_dsa",
    "mimo-7b-rl": "mimo",
    "minimax-m2": "minimax_m2",
}


def folder_of(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def config(given: dict[str, Any]) -> RunConfig:
    least: dict[str, Any] = {"run": {"name": "a"}, "data": {"sources": [{"path": "p"}]}}
    model = {"path": "m", "preset": "qwen3-14b", **given.pop("model", {})}
    return RunConfig.model_validate({**least, "model": model, **given})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_the_published_model(name: str, tmp_path: Path) -> None:
    read = read_hf_config(folder_of(tmp_path, dict(PRESETS[name].config)))
    count, published = architecture(read).parameters, PUBLISHED[name]
    assert count == published if isinstance(published, int) else round(count / 1e9, 2) == published


@pytest.mark.parametrize("name", [name for name in PRESETS if "-a" in name])
def test_a_token_of_a_mixture_is_multiplied_with_as_many_parameters_as_the_models_name_says(
    name: str,
) -> None:
    arch = architecture(resolved(PRESETS[name].config, name))
    named = float(name.rpartition("-a")[2].removesuffix("b"))
    assert arch.products / 1e9 == pytest.approx(named, abs=0.9)


@pytest.mark.parametrize("name", WAITING)
def test_a_preset_that_is_missing_waits_for_its_family(name: str) -> None:
    assert name not in PRESETS
    if family_of(WAITING[name]) is None:
        pytest.skip(f"the family {WAITING[name]} is not known")


@pytest.mark.parametrize("name", PRESETS)
def test_every_layout_fits_its_gpus_and_contradicts_nothing(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, dict(PRESETS[name].config))
    counts = [layout.gpus for layout in PRESETS[name].layouts]
    assert counts == sorted(set(counts))
    for memory in layout_memory(name):
        assert memory.gpu in KINDS, memory.layout
        for gpus in (memory.layout.gpus, 2 * memory.layout.gpus):
            made = preset_config(name, gpus)
            here = made.model_copy(update={"model": made.model.model_copy(update={"path": folder})})
            found = [*rules.problems(here), *check_model(here, False, ReadModel())]
            # the folder has no weights and no tokenizer
            assert [problem for problem in found if problem.field != "model.path"] == []
            assert made.engines.count * made.engines.gpus == gpus == made.trainer.world_size
            # on hosts of eight GPUs
            assert made.engines.gpus // made.engines.nodes <= 8
            assert made.placement.tensor_over_hosts == (made.engines.nodes > 1)


@pytest.mark.parametrize(
    ("given", "world", "tensor", "engines"),
    [
        ({}, 4, 4, 4),
        ({"trainer": {"world_size": 8}}, 8, 4, 8),
        ({"trainer": {"world_size": 24}}, 24, 4, 24),
        ({"trainer": {"parallel": {"tensor": 2}}}, 4, 2, 4),
        ({"engines": {"kind": "sglang", "gpus": 2}}, 4, 4, 2),
        ({"engines": "sglang", "trainer": None}, 4, 4, 4),
        ({"engines": {"count": 3}, "placement": {"colocate": False}}, 4, 4, 3),
        ({"algorithm": {"loss": "sft"}}, 4, 4, 1),
        ({"trainer": {"device": "cpu"}}, 1, 1, 1),
        ({"engines": "embedded"}, 1, 1, 1),
        ({"trainer": {"rank": "mine:Rank"}}, 1, 1, 1),
        ({"pipeline": {"rollouts_only": True}}, 1, 1, 1),
        ({"model": {"preset": None}}, 1, 1, 1),
    ],
)
def test_a_preset_fills_what_the_user_leaves_out(
    given: dict[str, Any], world: int, tensor: int, engines: int
) -> None:
    values = {name: value for name, value in given.items() if value is not None}
    made = config(values)
    assert (made.trainer.world_size, made.trainer.parallel.tensor) == (world, tensor)
    assert made.engines.count == engines
    assert RunConfig.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize("wrong", ["many", 0, -4, 2.5, [8], {"a": 1}])
def test_a_number_that_is_none_is_its_fields_problem(wrong: Any) -> None:
    for section, name in (("trainer", "world_size"), ("engines", "gpus")):
        with pytest.raises(ValidationError) as raised:
            config({section: {name: wrong}})
        assert name in str(raised.value.errors()[0]["loc"])


def test_the_fields_that_are_the_presets_are_those_that_it_sets() -> None:
    def paths(values: dict[str, Any], above: str = "") -> set[str]:
        inner = {f"{above}{name}": value for name, value in values.items()}
        below = {
            name: value for name, value in inner.items() if name not in marked and isinstance(value, dict)
        }
        return {
            *(inner.keys() - below.keys()),
            *(path for name, value in below.items() for path in paths(value, f"{name}.")),
        }

    marked = {path for path, field in all_fields().items() if is_from_preset(field)}
    outside = {path for path in marked if not path.startswith("algorithm.")}
    assert outside == paths(preset_values({"model": {"preset": "deepseek-v3"}})) - {"engines.kind"}


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-30b-a3b"])
def test_an_untouched_form_with_a_preset_has_its_layout(name: str) -> None:
    given = {
        "run": {"name": "a"},
        "model": {"path": "m", "preset": name},
        "data": {"sources": [{"path": "p"}]},
        "evaluation": {"sets": [{"name": "held_out", "path": "h"}]},
    }
    values = submitted(given)
    jsonschema.validate(values, SCHEMA)
    assert RunConfig.model_validate(values) == RunConfig.model_validate(given)
    assert RunConfig.model_validate(values).placement.colocate


def test_an_unknown_preset_and_gpus_without_a_layout_are_named() -> None:
    (unknown,) = rules.model_problems(config({"model": {"preset": "qwen3-14"}}))
    assert (unknown.field, unknown.remedy) == ("model.preset", "did you mean qwen3-14b?")
    (three,) = rules.model_problems(config({"trainer": {"world_size": 3}}))
    assert three.field == "trainer.world_size"
    assert "layouts for 4 and 8 GPUs" in three.reason
    assert not list(rules.model_problems(config({"trainer": {"world_size": 3, "parallel": {"tensor": 3}}})))


def test_a_checkpoint_that_is_another_model_is_refused_field_by_field(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, dict(PRESETS["qwen3-8b"].config))
    wrong = config({"model": {"path": folder, "preset": "qwen3-4b"}})
    found = [p for p in check_model(wrong, False, ReadModel()) if p.field == "model.preset"]
    assert {p.reason.split(" is ")[0] for p in found} == {
        "hidden_size",
        "intermediate_size",
        "tie_word_embeddings",
    }
    first = next(p for p in found if p.reason.startswith("hidden_size"))
    assert first.reason == f"hidden_size is 2560 in the preset, and 4096 in {folder}/config.json"
    assert {(p.value, p.remedy) for p in found} == {("qwen3-4b", "set it to qwen3-8b")}


def test_other_values_of_a_preset_are_of_keys_that_it_has_and_are_read() -> None:
    for name, preset in PRESETS.items():
        for key, values in preset.also.items():
            assert key in preset.config, name
            for value in values:
                read = resolved({**preset.config, key: value}, name)
                assert list(differences(name, read, "m")) == []
                assert read != resolved(preset.config, name)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"max_position_embeddings": 32768}, []),
        ({"max_position_embeddings": 131072}, ["max_position_embeddings"]),
        ({"rope_theta": 10000.0}, ["rope_theta"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling"]),
    ],
)
def test_a_variant_of_the_same_sizes_is_taken_if_it_is_a_published_one(
    change: dict[str, Any], refused: list[str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, {**PRESETS["qwen3-4b"].config, **change})
    made = config({"model": {"path": folder, "preset": "qwen3-4b"}})
    found = [p for p in check_model(made, False, ReadModel()) if p.field == "model.preset"]
    assert [p.reason.split(" is ")[0] for p in found] == refused
    assert all(p.remedy == "leave it out, and set trainer.parallel" for p in found)
