"""Every key of a config.json, changed in turn: the log-probabilities are Hugging Face's, or the folder is refused.

The keys are those that transformers' config class of the family has, those that it writes, and those that millrace's own
tables name: a key that any of them gains is tried without a word here. So are keys of other families, which pass.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.connectors.engines.embedded.model import (
    PREFILL_SPAN,
    Decoder,
    Weights,
    read_shape,
    read_tensors,
)
from millrace.core.errors import ConfigError
from millrace.core.families.config_file import (
    ALIASES,
    READ_UNDECLARED,
    read_hf_config,
    resolved,
    undeclared_keys,
)
from millrace.core.families.registry import BUILT_IN, family_named
from millrace.core.families.rotary import ROTARY
from tests.core.test_quantised import KIND_OF, quantise
from tests.support.slow_members import slow_but
from tests.support.tiny_models import know_kimi
from tests.support.trainer_ranks import Group, RankFailedError, Workers, configuration, samples, write_batch

know_kimi()
FAMILIES = [family.name for family in BUILT_IN]
CLOSE = 1e-5
ABSENT = object()
OF_OTHERS = (  # keys of other families, those that writers of files add, and one of none
    "unk_token_id",
    "_model_name_or_path",
    "pad_token_type_id",
    "max_window_size",
    "embedding_multiplier",
    "attention_multiplier",
    "use_parallel_residual",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "clip_qkv",
    "original_max_position_embeddings",
    "per_layer_config",
    "no_such_key",
)
# where values made from the type of the present one are none that transformers takes
VALUES: dict[str, list[Any]] = {
    "_attn_implementation": ["eager"],
    "attn_implementation": ["eager"],
    "_experts_implementation": ["eager"],
    "experts_implementation": ["eager"],
    "architectures": [["LlamaForCausalLM"], ["Qwen2ForSequenceClassification"], []],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "num_labels": [3],
    "problem_type": ["regression"],
    "auto_map": [{"AutoConfig": "configuration.Other"}],
    "layer_types": [["full_attention", "sliding_attention"], ["full_attention"] * 2],
    "mlp_only_layers": [[0], []],
    "model_type": [*FAMILIES, "gemma3_text"],
    "hidden_act": ["gelu", "silu"],
    "quantization_config": [{"quant_method": "fp8", "weight_block_size": [128, 128]}],
    "pad_token_id": [0, 3],
    "initializer_range": [0.5],
    "transformers_version": ["4.40.0"],
    "dtype": ["bfloat16", "float16", "float8_e4m3fn"],
    "torch_dtype": ["bfloat16", "float8_e4m3fn"],
    "tie_word_embeddings": [True, False],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SPELLINGS: dict[str, dict[str, Any]] = {
    "outside": {"rope_theta": 77.0},
    "whole number": {"rope_theta": 77},
    "inside": {"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}},
    "outside of an empty mapping": {"rope_parameters": {}, "rope_theta": 77.0},
    "outside of the mapping": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 77.0},
    "type": {"rope_parameters": {"type": "default", "rope_theta": 77.0}},
    "inside and outside alike": {"rope_parameters": {"rope_theta": 77.0}, "rope_theta": 77.0},
    "inside and outside": {"rope_parameters": {"rope_theta": 77.0}, "rope_theta": 88.0},
    "older name": {"rope_scaling": {"rope_theta": 77.0, "rope_type": "default"}},
    "older name, null": {"rope_scaling": None, "rope_theta": 77.0},
    "both names": {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 77.0}},
    "neither": {},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}},
    "linear by type": {"rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 77.0}},
    "older linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 77.0},
    "two kinds": {"rope_parameters": {"rope_type": "default", "type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 77.0},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 77.0},
    "whole yarn": {"rope_parameters": {**YARN, "rope_theta": 77.0}},
    "older yarn": {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2.0}, "rope_theta": 77.0},
    "yarn that shortens": {"rope_parameters": {**YARN, "factor": 0.5, "rope_theta": 77.0}},
    "yarn with its own attention": {
        "rope_parameters": {**YARN, "attention_factor": 0.1 * math.log(4.0) + 1, "truncate": True}
    },
    "yarn with another attention": {"rope_parameters": {**YARN, "attention_factor": 1.5}},
    "yarn by parts of dimensions": {"rope_parameters": {**YARN, "truncate": False}},
    "yarn with mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn upside down": {"rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 32}},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 77.0}},
    "older llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "rope_theta": 77.0},
    "llama3 by type": {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 77},
    "llama3 without a factor": {"rope_scaling": {**LLAMA3, "factor": None}, "rope_theta": 77.0},
    "llama3 without a length": {
        "rope_scaling": {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    },
    "llama3 upside down": {"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}},
    "llama3 with more": {"rope_scaling": {**LLAMA3, "beta_fast": 32}},
    "by layer type": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 77.0}}},
    "partial": {"rope_parameters": {"rope_theta": 77.0, "partial_rotary_factor": 0.5}},
    "partial outside": {"partial_rotary_factor": 0.5, "rope_theta": 77.0},
    "not partial": {"partial_rotary_factor": 1.0, "rope_theta": 77.0},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are several times slower on two threads of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def group(workers: Workers, model: Callable[..., Path]) -> Iterator[Group]:
    """One rank, which builds model after model beside its own."""
    with workers.group(configuration(model())) as made:
        yield made


@pytest.fixture(scope="module")
def scorer(group: Group, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], torch.Tensor]:
    """Log-probabilities of the batch under a folder's model as the trainer builds it; once for each model."""
    url = write_batch(tmp_path_factory.mktemp("keys"), samples(1))
    made: dict[str, torch.Tensor] = {}

    def score(config: str, folder: Path) -> torch.Tensor:
        key = json.dumps([str(folder), resolved(json.loads(config), "test")])
        if key not in made:
            made[key] = scored(group, config, folder, url)
        return made[key]

    return score


def scored(group: Group, config: str, folder: Path, url: str) -> torch.Tensor:
    (found,) = group.run(trainers, with_config(folder, config), url)
    return torch.tensor(found)


def with_config(folder: Path, config: str) -> str:
    """A folder with the same weights and another config.json."""
    other = folder.parent / f"{folder.name}-{abs(hash(config))}"
    if not other.exists():
        other.mkdir()
        os.link(folder / "model.safetensors", other / "model.safetensors")
        (other / "config.json").write_text(config)
    return str(other)


def trainers(rank: Any, folder: str, url: str) -> list[float]:
    """Log-probabilities by a second model that a rank builds from a folder."""
    from millrace.connectors.trainers.megatron.forward_backward import LogprobForwardBackward
    from millrace.connectors.trainers.megatron.optim.optimizer import called
    from millrace.connectors.trainers.megatron.trainable_model import model_from_hf
    from millrace.connectors.trainers.packing import make_packs
    from millrace.core.families.architecture import architecture

    hf = read_hf_config(folder)
    with rank._working("score"):
        inner = model_from_hf(rank.config, folder, hf, rank.device)
        passes = LogprobForwardBackward(
            rank.config, called(inner), inner, rank.device, vocab=hf["vocab_size"], temperature=1.0
        )
        packs = make_packs(rank._read(url), rank.config, architecture(hf), rank.device, rank.learner.place)
        values = passes.logprobs(packs)
    rows = [row for pack in packs for row in pack.rows]
    parts = dict(
        zip((row.sample_id for row in rows), values.split([row.response_length for row in rows]), strict=True)
    )
    return [value for name in sorted(parts) for value in parts[name].tolist()]


def engines(folder: str) -> torch.Tensor:
    """Log-probabilities of the batch by the embedded engine."""
    shape = read_shape(Path(folder))
    decoder = Decoder(Weights(shape, read_tensors(Path(folder), shape, None)))
    found = []
    for row in sorted(samples(1), key=lambda row: str(row["sample_id"])):
        tokens = torch.tensor([row["tokens"]])
        padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % PREFILL_SPAN))
        hidden, _, _ = decoder.prefill(padded)
        logprobs = decoder.logits(hidden[0, : tokens.shape[1] - 1]).log_softmax(-1)
        found.append(logprobs.gather(1, tokens[0, 1:, None])[-row["response_length"] :, 0])
    return torch.cat(found)


class HuggingFace:
    """A family's model with the weights of a folder, under any config."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._state = {name: value.clone() for name, value in made.state_dict().items()}
        self._made: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def logprobs(self, config: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities of the batch. Raises whatever transformers raises."""
        from transformers import AutoConfig, AutoModelForCausalLM

        values = dict(config)
        parsed = AutoConfig.for_model(values.pop("model_type"), **values)
        model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32).eval()
        model.load_state_dict(self._state)
        rows = sorted(samples(1), key=lambda row: str(row["sample_id"]))
        tokens = torch.zeros(len(rows), max(len(row["tokens"]) for row in rows), dtype=torch.long)
        for place, row in enumerate(rows):
            tokens[place, : len(row["tokens"])] = torch.tensor(row["tokens"])
        logprobs = model(tokens, return_dict=True).logits[:, :-1].log_softmax(-1)
        every = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
        ends = [len(row["tokens"]) - 1 for row in rows]
        parts = [(end - row["response_length"], end) for end, row in zip(ends, rows, strict=True)]
        return torch.cat([every[place, start:end] for place, (start, end) in enumerate(parts)])


def keys_of(family: str, written: dict[str, Any]) -> list[str]:
    from transformers import AutoConfig

    fields = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(family)))}
    here = family_named(family)
    ours = {*here.declared, *ROTARY, *ALIASES}
    return sorted(fields | set(written) | ours | set(OF_OTHERS) | READ_UNDECLARED)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_the_familys_class_declares_is_in_a_table(family: str) -> None:
    """Any other passes: a key that transformers gains must be placed first."""
    from transformers import AutoConfig

    declared = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(family)))}
    here = family_named(family)
    assert not declared - {*here.declared, *ROTARY, *ALIASES}


def test_keys_of_nobody_pass_and_are_named(model: Callable[..., Path]) -> None:
    written = json.loads((model("llama") / "config.json").read_text())
    odd = {name: 3 for name in OF_OTHERS if name not in READ_UNDECLARED}
    assert resolved({**written, **odd}, "test") == resolved(written, "test")
    assert undeclared_keys({**written, **odd}) == sorted(odd)
    assert undeclared_keys({**written, "unk_token_id": None}) == undeclared_keys(written) == []


@pytest.mark.parametrize("key", sorted(READ_UNDECLARED - {"sliding_window", "layer_types"}))
def test_a_key_that_code_reads_undeclared_is_refused_by_its_name(
    model: Callable[..., Path], key: str
) -> None:
    written = json.loads((model("qwen3") / "config.json").read_text())
    with pytest.raises(ConfigError, match=rf"config.json: {key} = 3: "):
        resolved({**written, key: 3}, "test")


def other_values(key: str, current: Any) -> list[Any]:
    """Values of a key, by its present one's type."""
    if key in VALUES:
        return [*VALUES[key], None, ABSENT, 3, "other", [], {}]
    if isinstance(current, bool):
        return [not current, None, ABSENT]
    if isinstance(current, int):
        return [current + 1, 2 * current, current // 2, 0, -1, None, ABSENT]
    if isinstance(current, float):
        return [2 * current + 0.01, None, ABSENT]
    return [True, False, 1, 0.5, "other", None]


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_moe"))
def test_each_key_changed_in_turn(
    model: Callable[..., Path], scorer: Callable[[str, Path], torch.Tensor], family: str
) -> None:
    folder = model(family)
    written = json.loads((folder / "config.json").read_text())
    plain = HuggingFace(folder)
    torch.testing.assert_close(
        scorer(json.dumps(written), folder), plain.logprobs(written), atol=CLOSE, rtol=0
    )
    wrong, tried = [], set()
    for key in keys_of(family, written):
        for value in other_values(key, written.get(key)):
            changed = {name: one for name, one in {**written, key: value}.items() if one is not ABSENT}
            harmless = key in family_named(family).harmless
            outcome = compare(changed, folder, plain, scorer, harmless=harmless)
            if outcome == "equal":
                tried.add(key)
                if harmless:
                    break  # one value that transformers takes
            if outcome not in ("equal", "refused", "refused by both"):
                wrong.append(f"{key} = {value}: {outcome}")
    assert not wrong
    assert tried >= family_named(family).harmless - {"model_type"}


def load(rank: Any, whose: str, folder: str) -> None:
    """Load a folder as a rank's policy, critic or teacher."""
    from millrace.connectors.trainers.megatron.model.policy_model import CriticModel, PolicyModel
    from millrace.connectors.trainers.megatron.models import teacher_of
    from millrace.connectors.trainers.megatron.trainable_model import model_from_hf
    from millrace.core.config import RunConfig

    with rank._working("score"):
        if whose == "teacher":
            values = rank.config.model_dump(mode="json")
            values["algorithm"] |= {"teacher": folder, "distillation_coef": 0.5}
            teacher_of(RunConfig.model_validate(values), 1.0, rank.device)
        else:
            kind = CriticModel if whose == "critic" else PolicyModel
            model_from_hf(rank.config, folder, read_hf_config(folder), rank.device, kind)


def test_policy_critic_and_teacher_read_their_folders_whole(
    group: Group, model: Callable[..., Path], tmp_path: Path
) -> None:
    """A teacher's scales were left aside, and biases of a Llama folder were ignored."""
    good = model("llama")
    config, tensors = json.loads((good / "config.json").read_text()), load_file(good / "model.safetensors")
    bias, scale = "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight_scale_inv"
    narrow = {
        name: t.to(torch.float8_e4m3fn) if name == "lm_head.weight" else t for name, t in tensors.items()
    }
    wrong: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
        "quantization_config": ({"quantization_config": {"quant_method": "fp8"}}, tensors),
        f"tensor {bias}": ({}, {**tensors, bias: torch.zeros(32)}),
        f"tensor {scale}": ({}, {**tensors, scale: torch.ones(1, 1)}),
        "tensor lm_head.weight in model.safetensors is of type F8_E4M3": ({}, narrow),
    }
    for number, (words, (keys, held)) in enumerate(wrong.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        save_file(held, folder / "model.safetensors")
        for whose in ("policy", "critic", "teacher"):
            field = "algorithm.teacher" if whose == "teacher" else "model.path"
            with pytest.raises(RankFailedError) as refusal:
                group.run(load, whose, str(folder))
            assert str(refusal.value).startswith(f"ConfigError: {field} = {folder}: ")
            assert words in str(refusal.value)


@pytest.mark.parametrize("kind", list(KIND_OF))
def test_a_trainer_scores_quantised_weights_as_what_they_are_read_as(
    kind: str, model: Callable[..., Path], scorer: Callable[[str, Path], torch.Tensor], tmp_path: Path
) -> None:
    folder, plain = (shutil.copytree(model("qwen3"), tmp_path / name) for name in ("quantised", "plain"))
    save_file(quantise(kind, folder), plain / "model.safetensors")
    theirs, ours = (scorer((each / "config.json").read_text(), each) for each in (plain, folder))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, scorer((plain / "config.json").read_text(), model("qwen3")))


USED = {"use_sliding_window": True, "sliding_window": 3}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("mistral", {"sliding_window": 3}),
    "itself alone": ("mistral", {"sliding_window": 1}),
    "wider than any text": ("mistral", {"sliding_window": 4096}),
    "last layers": ("qwen2", {**USED, "max_window_layers": 1, "layer_types": None}),
    "first layers": ("qwen3", {**USED, "layer_types": ["sliding_attention", "full_attention"]}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_hugging_face(
    model: Callable[..., Path], scorer: Callable[[str, Path], torch.Tensor], name: str
) -> None:
    family, keys = WINDOWS[name]
    folder = model(family)
    changed = {**json.loads((folder / "config.json").read_text()), **keys}
    assert compare(changed, folder, HuggingFace(folder), scorer, harmless=False) == "equal"
    text = json.dumps(changed)
    torch.testing.assert_close(engines(with_config(folder, text)), scorer(text, folder), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_spelling_of_the_rotary_embedding(
    model: Callable[..., Path], scorer: Callable[[str, Path], torch.Tensor], family: str
) -> None:
    folder = model(family)
    written = json.loads((folder / "config.json").read_text())
    del written["rope_parameters"]
    written.pop("partial_rotary_factor", None)  # which transformers writes twice for some families
    plain = HuggingFace(folder)
    outcomes = {
        name: compare({**written, **spelled}, folder, plain, scorer, harmless=False)
        for name, spelled in SPELLINGS.items()
    }
    assert not {name: outcome for name, outcome in outcomes.items() if outcome not in ("equal", "refused")}
    refused = {name for name, outcome in outcomes.items() if outcome == "refused"}
    for name in SPELLINGS.keys() - refused:
        text = json.dumps({**written, **SPELLINGS[name]})
        torch.testing.assert_close(
            engines(with_config(folder, text)), scorer(text, folder), atol=CLOSE, rtol=0
        )
    assert refused == set(SPELLINGS) & {
        "inside and outside",
        "both names",
        "two kinds",
        "dynamic",
        "yarn",
        "yarn that shortens",
        "yarn with another attention",
        *(() if "kv_lora_rank" in family_named(family).keys else ("yarn with mscale",)),
        "yarn upside down",
        "llama3 without a factor",
        "llama3 without a length",
        "llama3 upside down",
        "llama3 with more",
        "by layer type",
        *(() if family_named(family).rotary_part else ("partial", "partial outside")),
    }


def compare(
    config: dict[str, Any],
    folder: Path,
    plain: HuggingFace,
    scorer: Callable[[str, Path], torch.Tensor],
    *,
    harmless: bool,
) -> str:
    """equal, refused, or what is wrong."""
    text = json.dumps(config)
    try:
        ours = scorer(text, folder)
    except ConfigError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - a rank's, of which only the text arrives
        return "refused" if str(error).startswith("ConfigError: ") else f"{type(error).__name__}: {error}"
    try:
        theirs = plain.logprobs(json.loads(text))  # transformers writes into what it is given
    except Exception as error:  # noqa: BLE001 - transformers checks values of keys that no model reads
        return "refused by both" if harmless else f"only Hugging Face refuses it: {error}"
    gap = (ours - theirs).abs().max().item()
    return "equal" if gap <= CLOSE else f"log-probabilities differ by {gap:.2g}"
