"""`millrace chat`: talk with the weights of a run after some iteration, or with a Hugging Face folder, on this machine's CPU.

Changes nothing in the run's folder. Uses the embedded engine in this process, beside a run that may be running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.connectors.host.own_folders import temporary_folder
from millrace.connectors.storage.run_folder import RunFolder
from millrace.core.config import RunConfig
from millrace.core.config.model import Model
from millrace.core.config.rollout import Sampling
from millrace.core.errors import ConfigError, MillraceError, first_error
from millrace.core.families.adapters import holds_adapters
from millrace.core.families.config_file import only_adapters
from millrace.core.hooks.loading import search_in
from millrace.flows.commands.named_by_run import named_by_run
from millrace.flows.commands.terminal import (
    RootOption,
    console,
    errors,
    guarded,
    lines_before_prefect,
    named_first,
    print_lines,
)
from millrace.flows.commands.weights_after import configuration_after, iterations_done, weights_after
from millrace.flows.driver.named_model import at_commit
from millrace.flows.driver.stored_run import run_record

if TYPE_CHECKING:
    from millrace.flows.chat.talk import Talk

NEW = "/new"
HELP = f"Write, and Enter sends. {NEW} starts another conversation, Ctrl-C ends an answer, Ctrl-D the chat."
PROMPT = "> "


def chat(
    model: Annotated[str, typer.Argument(help="A run under --root, or a folder with a Hugging Face model.")],
    at: Annotated[
        int | None, typer.Option("--at", help="After this many iterations of the run; the newest by default.")
    ] = None,
    compare: Annotated[
        int | None,
        typer.Option(help="Answer with the weights after this many iterations too, beside the others."),
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools", help="The model may call the tools of the run's rollout.session.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message; by default the one of the run's first source.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; by default as in the run.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; by default as in the run. Tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    root: RootOption = "runs",
) -> None:
    """Talk with stored weights on this machine's CPU: answers as they come, with the run's tools, two checkpoints beside each other."""
    asked = ChatCall(model, at, compare, tools, system, temperature, max_new_tokens, seed, root)
    with lines_before_prefect(), temporary_folder("millrace-chat") as folder:
        found = guarded(lambda: models_of(asked, Path(folder), named_first(model, own_file=False)))
        talks = guarded(lambda: [talk_with(each, asked) for each in found])
        titles = [each.title for each in found]
        print_lines([*titles, HELP])
        with asyncio.Runner() as runner:
            try:
                for text in typed():
                    _answer(runner, talks, titles, text)
            finally:
                for talk in talks:
                    talk.speaker.close()


@dataclass(frozen=True)
class ChatCall:
    """What was typed."""

    model: str
    at: int | None
    compare: int | None
    tools: bool
    system: str | None
    temperature: float | None
    max_new_tokens: int | None
    seed: int | None
    root: str


@dataclass(frozen=True)
class ChatModel:
    """Weights to talk with. config: of the run that trained them; None for a folder."""

    title: str
    folder: str
    config: RunConfig | None


def models_of(
    asked: ChatCall, into: Path, say: Callable[[list[str]], None] = lambda _: None
) -> list[ChatModel]:
    """The weights that were asked for. into: folder for weights that are copied or made. say: as for `evaluate_run`.

    Raises MillraceError naming what is wrong.
    """
    name, root = asked.model, asked.root
    if Path(name).name == name and (folder := RunFolder(root, name)).store.exists("run.json"):
        record = run_record(root, name)
        found: list[ChatModel] = []
        # both are refused before the weights of one are made
        asked_for = [asked.at] if asked.compare is None else [asked.at, asked.compare]
        for done in [iterations_done(folder, at) for at in asked_for]:
            stored = configuration_after(record, folder, done)
            if not found:
                say(named_by_run(stored))
            config = at_commit(stored, record.get("model_commit")).config
            weights = weights_after(config, folder, record, done, into / str(done))
            title = f"{name} after {done} iterations" if done else f"{name} before training"
            found.append(ChatModel(title, weights, config))
        return found
    if holds_adapters(Path(name)):
        raise only_adapters(Path(name), f"chat {name}")
    if not (Path(name) / "config.json").exists():
        raise ConfigError(
            "there is no run of this name, and no config.json in a folder of this name",
            where=name,
            remedy="name a run under --root, or a folder with a Hugging Face model",
        )
    for option, given in (("--at", asked.at), ("--compare", asked.compare)):
        if given is not None:
            raise ConfigError(
                "a folder has one state of the weights", where=option, remedy="leave it out, or name a run"
            )
    return [ChatModel(name, str(Path(name).absolute()), None)]


def talk_with(model: ChatModel, asked: ChatCall) -> Talk:
    """A conversation that has not started. Raises ConfigError for tools that there are not, and for weights that no engine here serves."""
    # these import torch
    from millrace.connectors.engines.embedded.sampling import RequestError, SamplingParams
    from millrace.connectors.huggingface.dialogue import Dialogues
    from millrace.connectors.huggingface.tokenizer import PromptTokenizer
    from millrace.connectors.user_code.mcp_tools import WorkerTools, tool_schemas
    from millrace.flows.chat.speaker import Speaker
    from millrace.flows.chat.talk import ChatTools, Talk

    config = model.config
    session = config.rollout.session if config else None
    called, schemas = None, []
    if asked.tools:
        if session is None or not session.tools:
            raise ConfigError(
                "there are no tools: only a run with rollout.session.tools has some",
                where=f"--tools, {asked.model}",
                remedy="leave it out",
            )
        assert config is not None, "it has a session"
        search_in(config.run.import_from)
        schemas = tool_schemas(session.tools)
        called = ChatTools(WorkerTools(session.tools), session.timeout_s, session.max_turns)
    described = config.model.model_copy(update={"path": model.folder}) if config else Model(path=model.folder)
    tokenizer = PromptTokenizer.load(described, schemas)
    source = config.data.sources[0] if config and config.data.sources else None
    sampling = config.rollout.sampling if config else Sampling()
    given = {"temperature": asked.temperature, "max_new_tokens": asked.max_new_tokens}
    params = sampling.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    ).request
    try:
        parsed = SamplingParams.parse({**params, **tokenizer.ends.stops(params)})
    except RequestError as error:
        raise ConfigError(
            f"the embedded engine refuses it: {error}",
            where="rollout.sampling",
            remedy="talk with an export's folder, which has no rollout.sampling",
        ) from error
    return Talk(
        Speaker(model.folder, config.dtype if config else "float32"),
        Dialogues(tokenizer, schemas),
        replace(parsed, no_stop_trim=False),
        chat=tokenizer.tokenizer.chat_template is not None and (source is None or source.chat),
        system=asked.system if asked.system is not None else source.system if source else None,
        called=called,
        seed=asked.seed,
    )


def typed() -> Iterator[str]:
    """Lines that are typed or come from a pipe, without empty ones."""
    while True:
        try:
            line = input(PROMPT if console.is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print_lines([""])
            return
        if line.strip():
            yield line


def _answer(runner: asyncio.Runner, talks: Sequence[Talk], titles: Sequence[str], text: str) -> None:
    """Show the answers to one message. An error is printed, and the conversation is as it was before."""
    from millrace.flows.chat.shown import shown

    if text.strip() == NEW:
        for talk in talks:
            talk.restart()
        print_lines(["[another conversation]"])
        return

    before = [(talk.ids, talk.turns) for talk in talks]

    async def all_of() -> None:
        async with asyncio.TaskGroup() as together:
            for talk, place in zip(talks, places, strict=True):
                together.create_task(talk.say(text, place))

    try:
        with shown(console, titles) as places:
            runner.run(all_of())
    except KeyboardInterrupt:
        _go_back(talks, before)
        print_lines(["[ended; the conversation is as it was before]"])
    except ExceptionGroup as failed:
        _go_back(talks, before)
        error = first_error(failed)
        if not isinstance(error, MillraceError):
            raise
        errors.print(f"{type(error).__name__}: {error}", soft_wrap=True)


def _go_back(talks: Sequence[Talk], before: Sequence[tuple[list[int], int]]) -> None:
    """Have conversations end as they did: one of two may have had its answer already."""
    for talk, (ids, turns) in zip(talks, before, strict=True):
        talk.ids, talk.turns = ids, turns
