"""Command lines of SGLang engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from millrace.connectors.engines.launch import without_http_proxy
from millrace.connectors.engines.sglang.launch import (
    COLOCATED_MEMORY,
    sglang_command,
    sglang_environment,
    write_sglang_keys,
)
from tests.support.local_handle import fleet_config


def command(index: int, **changes: dict[str, Any]) -> list[str]:
    engines = {"kind": "sglang", **changes.pop("engines", {})}
    config = fleet_config(Path("/model"), engines=engines, **changes)
    return sglang_command(config, "/model", 4000, index, 5000, Path("/keys.yaml"))


def value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_options_go_by_their_own_names() -> None:
    line = command(
        0, engines={"gpus": 2, "sglang": {"mem_fraction_static": 0.7, "disable_radix_cache": True}}
    )
    assert value(line, "--tp-size") == "2"
    assert value(line, "--mem-fraction-static") == "0.7"
    assert "--disable-radix-cache" in line
    assert "--disaggregation-mode" not in line
    assert "--enable-memory-saver" not in line


def test_the_first_engines_prefill_and_the_others_decode() -> None:
    lines = [command(index, engines={"count": 3, "prefill": 2}) for index in range(3)]
    assert [value(line, "--disaggregation-mode") for line in lines] == ["prefill", "prefill", "decode"]
    ports = [value(line, "--disaggregation-bootstrap-port") for line in lines[:2]]
    assert ports == ["5000", "5000"]  # as it was told; each engine has its own
    assert "--disaggregation-bootstrap-port" not in lines[2]


def test_a_draft_model_keeps_its_weights_where_memory_is_given_back() -> None:
    speculative = {
        "sglang": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "/draft"}
    }
    shared = command(0, engines=speculative, placement={"colocate": True})
    assert "--enable-draft-weights-cpu-backup" in shared
    assert "--enable-memory-saver" in shared
    assert value(shared, "--speculative-draft-model-path") == "/draft"
    assert "--enable-draft-weights-cpu-backup" not in command(0, engines=speculative)


def test_engines_that_keep_their_memory_leave_the_trainer_the_same_share() -> None:
    kept = command(0, placement={"colocate": True, "offload_engines": False})
    assert value(kept, "--mem-fraction-static") == str(COLOCATED_MEMORY)
    assert "--enable-memory-saver" not in kept


def test_adapters_by_name_have_a_slot_a_version_and_are_loaded_strictly(tiny_model: Path) -> None:
    lora = {"rank": 16, "targets": r"model\.layers\.1\.(self_attn\.(q|v)|mlp\.(gate|up|down))_proj"}
    by_name = {"trainer": {"lora": lora, "device": "cuda"}, "sync": {"lora": "names"}}
    engines = {"kind": "sglang", "sglang": {"lora_backend": "triton"}}
    ahead = {"pipeline": {"ahead": 2}, "algorithm": {"correction": {"kind": "truncate"}}}
    config = fleet_config(tiny_model, engines=engines, **by_name, **ahead)
    line = sglang_command(config, str(tiny_model), 4000, 0, 5000, Path("/keys.yaml"))
    assert {"--enable-lora", "--lora-strict-loading"} <= set(line)
    assert value(line, "--max-lora-rank") == "16"
    assert value(line, "--max-loras-per-batch") == "4"
    assert value(line, "--lora-backend") == "triton"
    at = line.index("--lora-target-modules") + 1
    assert line[at : at + 5] == ["down_proj", "gate_proj", "q_proj", "up_proj", "v_proj"]
    assert line[at + 5].startswith("--")
    merged = fleet_config(tiny_model, engines=engines, trainer=by_name["trainer"])
    assert "--enable-lora" not in sglang_command(merged, str(tiny_model), 4000, 0, 5000, Path("/keys.yaml"))


def test_engines_meet_where_their_servers_listen() -> None:
    assert sglang_environment({}, "127.0.0.1", 60)["UCX_NET_DEVICES"] == "lo"
    elsewhere = sglang_environment({"PATH": "p"}, "192.0.2.7", 60)
    assert (elsewhere["SGLANG_HOST_IP"], elsewhere["PATH"]) == ("192.0.2.7", "p")
    assert "UCX_NET_DEVICES" not in elsewhere
    assert (
        sglang_environment({"UCX_NET_DEVICES": "mlx5_0:1"}, "127.0.0.1", 60)["UCX_NET_DEVICES"] == "mlx5_0:1"
    )


def test_servers_of_a_run_ask_each_other_past_proxies() -> None:
    """SGLang's start asks itself, and a decoding engine asks one that prefills on another node."""
    given = {"PATH": "p", "HTTP_PROXY": "a", "http_proxy": "a", "HTTPS_PROXY": "b", "NO_PROXY": "c"}
    assert without_http_proxy(given) == {"PATH": "p", "HTTPS_PROXY": "b", "NO_PROXY": "c"}
    assert without_http_proxy({"ALL_PROXY": "a"}) == {"HTTPS_PROXY": "a"}
    assert without_http_proxy({"all_proxy": "a", "https_proxy": "b"}) == {"https_proxy": "b"}


def test_sglang_gives_no_request_up_that_only_waits() -> None:
    environment = sglang_environment({}, "127.0.0.1", 900.5)
    assert int(environment["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"]) > 10**8
    assert environment["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "901"


def test_an_engines_key_is_in_a_file_of_its_own_and_not_on_the_command_line(tmp_path: Path) -> None:
    line, keys = command(0), write_sglang_keys(tmp_path, "0f" * 32)
    assert value(line, "--config") == "/keys.yaml"
    assert "--api-key" not in line
    assert yaml.safe_load(keys.read_text()) == {"api-key": "0f" * 32, "admin-api-key": "0f" * 32}
