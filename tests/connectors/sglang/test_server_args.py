"""Options of the installed SGLang: found in its source, and given on its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.connectors.engines.sglang.launch import sglang_command
from millrace.connectors.engines.sglang.server_args import (
    decode_graphs,
    option_arguments,
    option_problems,
    server_args,
)
from millrace.core.errors import ConfigError
from tests.support.local_handle import fleet_config

SOURCE = '''
import package_for_cuda

@dataclasses.dataclass
class ServerArgs:
    """Fields as SGLang 0.5.17 writes them, and older ones."""

    model_path: A[str, Arg(help="model", aliases=["--model"]), NS("model")]
    json_model_override_args: A[str, "JSON", NS("model")] = "{}"
    disable_radix_cache: A[bool, "help", NS("memory")] = False
    enable_multimodal: A[Optional[bool], "help", NS("mm")] = None
    dllm_fdfo: A[bool, Arg(help="help", action=argparse.BooleanOptionalAction), NS("x")] = True
    always_on: A[bool, "help"] = True
    fp8_gemm_runner_backend: A[str, Arg(help="help", cli_name="--fp8-gemm-backend")] = "auto"
    cuda_graph_max_bs_decode: A[Optional[int], "help"] = None
    disable_cuda_graph: A[bool, "help"] = False
    disable_prefill_cuda_graph: A[bool, "help"] = False
    disable_decode_cuda_graph: A[bool, "help"] = False
    cuda_graph_bs_prefill: A[Optional[List[int]], "help"] = None
    cuda_graph_bs_decode: A[Optional[List[int]], "help"] = None
    forward_hooks: A[Optional[List[dict[str, Any]]], Arg(help="help", type_parser=json_list_type)] = None
    lora_paths: A[Optional[List[dict[str, str]]], Arg(action=LoRAPathAction, action_kwargs={"nargs": "*"})] = None
    older: bool = False
    either: Union[bool, str] = "auto"

    def not_a_field(self) -> None:
        local: int = 1
'''


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with an SGLang that cannot be imported here."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(SOURCE)
    (tmp_path / "sglang-0.5.17.dist-info").mkdir()
    (tmp_path / "sglang-0.5.17.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.17\n")
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(tmp_path))
    return tmp_path


def test_version_and_fields_come_from_the_folder_that_a_server_uses(packages: Path) -> None:
    version, fields = server_args()
    assert version == "0.5.17"
    assert {"model_path", "older", "dllm_fdfo"} < set(fields)
    assert not {"not_a_field", "local"} & set(fields)


@pytest.mark.parametrize(
    ("name", "value", "arguments"),
    [
        ("disable_radix_cache", True, ["--disable-radix-cache"]),
        ("disable_radix_cache", False, []),  # which it is anyway
        ("older", False, []),
        ("dllm_fdfo", True, ["--dllm-fdfo"]),
        ("dllm_fdfo", False, ["--no-dllm-fdfo"]),  # was dropped, and stayed true
        ("either", True, ["--either"]),
        ("either", "x", ["--either", "x"]),
        ("enable_multimodal", None, []),
        ("fp8_gemm_runner_backend", "triton", ["--fp8-gemm-backend", "triton"]),
        ("json_model_override_args", {"a": True}, ["--json-model-override-args", '{"a": true}']),
        ("json_model_override_args", '{"a": 1}', ["--json-model-override-args", '{"a": 1}']),
        ("cuda_graph_bs_decode", [1, 2], ["--cuda-graph-bs-decode", "1", "2"]),
        ("forward_hooks", [{"a": None}], ["--forward-hooks", '[{"a": null}]']),
        ("lora_paths", [{"a": "b"}, {"c": "d"}], ["--lora-paths", '{"a": "b"}', '{"c": "d"}']),
    ],
)
def test_a_value_goes_out_as_sglang_reads_it(
    packages: Path, name: str, value: Any, arguments: list[str]
) -> None:
    assert list(option_problems({name: value})) == []
    assert option_arguments({name: value}) == arguments


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("disable_radix_cach", True, ["SGLang 0.5.17", "did you mean disable_radix_cache?"]),
        ("nothing_like_it", 1, ["no such ServerArgs field", "remove it"]),
        ("enable_multimodal", False, ["SGLang 0.5.17 cannot say false to it", "remove it"]),
        ("always_on", False, ["cannot say false to it"]),
        ("older", "yes", ["it takes true or false"]),
        ("fp8_gemm_runner_backend", False, ["not true or false", "in quotes"]),
    ],
)
def test_what_sglang_cannot_be_told_is_named(packages: Path, name: str, value: Any, parts: list[str]) -> None:
    (problem,) = option_problems({name: value})
    assert problem.field == f"engines.sglang.{name}"
    for part in parts:
        assert part in str(problem)
    config = fleet_config(Path("/model"), engines={"kind": "sglang", "sglang": {name: value}})
    with pytest.raises(ConfigError, match=name):
        sglang_command(config, "/model", 4000, 0, 5000, Path("/keys.yaml"))


GRAPHS = "--cuda-graph-max-bs-decode"


@pytest.mark.parametrize(
    ("concurrency", "options", "largest"),
    [
        (64, {}, "64"),
        (512, {}, "512"),
        (1, {}, "1"),
        (4096, {}, "512"),
        (256, {"disable_radix_cache": True}, "256"),
        (256, {"disable_prefill_cuda_graph": True}, "256"),
        (256, {"cuda_graph_bs_prefill": [1]}, "256"),
        (256, {"cuda_graph_max_bs_decode": 16}, "16"),
        (256, {"cuda_graph_max_bs_decode": None}, None),
        (256, {"cuda_graph_bs_decode": [1, 2]}, None),
        (256, {"disable_cuda_graph": True}, None),
        (256, {"disable_decode_cuda_graph": True}, None),
    ],
)
def test_decoding_graphs_follow_the_concurrency_unless_they_are_set(
    packages: Path, concurrency: int, options: dict[str, Any], largest: str | None
) -> None:
    config = fleet_config(
        Path("/model"),
        engines={"kind": "sglang", "sglang": options},
        rollout={"max_concurrency": concurrency},
    )
    line = sglang_command(config, "/model", 4000, 0, 5000, Path("/keys.yaml"))
    assert [value for flag, value in zip(line, line[1:], strict=False) if flag == GRAPHS] == [largest] * bool(
        largest
    )


def test_an_older_sglang_has_another_name_for_it(packages: Path) -> None:
    source = packages / "sglang" / "srt" / "server_args.py"
    source.write_text(SOURCE.replace("cuda_graph_max_bs_decode", "cuda_graph_max_bs"))
    assert decode_graphs({}, 64) == {"cuda_graph_max_bs": 64}
    source.write_text(SOURCE.replace("cuda_graph_max_bs_decode", "no_such_thing"))
    assert decode_graphs({}, 64) == {}


def test_without_its_source_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.setenv("MILLRACE_SGLANG_PYTHONPATH", str(tmp_path))
    assert list(option_problems({"anything": 1})) == []
    assert option_arguments({"any_thing": {"a": 1}}) == ["--any-thing", '{"a": 1}']
