"""What another start changes: another model is refused; other settings, code and versions are recorded with their iteration."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from millrace.connectors.storage.sampled_hash import SMALL
from millrace.core.config import RunConfig
from millrace.core.errors import ConfigError
from millrace.flows.driver.fingerprints import fingerprints
from millrace.flows.driver.start_changes import branched_fields, check_same_model, start_changes
from tests.support.flow_runs import configuration


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("not the model's")
    save_file({"a": torch.zeros(100_000), "b": torch.ones(100_000)}, folder / "model.safetensors")
    return folder


def config(model: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({**configuration(), "model": {"path": str(model)}, **changes})


def models_of(model: Path) -> dict[str, dict[str, str]]:
    return fingerprints(config(model))


def test_another_model_in_the_folder_is_refused_naming_the_files(model: Path) -> None:
    before = models_of(model)
    assert sorted(before["model"]) == ["model.path: config.json", "model.path: model.safetensors"]
    check_same_model("a", None, before)
    check_same_model("a", before, models_of(model))
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for other in (
        {"a": torch.zeros(100_000), "b": torch.zeros(100_000)},  # values
        {"a": torch.zeros(100_000), "c": torch.ones(100_000)},  # names
        {"a": torch.zeros(100_001), "b": torch.ones(100_000)},  # shapes
    ):
        save_file(other, weights)
        with pytest.raises(
            ConfigError, match=r"(?s)its model changed:.*model.path: model.safetensors.*new run"
        ):
            check_same_model("a", before, models_of(model))
    weights.write_bytes(whole)
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match=r"model.path: config.json"):
        check_same_model("a", before, models_of(model))
    (model / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model.path: config.json"):
        check_same_model("a", before, models_of(model))


def test_another_text_in_the_chat_template_is_refused_once_its_hash_is_known(
    model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")

    def prints() -> dict[str, dict[str, str]]:
        given = {"path": str(model), "chat_template": str(template)}
        return fingerprints(RunConfig.model_validate({**configuration(), "model": given}))

    before = prints()
    template.write_text("{{ messages[0] }}")
    with pytest.raises(ConfigError, match=r"its model changed:\s+model.chat_template: file"):
        check_same_model("a", before, prints())


BESIDE: dict[str, Callable[[str], dict[str, Any]]] = {
    "algorithm.teacher": lambda folder: {"preset": "opd", "teacher": folder},
    "algorithm.reference": lambda folder: {"kl_coef": 0.1, "reference": folder},
    "algorithm.advantage.critic.path": lambda folder: {
        "preset": "ppo",
        "advantage": {"critic": {"path": folder}},
    },
}


@pytest.mark.parametrize("field", BESIDE)
def test_a_branch_may_name_another_model_beside_the_policy_and_a_run_may_not(
    field: str, model: Path, tmp_path: Path
) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for number, folder in enumerate((one, other)):
        folder.mkdir()
        save_file({"a": torch.full((10,), float(number))}, folder / "model.safetensors")
    before, now = (config(model, algorithm=BESIDE[field](str(folder))) for folder in (one, other))
    prints = fingerprints(before), fingerprints(now)
    assert branched_fields({"config": {}}, before, now) == []
    with pytest.raises(ConfigError, match=rf"its model changed:\s+{field}: model.safetensors"):
        check_same_model("a", *prints)
    check_same_model("a", *prints, branched_fields({"config": None}, before, now))
    moved = one.rename(tmp_path / "moved")
    check_same_model("a", prints[0], fingerprints(config(model, algorithm=BESIDE[field](str(moved)))))
    save_file(
        {"a": torch.ones(10)}, moved / "model.safetensors"
    )  # another one in the folder that stays named
    changed = fingerprints(config(model, algorithm=BESIDE[field](str(moved))))
    with pytest.raises(ConfigError, match="its model changed"):
        check_same_model("a", prints[0], changed, branched_fields({"config": None}, before, before))


def test_a_large_file_is_sampled(model: Path) -> None:
    assert SMALL < 1 << 30
    big = model / "tokenizer.model"
    with big.open("wb") as file:
        file.truncate(SMALL + 10)
    before = models_of(model)
    with big.open("r+b") as file:
        file.seek(SMALL)
        file.write(b"x")
    assert models_of(model)["model"] != before["model"]


def test_settings_code_and_versions_that_a_start_takes_up_are_recorded_with_their_iteration(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "rewards_of_mine.py"
    module.write_text("def score(sample):\n    return 1.0\n")
    reward = {"function": "rewards_of_mine:score", "workers": 1}
    before = config(model, reward=reward)
    record: dict[str, Any] = {"fingerprints": fingerprints(before), "versions": {"torch": "1"}}
    assert start_changes(record, before, before, record["fingerprints"], {"torch": "1"}, 0) == []
    module.write_text("def score(sample):\n    return 0.0\n")
    now = config(model, reward={**reward, "timeout_s": 7.0})
    with caplog.at_level(logging.WARNING):
        listed = start_changes(record, before, now, fingerprints(now), {"torch": "2"}, 4)
    (item,) = listed
    assert item["since"] == 4
    fields = [change["field"] for change in item["changes"]]
    assert fields == [
        "reward.timeout_s",
        "reward.function = rewards_of_mine:score: rewards_of_mine.py",
        "version of torch",
    ]
    assert item["changes"][0]["now"] == 7.0
    assert "from iteration 5 on: reward.function = rewards_of_mine:score" in caplog.text
    again = {**record, "changes": listed, "fingerprints": fingerprints(now), "versions": {"torch": "2"}}
    assert start_changes(again, now, now, fingerprints(now), {"torch": "2"}, 6) == listed
    sys.modules.pop("rewards_of_mine")


def test_a_run_of_an_earlier_release_has_no_fingerprints_and_goes_on(model: Path) -> None:
    now = config(model)
    assert start_changes({}, now, now, fingerprints(now), {"torch": "1"}, 1) == []
