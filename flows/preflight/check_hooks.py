"""Check that the functions a configuration names can be imported and take the arguments they will get, and that upstream's
options exist.

Upstream's options are compared with the source files of the installed versions, which are read and not imported.
"""

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from millrace.connectors.engines.sglang.server_args import option_problems
from millrace.connectors.trainers.rank import Rank
from millrace.core.config import RunConfig, UserFunction
from millrace.core.config.parts.problems import Problem, nearest
from millrace.core.config.passthrough_rules import (
    ROUTER_OWNED,
    ROUTER_REFUSED,
    SGLANG_ELSEWHERE,
    SGLANG_OWNED,
    SGLANG_REFUSED,
)
from millrace.core.config.reward import RewardFunction
from millrace.core.config.rollout import Tool
from millrace.core.errors import ConfigError, remedy_of
from millrace.core.hooks.loading import hidden_module, load, written_for_slime
from millrace.core.hooks.reward_selection import all_rewards, comparisons
from millrace.core.hooks.rollout_selection import rollout_functions
from millrace.core.hooks.slime.arguments import OF_A_ROLLOUT, OF_SCORING, run_arguments
from millrace.core.hooks.slime.generate import form_of
from millrace.core.hooks.slime.names import WHOLE_ROLLOUT, missing, refusal
from millrace.core.hooks.slime.source import reads_of

ROUTER = ("router_args.py",)
ROLLOUTS, FILTER = "rollout.session.function", "filter.group_filter"  # fields that accept slime's signature
NOT_OF_SLIME = {  # fields that do not: the reason, and the alternative
    "algorithm.advantage": (
        "slime's takes a batch of its trainer, with token tensors; here an advantage is computed before, from rewards",
        "write advantage(rewards, group_ids)",
    ),
    "algorithm.loss": (
        "slime's takes a batch of its trainer and the logits; here a loss gets log-probabilities",
        "write loss(batch), whose batch is a millrace.TokenBatch",
    ),
    "algorithm.shaping": (
        "slime's takes samples and returns raw and normalised rewards; here the two are algorithm.shaping and algorithm.advantage",
        "write shaping(rewards, response_lengths, truncated), and normalise in algorithm.advantage",
    ),
    "rollout.buffer.buffer_filter": (
        "slime's takes groups that wait to be trained; here it chooses among trained groups",
        "write buffer_filter(groups), whose groups are millrace.BufferedGroup",
    ),
    "rows": (
        "slime's data source gives samples and takes them back; here a source gives rows by number, and the run keeps the place",
        "write rows() that returns a list of rows",
    ),
    "": (
        "it does not accept slime's signature",
        "give it the parameters of docs/algorithms.md#your-functions",
    ),
}
NAMED = re.compile(r"(?<=^rollout\.session\.)named\..+$")  # fields like rollout.session.function


def check_hooks(config: RunConfig) -> Iterator[Problem]:
    """Functions that cannot be imported, or do not take the arguments they will get."""
    for place, function, arguments in _functions(config):
        yield from _hook(place, function, arguments)
        if function and written_for_slime(function.function):
            yield from _of_slime(config, place, function)
    for at, tool in enumerate(config.rollout.session.tools if config.rollout.session else ()):
        if isinstance(tool, Tool):
            yield from _hook(f"rollout.session.tools.{at}", tool, None)
    if config.trainer.rank:
        yield from _rank(config.trainer.rank)


def hidden_modules(config: RunConfig) -> Iterator[str]:
    """A sentence for each function whose module lies in two places. Call it after `check_hooks`."""
    for place, function, _ in _functions(config):
        hidden = hidden_module(function.function) if function else None
        if function and hidden:
            yield f"{place}.function = {function.function} is imported from {hidden[1]}, not from {hidden[0]}."


def _functions(config: RunConfig) -> Iterator[tuple[str, UserFunction | None, Sequence[str]]]:
    """Each field that may name a function, with the function and the arguments that it is called with."""
    a = config.algorithm
    for source in config.data.sources:
        if source.rows and source.levels:
            by_level = {**source.rows.options, "level": source.levels.first}
            leveled = source.rows.model_copy(update={"options": by_level})
            yield f"data.sources.{source.name}.rows", leveled, ()
        else:
            yield f"data.sources.{source.name}.rows", source.rows, ()
    for found in all_rewards(config):
        yield found.field, found.function, ("sample",)
    for field, compare in comparisons(config):
        yield field, compare, ("first", "second")
    yield "filter.group_filter", config.filter.group_filter, ("samples",)
    if config.rollout.buffer:
        yield "rollout.buffer.buffer_filter", config.rollout.buffer.buffer_filter, ("groups",)
    yield (
        "algorithm.advantage",
        a.advantage if a.advantage.kind == "function" else None,
        ("rewards", "group_ids"),
    )
    yield "algorithm.loss", a.loss if a.loss.kind == "function" else None, ("batch",)
    if a.teacher_server:
        yield "algorithm.teacher_server.hint", a.teacher_server.hint, ("sample",)
    yield "algorithm.shaping", a.shaping, ("rewards", "response_lengths", "truncated")
    yield "run.prepare", config.run.prepare, ("config",)
    if config.rollout.session:
        for field, function in rollout_functions(config.rollout.session):
            yield field, function, ("session",)
        yield "rollout.session.environment", config.rollout.session.environment, ()


def _hook(
    place: str, user_function: UserFunction | None, arguments: Sequence[str] | None
) -> Iterator[Problem]:
    """Problems of a function. arguments: its arguments besides its options; None: any."""
    if user_function is None:
        return
    field, path, options = f"{place}.function", user_function.function, user_function.options
    function = _loaded(field, path)
    if isinstance(function, Problem):
        yield function
        return
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    if arguments is None:
        return
    if isinstance(user_function, RewardFunction):
        signature, arguments, options = _of_reward(user_function, function, signature)
    elif written_for_slime(path):
        field_of_slime = NAMED.sub("function", place)
        if field_of_slime not in (ROLLOUTS, FILTER):
            kind = "rows" if place.startswith("data.") else field_of_slime
            reason, remedy = NOT_OF_SLIME.get(kind, NOT_OF_SLIME[""])
            yield Problem(field, path, reason, f"{remedy}, and name it as package.module:function")
            return
        taken = form_of(function).arguments if field_of_slime == ROLLOUTS else ["args", "samples"]
        arguments, options = taken, {}  # for slime, the options become attributes of args
    try:
        signature.bind(*arguments)
    except TypeError as error:
        if not options:
            yield Problem(
                field,
                path,
                f"cannot be called with ({', '.join(arguments)}): {error}",
                f"give them in the options; its parameters are {signature}"
                if inspect.isclass(function)
                else f"give it these parameters; its signature is {path.rpartition(':')[2]}{signature}",
            )
            return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        yield Problem(
            f"{place}.options" if options else field,
            ", ".join(options),
            f"{path} does not take them: {error}",
            f"its parameters are {signature}",
        )


def _loaded(field: str, path: str) -> Callable[..., Any] | Problem:
    try:
        return load(path, field)
    except ConfigError as error:
        return Problem(field, path, error.reason, error.remedy or "correct the path")
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything while it is imported
        reason = f"its module fails: {type(error).__name__}: {error}"
        return Problem(field, path, reason, remedy_of(error, "correct the module"))


def _rank(path: str) -> Iterator[Problem]:
    """Problems of the class of another trainer's processes."""
    made = _loaded("trainer.rank", path)
    if isinstance(made, Problem):
        yield made
        return
    wanted = [name for name, _ in inspect.getmembers(Rank, inspect.isfunction) if not name.startswith("_")]
    lacks = [name for name in wanted if not hasattr(made, name)]
    if lacks:
        yield Problem(
            "trainer.rank",
            path,
            f"lacks what a run asks of it: {', '.join(lacks)}",
            "give it the methods of Rank in connectors/trainers/rank.py",
        )


def _of_slime(config: RunConfig, place: str, function: UserFunction) -> Iterator[Problem]:
    """Names that a slime hook's source reads and that do not exist here. A hook that cannot be loaded has another problem."""
    try:
        loaded = load(function.function, place)
    except Exception:  # noqa: BLE001 - `_hook` says what it raises
        return
    module = inspect.getmodule(loaded)
    if module is None or module.__name__.startswith("millrace."):
        return
    rollouts = place.startswith("rollout.session.")
    known = {*(run_arguments(config) if rollouts else OF_SCORING), *(OF_A_ROLLOUT if rollouts else ())}
    reads = reads_of(loaded, module)
    for name, where in reads.names.items():
        if missing(name):
            reason, remedy = refusal(name)
            yield Problem(
                f"{place}.function", function.function, f"it imports {name} ({where}): {reason}", remedy
            )
    for name, where in reads.arguments.items():
        if name not in known | function.options.keys():
            reason = f"{function.function} reads args.{name} ({where}), which has no value here"
            yield Problem(
                f"{place}.options", None, reason, f"give it in the function's options: {{{name}: ...}}"
            )
    if rollouts and {"rollout_id", "data_source"} & inspect.signature(loaded).parameters.keys():
        yield Problem(f"{place}.function", function.function, *WHOLE_ROLLOUT)
    if place == FILTER and reads.removes:
        reason = f"it sets remove_sample ({reads.removes}), as a rollout sample filter: a group filter keeps or drops a group"
        yield Problem(
            f"{place}.function",
            function.function,
            reason,
            "set it in rollout.session.function, which generates the sample",
        )
    for name, where in () if rollouts else reads.tokens.items():
        reason = f"it reads sample.{name} ({where}): rewards and filters see no token ids"
        yield Problem(
            f"{place}.function", function.function, reason, "read response, response_length or metadata"
        )


def _of_reward(
    reward: RewardFunction, function: Callable[..., Any], signature: inspect.Signature
) -> tuple[inspect.Signature, Sequence[str], dict[str, Any]]:
    """The signature of a reward, the arguments it is called with, and the options it gets, by its form."""
    if written_for_slime(reward.function) and not inspect.isclass(function):
        return signature, ("args", "samples" if reward.group else "sample"), {}
    if written_for_slime(reward.function) and list(signature.parameters) == ["args"]:
        return signature, ("args",), {}
    if written_for_slime(reward.function):
        return signature, (), {key: value for key, value in reward.options.items() if key not in OF_SCORING}
    if inspect.isclass(function):
        return signature, (), reward.options
    return signature, ("samples" if reward.group else "sample",), reward.options


def check_passthrough(config: RunConfig) -> Iterator[Problem]:
    """Options that the installed SGLang and sglang-router do not have."""
    refused = {*SGLANG_OWNED, *SGLANG_REFUSED, *SGLANG_ELSEWHERE}
    yield from option_problems({k: v for k, v in config.engines.sglang.items() if k not in refused})
    options = config.engines.router.options if config.engines.router else {}
    yield from _unknown(
        "engines.router.options",
        {name: options[name] for name in sorted(set(options) - set(ROUTER_OWNED) - set(ROUTER_REFUSED))},
        ("sglang_router", ROUTER, ("RouterArgs",)),
        "sglang-router's RouterArgs",
    )


def _unknown(
    section: str,
    options: dict[str, Any],
    where: tuple[str, Sequence[str], Sequence[str]],
    what: str,
) -> Iterator[Problem]:
    known = _fields(*where) if options else None
    if not known:
        return
    for name, value in options.items():
        if name not in known:
            yield Problem(
                f"{section}.{name}",
                value,
                f"the installed version's {what[what.index(' ') + 1 :]} has no such field",
                nearest(name, known),
            )


def _fields(package: str, files: Sequence[str], classes: Sequence[str]) -> set[str]:
    """Names annotated in the classes' bodies, from the source; empty if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return set()
    names: set[str] = set()
    for root in spec.submodule_search_locations or ():
        for file in files:
            path = Path(root) / file
            if path.is_file():
                for node in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(node, ast.ClassDef) and node.name in classes:
                        names |= {
                            item.target.id
                            for item in node.body
                            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                        }
    return names
