"""Check the model's folder: files, sizes, tokenizer, chat template and how answers end. Check the tokenizer of a served teacher.

Imports no torch and no transformers. connectors/huggingface/answer_ends.py decides the end tokens of a request.
"""

import asyncio
import os
import shlex
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from millrace.connectors.http.posting import RemoteRewardError
from millrace.connectors.huggingface.answer_ends import REMEDY, AnswerEnds, unseen
from millrace.connectors.huggingface.hub import GET, is_named
from millrace.connectors.huggingface.suffix import turn_end
from millrace.connectors.huggingface.template import ChatTemplate, TokenizerFolder
from millrace.connectors.teachers.served_teacher import FIELD as TEACHER
from millrace.connectors.teachers.served_teacher import ServedTeacher
from millrace.connectors.teachers.teacher_tokenizer import UnprovenError, differing_text
from millrace.core.config import RunConfig, layout_rules, lora_rules
from millrace.core.config.engine_kinds import SGLANG
from millrace.core.config.megatron_options.rules import router_problems
from millrace.core.config.model_preset import differences
from millrace.core.config.parts.problems import Problem
from millrace.core.config.plan.layout import layout_of, visible_gpus
from millrace.core.errors import ConfigError, StorageError, remedy_of
from millrace.core.families.architecture import Architecture, architecture
from millrace.core.families.chat_templates import TemplateLimitError
from millrace.core.families.config_file import read_hf_config
from millrace.core.families.presets import PRESETS
from millrace.core.families.tensors import is_quantised, weight_tensors
from millrace.core.families.tokenizer_file import engine_ends
from millrace.core.families.unknown import UnknownModel, read_unknown, shape_of
from millrace.flows.driver.named_model import DType, model_here, of_new_run, stored_as

CRITIC = "algorithm.advantage.critic.path"
PATIENCE_S = 10.0  # for one answer of a served teacher
RELATIVE = "; a relative path in a file means that file's folder"


@dataclass
class ReadModel:
    """The parts of the model that could be read; a part that could not is None."""

    shape: Architecture | None = None
    unknown: UnknownModel | None = (
        None  # the model instead, if trainer.kind=fsdp trains a family that core.families does not know
    )
    tokenizer: Any = None
    template: ChatTemplate | None = None
    tools: list[dict[str, Any]] = field(
        default_factory=list
    )  # schemas of the functions that the model may call
    ends: list[str] = field(default_factory=list)  # texts of tokens that may end a turn
    reads_answers: bool = False  # whether the tokenizer has a parser of its answers
    has_template: bool = False  # whether there is a template, valid or not
    here: RunConfig | None = None  # the configuration with a named model's folder
    whole: bool = True  # whether the weights are on this host
    stored: str = ""  # the type of the weights in the folder
    dtype: DType | None = None  # the type that model.dtype: auto means for a new run


def check_model(config: RunConfig, may_be_made: bool, found: ReadModel) -> Iterator[Problem]:
    """Problems of the model's folder and of the teacher's; fills `found` with what later checks need."""
    path, whole = config.model.path, True
    if may_be_made and not os.path.exists(Path(path) / "config.json"):
        return
    if is_named(config.model):
        try:
            config, _, whole = model_here(config, weights=False)
        except ConfigError as error:
            field = error.where or "model.path"
            value = config.model.revision if field == "model.revision" else path
            yield Problem(field, value, error.reason, error.remedy or GET)
            return
        except StorageError:
            return  # the problem belongs to storage.root, which has its own check
        found.here, found.whole, path = config, whole, config.model.path
    if config.trainer.kind == "fsdp" and (yield from _is_unknown(config, path, found)):
        shape = None
    else:
        shape = yield from _folder("model.path", path, whole)
    if shape:
        found.shape = shape
        yield from _sizes(config, shape)
        if config.model.preset in PRESETS:
            yield from differences(config.model.preset, read_hf_config(path), path)
        yield from _stored_type(config, path, found)
        yield from router_problems(config, shape)
        yield from lora_rules.model_problems(config, shape)
        yield from _quantised(config, path)
    if os.path.isdir(path) or config.model.tokenizer:
        yield from _tokenizer(config, found)
    yield from _reference(config, shape, may_be_made)
    critic = config.algorithm.critic
    beside = {"algorithm.teacher": config.algorithm.teacher, CRITIC: critic.path if critic else None}
    for field, folder in beside.items():
        if folder and not (may_be_made and not os.path.exists(Path(folder) / "config.json")):
            yield from _beside(config, field, folder, shape)


def _stored_type(config: RunConfig, path: str, found: ReadModel) -> Iterator[Problem]:
    found.stored = stored_as(path)
    try:
        found.dtype = of_new_run(config)
    except ConfigError as error:
        if config.model.dtype == "auto":
            yield Problem(error.where, "auto", error.reason, error.remedy)


def _is_unknown(config: RunConfig, path: str, found: ReadModel) -> Generator[Problem, None, bool]:
    """Whether core.families does not know the folder's family, with what is then checked of it."""
    try:
        if not os.path.isdir(path) or shape_of(path) is not None:
            return False
        found.unknown = read_unknown(path)
    except ConfigError as error:
        yield Problem("model.path", path, error.reason, error.remedy or GET)
        return True
    yield from _stored_type(config, path, found)
    yield from layout_rules.heads_problems(config, found.unknown.heads or 0)
    yield from lora_rules.unknown_problems(config, found.unknown.family)
    yield from _positions(config, found.unknown, "model")
    yield from _token_ids(config, found.unknown, "model")
    return True


def _quantised(config: RunConfig, path: str) -> Iterator[Problem]:
    """A problem if SGLang would serve quantised weights: it then cannot take the trainer's, which are not."""
    kind = layout_of(config, visible_gpus()).engine_kind
    if is_quantised(path) and kind is SGLANG and not config.algorithm.supervised:
        yield Problem(
            "model.path",
            path,
            "its weights are quantised: SGLang serves them so, and then takes no weights of the trainer",
            f"write them in bfloat16 and name that folder: millrace convert {shlex.quote(path)} FOLDER --to hf",
        )


def _beside(config: RunConfig, field: str, path: str, shape: Architecture | None) -> Iterator[Problem]:
    """Problems of a model beside the policy, which needs its layout and its tokenizer. shape: the policy's."""
    whose = "critic" if field == CRITIC else "teacher"
    other = yield from _folder(field, path)
    if other and shape and other.vocab != shape.vocab:
        yield Problem(
            field,
            path,
            f"its vocabulary of {other.vocab} is not the model's, {shape.vocab}",
            f"take a {whose} with the model's tokenizer",
        )
    if other:
        yield from _sizes(config, other, whose)


def _reference(config: RunConfig, shape: Architecture | None, may_be_made: bool) -> Iterator[Problem]:
    """Problems of the reference's folder, whose weights are loaded into the policy's model."""
    field, path = "algorithm.reference", config.algorithm.reference
    if not path or (may_be_made and not os.path.exists(Path(path) / "config.json")):
        return
    reference = yield from _folder(field, path)
    if reference and shape and reference != shape:
        sizes, own = asdict(shape), asdict(reference)
        differs = [name for name, value in sizes.items() if own[name] != value]
        yield Problem(
            field,
            path,
            f"its architecture is not that of model.path: {', '.join(differs)} differ",
            "name a folder of the same architecture and sizes, such as an export of a run from the same model",
        )


def _folder(field: str, folder: str, whole: bool = True) -> Generator[Problem, None, Architecture | None]:
    """The shape of a folder's model. whole: whether its weights must be there too."""
    try:
        os.scandir(folder).close()
    except OSError as error:
        absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "no such folder" if absent else f"cannot be read: {error.strerror}"
        yield Problem(field, folder, reason, remedy_of(error, GET + RELATIVE))
        return None
    shape = None
    try:
        shape = architecture(read_hf_config(folder, field))
        if whole:
            weight_tensors(folder, shape, field)
    except ConfigError as error:
        yield Problem(field, folder, error.reason, error.remedy or GET)
    return shape


def _sizes(config: RunConfig, shape: Architecture, whose: str = "model") -> Iterator[Problem]:
    yield from layout_rules.problems(config, shape, whose)
    yield from _positions(config, shape, whose)
    yield from _token_ids(config, shape, whose)


def _token_ids(config: RunConfig, shape: Architecture | UnknownModel, whose: str) -> Iterator[Problem]:
    for place, sampling in config.samplings:
        for name, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            outside = [token for token in ids if token >= shape.vocab]
            if outside:
                yield Problem(
                    f"{place}.{name}",
                    outside[0],
                    f"the {whose}'s vocabulary has {shape.vocab} tokens",
                    f"give token ids below {shape.vocab}",
                )


def _positions(config: RunConfig, shape: Architecture | UnknownModel, whose: str) -> Iterator[Problem]:
    prompt = config.data.max_prompt_tokens
    for name, tokens in config.response_budgets.items():
        if prompt + tokens > shape.positions:
            yield Problem(
                name,
                tokens,
                f"with data.max_prompt_tokens = {prompt} it is more than the {whose}'s {shape.positions} positions",
                f"lower the two to {shape.positions} together",
            )
            return


def _tokenizer(config: RunConfig, found: ReadModel) -> Iterator[Problem]:
    field, folder = (
        ("model.tokenizer", config.model.tokenizer)
        if config.model.tokenizer
        else ("model.path", config.model.path)
    )
    special: dict[str, str] = {}
    text: str | None = None
    try:
        files = TokenizerFolder(folder)
        special, text = files.special, files.template()
        found.reads_answers = bool(files.config.get("response_template"))
        found.tokenizer = files.load()
        found.ends = list(dict.fromkeys([*files.ends(), *special_tokens(found.tokenizer)]))
    except (ValueError, OSError) as error:
        remedy = remedy_of(error, "copy the tokenizer's files there, or set model.tokenizer")
        yield Problem(field, folder, str(error), remedy)
    else:
        yield from _vocabulary(field, folder, found, special)
    file = config.model.chat_template
    if file:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found.has_template = True
            remedy = remedy_of(error, "name a file of Jinja text")
            yield Problem("model.chat_template", file, f"cannot be read: {error}", remedy)
            return
    if text is None:
        return
    found.has_template = True
    whose = "" if file else f"the tokenizer's template in {folder}: "
    try:
        found.template = ChatTemplate(text, special)
    except TemplateLimitError as error:
        remedy = "name a template without such loops or texts"
        yield Problem("model.chat_template", file, f"{whose}it is refused: {error}", remedy)
    except ValueError as error:
        yield Problem("model.chat_template", file, f"{whose}no Jinja template: {error}", "correct that line")


def template_problem(reason: str, remedy: str) -> Problem:
    """A problem of the chat template, wherever it comes from."""
    return Problem("model.chat_template", None, reason, remedy)


def hidden_tools(field: str) -> Problem:
    """A problem of a template that leaves out the tools of a field's rows."""
    return template_problem(
        f"it does not show the model the tools of {field}",
        f"name a template that writes `tools`, or set {field}.tools_key to null",
    )


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer of the tokenizers library, by text; none without one."""
    tokens = tokenizer.get_added_tokens_decoder() if tokenizer else {}
    return {token.content: number for number, token in tokens.items() if token.special}


def _vocabulary(field: str, folder: str, found: ReadModel, special: dict[str, str]) -> Iterator[Problem]:
    if "eos_token" not in special:
        yield Problem(
            field,
            folder,
            "the tokenizer names no eos_token, so that no response would end",
            "add eos_token to tokenizer_config.json",
        )
    size = found.tokenizer.get_vocab_size() if found.tokenizer else 0
    if found.shape and size > found.shape.vocab:
        yield Problem(
            field,
            folder,
            f"the tokenizer has {size} tokens, the model's vocabulary {found.shape.vocab}",
            "take the tokenizer that belongs to the model",
        )


def check_served_teacher(config: RunConfig, found: ReadModel) -> Iterator[Problem]:
    """A problem unless a served teacher answers, and shows that its tokenizer is the model's. After `check_model`."""
    server = config.algorithm.teacher_server
    if server is None or config.algorithm.supervised:
        return
    if found.tokenizer is None and not found.has_template:
        # `check_model` reports the problem of its folder
        return
    quick = server.model_copy(update={"attempts": 1, "timeout_s": min(server.timeout_s, PATIENCE_S)})
    try:
        # a thread, since the caller may run in an event loop
        with ThreadPoolExecutor(1) as one:
            text = one.submit(asyncio.run, differing_text(ServedTeacher(quick), found.tokenizer)).result()
    except ConfigError:
        # check_references reports it
        return
    except RemoteRewardError as error:
        yield Problem(f"{TEACHER}.url", server.url, error.reason, error.remedy or "start the server")
        return
    except UnprovenError:
        yield Problem(
            f"{TEACHER}.same_tokenizer",
            False,
            f"nothing proves that the tokenizer behind {server.url} is the model's",
            "compare the two yourself; if they are the same, set it to true",
        )
        return
    if text is not None:
        yield Problem(
            f"{TEACHER}.url",
            server.url,
            f"its tokenizer is not the model's: it cuts {text!r} into other tokens",
            "take a teacher with the model's own tokenizer",
        )
    elif server.top_k:
        try:
            with ThreadPoolExecutor(1) as one:
                one.submit(asyncio.run, ServedTeacher(quick).logprobs([1, 2, 3], 2)).result()
        except RemoteRewardError as error:
            yield Problem(
                f"{TEACHER}.top_k",
                server.top_k,
                error.reason,
                "set it to what the server gives at most; vLLM has --max-logprobs",
            )


def check_stops(config: RunConfig, found: ReadModel) -> Iterator[Problem]:
    """A problem for each text to stop at that holds a special token and more, or half a character."""
    special = special_tokens(found.tokenizer)
    places = {
        "rollout.sampling.stop": config.rollout.sampling,
        **{
            f"evaluation.sets.{at}.sampling.stop": each.sampling
            for at, each in enumerate(config.evaluation.sets)
        },
    }
    for place, sampling in places.items():
        for text in sampling.stop:
            if problem := unseen(text, special if sampling.skip_special_tokens else {}):
                yield Problem(place, text, problem, REMEDY)


def answer_ends(config: RunConfig, found: ReadModel) -> AnswerEnds | None:
    """The tokens that end the run's answers; None if the tokenizer's files are of a kind that is not read here."""
    special, template = special_tokens(found.tokenizer), found.template
    if not special:
        return None
    turn = None
    if template is not None:
        turn = turn_end(
            lambda messages, for_answer: template.render(list(messages), None, for_answer), found.ends
        )
    return AnswerEnds(
        engine=tuple(engine_ends((found.here or config).model.path)),
        turn=special.get(turn or ""),
        eos=special.get(found.ends[0]) if found.ends else None,
        special=special,
    )


def ends_text(config: RunConfig, found: ReadModel) -> str | None:
    """The plan's text if the model's files do not name every token that ends an answer."""
    ends = answer_ends(config, found)
    if ends is None or not ends.added:
        return None
    texts = {number: text for text, number in ends.special.items()}

    def shown(tokens: list[int]) -> str:
        return " and ".join(f"{texts.get(token, 'a token without text')} ({token})" for token in tokens)

    named = shown(list(ends.engine)) if ends.engine else "none"
    why = (
        "ends a turn of the chat template"
        if ends.turn in ends.added
        else "is the tokenizer's end of sequence"
    )
    return (
        f"at {shown(ends.added)}, which {why}. Of tokens that end an answer, generation_config.json and config.json name {named}: "
        "requests to engines name the others, and so does the generation_config.json of each export"
    )
