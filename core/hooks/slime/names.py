"""Names of slime's that a hook may import, and refused names with the way to do the same here.

Owns the modules that replace slime's while a hook is loaded, even if slime is installed: slime's modules need its servers. A
name in neither table is refused by its name.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.hooks.slime.sample import (
    DynamicFilterOutput,
    GenerateState,
    Sample,
    generate,
    model_url,
    post,
    tokenizer,
)

SLIME = "slime"  # the package; also the prefix before the colon in a function's path
PACKAGES = (SLIME, "slime_plugins")
WHOLE_ROLLOUT = (
    "functions of a whole rollout are not taken: the run draws prompts and gathers groups",
    "write what makes one sample, and name it in rollout.session.function",
)
TRAINER = (
    "functions of slime's trainer are not supported",
    "write algorithm.loss or algorithm.advantage: docs/algorithms.md#your-functions",
)
DATA_SOURCE = (
    "data sources of slime's are not supported",
    "write data.sources[].rows: docs/data.md#rows-that-a-function-makes",
)
AGENTS = (
    "adapters of agents are not here",
    "ask session.base_url, which speaks OpenAI's chat completions, in a function of millrace's form: docs/generation.md#a-client-that-speaks-openais-chat-completions",
)
PICTURES = ("pictures are not supported", "train on text")
HUB = "millrace.core.hooks.slime.hub"  # imported with the names, since it needs rewards, which need hooks
UNKNOWN = (
    "this name of slime's is not here",
    "copy what it does into your module, or write the hook in millrace's form: docs/algorithms.md#your-functions",
)
# modules and names, with all under them: the reason, and the way here
REFUSED: dict[str, tuple[str, str]] = {
    "slime.agent": AGENTS,
    "slime.backends": TRAINER,
    "slime.data.RolloutDataSource": DATA_SOURCE,
    "slime.data.RolloutDataSourceWithBuffer": DATA_SOURCE,
    "slime.ray": TRAINER,
    "slime.rollout.base_types.call_rollout_fn": WHOLE_ROLLOUT,
    "slime.rollout.data_source": DATA_SOURCE,
    "slime.rollout.forge_load": ("stored rollouts are trained by a command", "use millrace replay"),
    "slime.rollout.fully_async_rollout": ("generation runs ahead by configuration", "set pipeline.ahead"),
    "slime.rollout.on_policy_distillation": (
        "a served teacher is configured",
        "set algorithm.teacher_server",
    ),
    "slime.rollout.rm_hub.ifbench": (
        "ifbench is a reward of millrace's",
        "name millrace.core.rewards.hub.ifbench:ifbench",
    ),
    "slime.rollout.sft_rollout": ("supervised training is a command", "use millrace sft"),
    "slime.rollout.sglang_rollout.eval_rollout": WHOLE_ROLLOUT,
    "slime.rollout.sglang_rollout.generate_and_rm": WHOLE_ROLLOUT,
    "slime.rollout.sglang_rollout.generate_and_rm_group": WHOLE_ROLLOUT,
    "slime.rollout.sglang_rollout.generate_rollout": WHOLE_ROLLOUT,
    "slime.rollout.sglang_rollout.generate_rollout_async": WHOLE_ROLLOUT,
    "slime.rollout.sglang_streaming_rollout": (
        "answers come whole",
        "leave it out: cut answers continue from their segments",
    ),
    "slime.rollout.sleep_rollout": WHOLE_ROLLOUT,
    "slime.utils.external_utils": (
        "runs are started by millrace train",
        "write the run's YAML file: docs/coming-from.md",
    ),
    "slime.utils.processing_utils.process_vision_info": PICTURES,
    "slime_plugins": ("plugins of slime's are not here", UNKNOWN[1]),
}


class NotHereError(ImportError):
    """A name of slime's that does not exist here, with the way to do the same here."""

    def __init__(self, name: str) -> None:
        reason, self.remedy = refusal(name)
        super().__init__(f"{name}: {reason}", name=name)


def refusal(name: str) -> tuple[str, str]:
    """Why a dotted name does not exist here, and the alternative."""
    parts = name.split(".")
    found = (REFUSED.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    return next(filter(None, found), UNKNOWN)


def missing(name: str) -> bool:
    """Whether a dotted name of slime's, of a module or of a name in a module, does not exist here."""
    modules = _modules()
    module, _, attribute = name.rpartition(".")
    return name not in modules and attribute not in modules.get(module, {})


def slime_remedy(error: BaseException) -> str | None:
    """The remedy of an error that a name of slime's led to; None for other errors."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, NotHereError):
        seen = seen.__cause__ or seen.__context__
    return seen.remedy if seen is not None else None


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotHereError(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder):
    """Refuses modules of slime's that do not exist here; comes before the finders of installed packages."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """None for every module that is not slime's."""
        if fullname.partition(".")[0] in PACKAGES:
            raise NotHereError(fullname)


def provide() -> None:
    """Let hooks import names of slime's. Modules of slime's that were imported before stay."""
    if SLIME in sys.modules:
        return
    sys.meta_path.insert(0, _Finder())
    modules = _modules()
    for name in sorted(modules):  # a package comes before what is in it
        module = _Module(name, "Names that hooks written for slime import.")
        module.__path__ = []
        vars(module).update({key: _object(value) for key, value in modules[name].items()})
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def _object(value: Any) -> Any:
    """The object of a name, which the table may give as module:name."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)


def _modules() -> dict[str, Mapping[str, Any]]:
    """The available names, by module."""
    return {
        "slime": {},
        "slime.data": {"Sample": Sample},
        "slime.observability": {},
        "slime.observability.trace_utils": {
            "bind_trace": bind_trace,
            "build_sglang_meta_trace_attrs": build_sglang_meta_trace_attrs,
            "trace_event": trace_event,
            "trace_function": trace_function,
            "trace_span": trace_span,
        },
        "slime.rollout": {},
        "slime.rollout.base_types": {
            "RolloutFnEvalOutput": RolloutFnEvalOutput,
            "RolloutFnTrainOutput": RolloutFnTrainOutput,
        },
        "slime.rollout.filter_hub": {},
        "slime.rollout.filter_hub.base_types": {
            "DynamicFilterOutput": DynamicFilterOutput,
            "call_dynamic_filter": call_dynamic_filter,
            "should_drop_dynamic_filter_output": should_drop_dynamic_filter_output,
        },
        "slime.rollout.filter_hub.dynamic_sampling_filters": {
            "check_reward_nonzero_std": check_reward_nonzero_std,
            "check_reward_nonzero_std_with_fallback": check_reward_nonzero_std_with_fallback,
        },
        "slime.rollout.rm_hub": {
            "async_rm": f"{HUB}:async_rm",
            "batched_async_rm": f"{HUB}:batched_async_rm",
            "grade_answer_verl": f"{HUB}:grade_answer_verl",
            "remote_rm": f"{HUB}:remote_rm",
        },
        "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": f"{HUB}:deepscaler"},
        "slime.rollout.rm_hub.f1": {"f1_score": f"{HUB}:f1_score"},
        "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": f"{HUB}:compute_gpqa_reward"},
        "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": f"{HUB}:compute_score"},
        "slime.rollout.rm_hub.math_utils": {
            "extract_answer": f"{HUB}:extract_answer",
            "extract_boxed_answer": f"{HUB}:extract_answer",
            "grade_answer_verl": f"{HUB}:grade_answer_verl",
        },
        "slime.rollout.sglang_rollout": {
            "GenerateState": GenerateState,
            "generate": generate,
            "get_model_url": model_url,
        },
        "slime.utils": {},
        "slime.utils.http_utils": {"get": get, "post": post},
        "slime.utils.misc": {"SingletonMeta": SingletonMeta, "load_function": load_function},
        "slime.utils.processing_utils": {
            "build_processor_kwargs": build_processor_kwargs,
            "encode_image_for_rollout_engine": encode_image_for_rollout_engine,
            "load_processor": load_processor,
            "load_tokenizer": load_tokenizer,
        },
        "slime.utils.types": {"Sample": Sample, "RolloutBatch": dict},
    }


class Span:
    """A span of slime's traces. Nothing is kept of it: a run stores times with each sample and turn."""

    def set(self, key: str, value: Any) -> Span:
        """Takes an attribute."""
        return self

    def update(self, attrs: Mapping[str, Any] | None = None) -> Span:
        """Takes attributes."""
        return self

    set_attr, update_attrs = set, update


@contextlib.contextmanager
def trace_span(target: Any, name: str, attrs: Mapping[str, Any] | None = None, **more: Any) -> Iterator[Span]:
    """Runs the block; keeps nothing."""
    yield Span()


def trace_event(target: Any, name: str, attrs: Mapping[str, Any] | None = None, **more: Any) -> None:
    """Keeps nothing."""


def trace_function(name: str, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function unchanged."""
    return lambda function: function


def bind_trace(sample: Any) -> Span:
    """A span of the sample."""
    return Span()


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values of an answer's meta information."""
    return {key: value for key, value in meta.items() if isinstance(value, int | float | str)}


@dataclass
class RolloutFnTrainOutput:
    """Groups of samples of a whole rollout. A module may import it; the run calls no function that returns it."""

    samples: Any
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Groups of samples of a whole evaluation. A module may import it; the run calls no function that returns it."""

    data: Any
    metrics: dict[str, Any] | None = None


def call_dynamic_filter(
    function: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> DynamicFilterOutput:
    """A filter's answer as slime's class; without a filter the group is kept."""
    said = True if function is None else function(*args, **kwargs)
    return said if isinstance(said, DynamicFilterOutput) else DynamicFilterOutput(keep=said)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether a group is dropped, with `remaining_batch_size` groups in flight of `target_data_size`."""
    stands_in = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not stands_in


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ."""
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    mean = sum(rewards) / max(1, len(rewards))
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    keep = variance**0.5 > 1e-6
    return DynamicFilterOutput(
        keep, None if keep else f"zero_std_{round(rewards[0], 1) if rewards else None}"
    )


def check_reward_nonzero_std_with_fallback(
    args: Any, samples: Sequence[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Keeps groups whose rewards differ; a dropped group is used when too few are kept."""
    said = check_reward_nonzero_std(args, samples)
    said.keep_when_insufficient = True
    return said


class SingletonMeta(type):
    """A class that is made once a process."""

    _made: dict[type, Any] = {}  # noqa: RUF012 - of all such classes

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._made:
            SingletonMeta._made[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._made[cls]


def load_function(path: str) -> Any:
    """The object at a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


async def get(url: str) -> Any:
    """GET a JSON answer. Raises RuntimeError with the server's answer."""
    import aiohttp

    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        if answer.status >= 400:
            raise RuntimeError(f"{answer.status}: {await answer.text()}")
        return await answer.json(content_type=None)


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """A tokenizer; the model's is loaded once a process."""
    rest = {key: value for key, value in kwargs.items() if key != "trust_remote_code"}
    if not rest:
        return tokenizer(name_or_path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **rest, trust_remote_code=False)


def load_processor(name_or_path: str, **kwargs: Any) -> None:
    """None, as for a text model."""


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a processor for these inputs, as slime's hooks pass them on."""
    media = {f"{kind}_kwargs": {"return_tensors": "pt"} for kind in ("audio", "images", "videos")}
    return {**(multimodal_inputs or {}), **media, "text_kwargs": {"return_tensors": None}}


def encode_image_for_rollout_engine(image: Any) -> str:
    """A picture as the URL of its PNG. The engine of a run accepts no pictures: a request with image_data is refused."""
    import base64
    import io

    held = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(held, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
