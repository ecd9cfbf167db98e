"""`millrace chat` with a real engine: what it says comes as it is made, equal seeds give equal answers, and nothing acts on a terminal."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.connectors.engines.embedded.sampling import SamplingParams
from millrace.core.errors import ConfigError
from millrace.core.plain_text import CONTROL, PlainConsole
from millrace.flows.chat.shown import shown
from millrace.flows.chat.speaker import Speaker
from millrace.flows.commands import app
from tests.support.attacks import ATTACKS
from tests.support.engine_process import peaked_model
from tests.support.viewed_run import NAME, write_viewed_run


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return peaked_model(tmp_path_factory.mktemp("chat") / "model", seed=0)


def typed(*arguments: str, lines: str = "3+4=\n", code: int = 0) -> str:
    ended = CliRunner().invoke(app, ["chat", *arguments], input=lines)
    assert ended.exit_code == code, ended.output
    return ended.output


def test_a_folder_answers_and_a_seed_repeats_it(tiny_model: Path) -> None:
    given = [str(tiny_model), "--seed", "3", "--max-new-tokens", "12"]
    said = typed(*given, lines="3+4=\n\n/new\n3+4=\n")
    answers = re.split(
        r"\[cut off after \d+ tokens; --max-new-tokens allows more\]\n", said.split("the chat.\n")[1]
    )
    assert answers[0]
    assert answers[1].removeprefix("[another conversation]\n") == answers[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    {
        ("gone",): "there is no run of this name, and no config.json in a folder of this name",
        ("MODEL", "--at", "1"): "a folder has one state of the weights",
        ("MODEL", "--compare", "1"): "a folder has one state of the weights",
        ("MODEL", "--tools"): "there are no tools",
        (NAME, "--at", "9"): "has 2 committed iterations",
        (NAME, "--tools", "--at", "0"): "there are no tools",
    }.items(),
)
def test_what_cannot_be_talked_with_is_named(
    tmp_path: Path, tiny_model: Path, arguments: tuple[str, ...], says: str
) -> None:
    write_viewed_run(str(tmp_path))
    given = [str(tiny_model) if each == "MODEL" else each for each in arguments]
    assert says in " ".join(typed(*given, "--root", str(tmp_path), code=2).split())


async def test_pieces_are_the_answer_and_a_cancelled_one_leaves_the_engine_ready(tiny_model: Path) -> None:
    speaker = Speaker(str(tiny_model), "float32")
    try:
        pieces: list[str] = []
        params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
        said = await speaker.answer([5, 6, 7], params, 1, pieces.append)
        assert "".join(pieces) == said.text
        assert len(pieces) > 5
        assert (len(said.output_ids), said.truncated) == (40, True)
        waited = asyncio.create_task(
            speaker.answer([5, 6, 7], SamplingParams(max_new_tokens=400, ignore_eos=True), 1, pieces.append)
        )
        await asyncio.sleep(0.05)
        waited.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waited
        assert (await speaker.answer([5, 6, 7], params, 1, pieces.append)).output_ids == said.output_ids
        with pytest.raises(ConfigError, match="the conversation does not fit"):
            await speaker.answer([5] * speaker.longest, params, 1, pieces.append)
    finally:
        speaker.close()


@pytest.mark.parametrize("titles", [["one"], ["one", "two \x1b[2J"]])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_text_acts_on_the_terminal(titles: list[str], terminal: bool) -> None:
    console = PlainConsole(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
    with shown(console, titles) as places:
        for place in places:
            for text in ATTACKS.values():
                place.text(text)
                place.event(text)
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    if terminal and len(titles) > 1:
        written = re.sub(r"\x1b\[(\?25[lh]|1A|2K)|\r", "", written)  # rich moves to where it draws again
    assert CONTROL.findall(written) == []
    assert "\\x1b]52;c;b3duZWQ=\\x07" in re.sub(r"\s", "", written)
