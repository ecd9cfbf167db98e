"""The driver's side of one rollout of several turns: answers the session's requests, and keeps the tokens.

Owns limits and what counts as the same turn after a restart. Knows nothing of processes or files: turns go to `write`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from millrace.connectors.huggingface.dialogue import Dialogues
from millrace.core.config.rollout import Sampling, SessionSection
from millrace.core.contracts.ids import tokens_hash, turn_seed
from millrace.core.contracts.rows.chat_options import (
    PLAIN,
    ChatColumns,
    ChatOptions,
    chat_options,
    own_sampling,
)
from millrace.core.contracts.rows.prompts import ALWAYS_TOKENISED
from millrace.core.contracts.turns import TurnKind, TurnRow
from millrace.core.plain_text import json_text
from millrace.core.sessions import pipe
from millrace.core.sessions.interface import Message, Turn
from millrace.core.sessions.tree import Branch, RolloutTree, Segment
from millrace.core.waits import beat
from millrace.tasks.generation.sessions.rollout_record import RolloutEvents, arguments_text
from millrace.tasks.generation.single_samples import Answer, SampleGenerator


class RowColumns(ChatColumns, Protocol):
    """A source's settings for its rows' templates and sampling."""

    @property
    def sampling_key(self) -> str | None: ...


@dataclass(frozen=True)
class Opening:
    """The start of a rollout."""

    rollout_id: str
    group_id: str
    messages: Sequence[Message]  # the prompt's
    prompt_ids: Sequence[int]
    seed: int
    chat: bool
    longest: int  # tokens of the whole dialogue, including the prompt
    columns: RowColumns | None = None  # columns of the source
    options: ChatOptions = PLAIN
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the row's own parameters

    def of_row(self, metadata: Mapping[str, Any] | None, longest: int) -> Opening:
        """The opening with the template variables and sampling of a row with this metadata. longest: tokens of a turn."""
        if self.columns is None:
            return self
        own = own_sampling(metadata, self.columns.sampling_key, longest)
        return replace(self, options=chat_options(self.columns, metadata), sampling=own)


@dataclass
class _Said:
    """The messages of a branch, for reading."""

    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # number of messages after each turn
    plain: bool = True  # before the first turn: whether the messages are all of the prompt

    def __post_init__(self) -> None:
        self._first = len(self.messages)

    def after(self, turns: int) -> list[Message]:
        """The messages after this number of the branch's own turns."""
        return self.messages[: self.cuts[turns - 1] if turns else self._first]


CHARACTERS_A_TOKEN = 32  # more than texts have on average in any language


def characters(value: Any) -> int:
    """Characters of all texts in a message. Numbers, such as token ids, count as one each."""
    count, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            left += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            left += item
        else:
            count += len(item) if isinstance(item, str) else 1
    return count


class SessionRollout:
    """The driver's half of one session; the other half runs in a worker process."""

    def __init__(
        self,
        opening: Opening,
        settings: SessionSection,
        sampling: Sampling,
        dialogues: Dialogues,
        generator: SampleGenerator,
        places: asyncio.Semaphore,
        record: RolloutEvents,
        write: Callable[[TurnRow], Awaitable[None]],
    ) -> None:
        """places: limits the calls at once."""
        self.opening = opening
        self.record = record
        self.tree = RolloutTree(opening.prompt_ids)
        self.said = {0: _Said(list(opening.messages))}
        self.failure: str | None = None  # reason of an engine's failure
        self.engine_id = ""
        self.seconds = 0.0  # seconds of generation
        self._settings, self._sampling = settings, sampling
        self._dialogues, self._generator = dialogues, generator
        self._places, self._write = places, write
        # running calls, by branch and event
        self._calls: dict[tuple[int, int], tuple[pipe.CallTool, float]] = {}

    async def open(self) -> None:
        """If stored rows are missing, note from which row on the others do not count."""
        if self.record.gap is not None:
            await self._keep(self._row(self.tree[0], self.record.gap, kind="resumed"))

    async def handle(self, request: pipe.Request) -> pipe.Reply:
        """Answer a request of the session."""
        try:
            if isinstance(request, pipe.Generate) and (limit := self._too_long(request)):
                return pipe.ReachedLimit(limit, too_long=True)
            branch = self._branch(request)
            match request:
                case pipe.Generate():
                    return await self._generate(branch, request)
                case pipe.CallTool():
                    return await self._call(branch, request)
            return await self._called(branch, request.event, request.answer, request.failed)
        except ValueError as error:
            return pipe.Refused(str(error))

    def _too_long(self, request: pipe.Generate) -> str:
        """The error for messages of more characters than the rollout's tokens can hold: tokenising them would take gigabytes."""
        pieces = [*request.new, *((request.start and request.start.prompt) or ())]
        count = sum(map(characters, pieces))
        most = max(ALWAYS_TOKENISED, CHARACTERS_A_TOKEN * self.opening.longest)
        return (
            ""
            if count <= most
            else (
                f"the messages have {count} characters, and {self.opening.longest} tokens at most are taken: {most} characters"
            )
        )

    def restart(self, record: RolloutEvents) -> SessionRollout:
        """The same rollout from its start, with the record so far."""
        return SessionRollout(
            self.opening,
            self._settings,
            self._sampling,
            self._dialogues,
            self._generator,
            self._places,
            record,
            self._write,
        )

    async def lost(self, reason: str, blamed: bool) -> bool:
        """Note that the session's process ended. If one of the rollout's calls ended it, the reason becomes the call's answer.

        Returns whether the rollout may be run again.
        """
        calls, blamed_call = list(self._calls), blamed and bool(self._calls)
        for number, event in calls:
            if blamed_call:
                request, _ = self._calls[number, event]
                await self._called(self.tree[number], event, f"{request.tool} failed: {reason}", True)
            else:
                del self._calls[number, event]
                self._places.release()
        return blamed_call or not blamed

    def _branch(self, request: pipe.Request) -> Branch:
        number, start = request.branch, request.start
        if number in self.tree:
            return self.tree[number]
        if start is None or start.parent not in self.tree:
            raise ValueError("its branch could not start")
        own = start.prompt
        ids = None if own is None else self._opening_ids([], own)
        branch = self.tree.branch(number, start.parent, start.parent_turns, start.name, ids)
        origin = self.said[start.parent]
        messages = _messages(own) if own is not None else origin.after(start.parent_turns)
        self.said[number] = _Said(messages, plain=own is None or len(messages) == len(own))
        return branch

    async def _generate(self, branch: Branch, request: pipe.Generate) -> pipe.Reply:
        if branch.turns >= self._settings.max_turns:
            return pipe.ReachedLimit(f"rollout.session.max_turns = {self._settings.max_turns}")
        before = branch.ids
        self._observe(branch, request.new)
        ids = branch.ids
        longest = self.opening.sampling.get("max_new_tokens", self._sampling.max_new_tokens)
        end = min(branch.dialogue_begins + self._settings.max_tokens, self.opening.longest)
        room = min(end - len(ids), longest, request.max_new_tokens or longest)
        if room < 1:
            branch.forget(len(before))
            return pipe.ReachedLimit(f"rollout.session.max_tokens = {self._settings.max_tokens}")
        prompt = tokens_hash(ids)
        rows = self.record.turn(branch.number, branch.events, prompt)
        if rows is None:
            await self._diverge(branch, branch.events)
            answer = await self._ask(branch, ids, room, request.stop)
            if answer.generation is None:
                self.failure = answer.reason
                return pipe.Refused(answer.reason or "the run ended before the turn started")
            row = self._segment(branch, prompt, ids[len(before) :], request.new, answer)
            await self._keep(row)
            rows = [row]
        turn = self._add(branch, rows, ids)
        logprobs = [value for row in rows for value in row.rollout_logprobs] if request.logprobs else ()
        return replace(turn, prompt_tokens=len(ids), logprobs=logprobs)

    async def _ask(self, branch: Branch, ids: Sequence[int], room: int, stop: Sequence[str]) -> Answer:
        opening = self.opening
        answer = await self._generator.generate(
            ids,
            seed=turn_seed(opening.seed, branch.number, branch.turns),
            rid=f"{opening.rollout_id}.{branch.number:02d}.{branch.turns:04d}",
            session=opening.group_id,
            own={**opening.sampling, "max_new_tokens": room, **({"stop": list(stop)} if stop else {})},
            routed=branch.routed,
        )
        self.seconds += answer.seconds
        return answer

    def _add(self, branch: Branch, rows: Sequence[TurnRow], ids: Sequence[int]) -> Turn:
        """Add a turn's segments to the tree, and parse the turn."""
        output = [token for row in rows for token in row.output_ids]
        spans: list[tuple[int, int]] = []
        first = 0
        for row in rows:
            spans += [(first + span["first_token"], span["version"]) for span in row.policy_versions]
            first += len(row.output_ids)
        logprobs = [value for row in rows for value in row.rollout_logprobs]
        branch.add(Segment(output, logprobs, spans, b"".join(row.routed_experts or b"" for row in rows)))
        branch.events += 1
        self.engine_id = rows[-1].engine_id
        text, cut = "".join(row.text for row in rows), rows[-1].ended == "length"
        turn = self._dialogues.turn(output, text, cut, ids, self.opening.options)
        said = self.said[branch.number]
        said.turns.append(turn)
        said.messages.append(_said(turn))
        said.cuts.append(len(said.messages))
        return turn

    def _observe(self, branch: Branch, new: Sequence[Any]) -> None:
        """Add new content to a branch, all of it or nothing. Raises ValueError if the chat template refuses it."""
        said = self.said[branch.number]
        began = bool(said.turns) or (branch.parent_turns or 0) > 0
        prompt, added, messages, plain = branch.prompt_ids, list[int](), list[Message](), said.plain
        run: list[Message] = []
        for piece in [*new, {"ids": []}]:
            if "ids" not in piece:
                run.append(piece)
                continue
            if run and began:
                ids = [*branch.ids, *added]
                calls = said.turns[-1].tool_calls if said.turns and not messages else ()
                added += self._dialogues.following(run, ids, self.opening.chat, self.opening.options, calls)
            elif run:
                if not plain:
                    raise ValueError(
                        "a message cannot follow token ids before the first turn: put it before them, or give its ids"
                    )
                prompt = self._opening_ids([*said.messages, *messages], run)
            messages += run
            run = []
            added += piece["ids"]
            plain = plain and not piece["ids"]
        branch.prompt_ids, said.plain = prompt, plain or began
        branch.observe(added)
        said.messages += messages

    def _opening_ids(self, before: Sequence[Message], new: Sequence[Any]) -> list[int]:
        ids: list[int] = []
        messages = [*before, *_messages(new)]
        if messages:
            ids += self._dialogues.opening(messages, self.opening.chat, self.opening.options)
        for piece in new:
            ids += piece.get("ids", ())
        if not ids:
            raise ValueError("a branch with its own prompt needs a message or token ids")
        return ids

    async def _call(self, branch: Branch, request: pipe.CallTool) -> pipe.Reply:
        event = branch.events
        branch.events += 1
        found = self.record.answer(branch.number, event, request.tool, request.arguments)
        if found:
            return pipe.RecordedAnswer(found.text, found.failed)
        await self._diverge(branch, event)
        await self._places.acquire()
        self._calls[branch.number, event] = (request, time.time())
        return pipe.MakeCall(event)

    async def _called(self, branch: Branch, event: int, answer: str, failed: bool) -> pipe.Noted:
        request, started = self._calls.pop((branch.number, event))
        self._places.release()
        row = self._row(
            branch,
            event,
            kind="call",
            text=answer,
            tool=request.tool,
            arguments=arguments_text(request.arguments),
            failed=failed,
            timings=[("started", started), ("call_s", time.time() - started)],
        )
        await self._keep(row)
        return pipe.Noted()

    async def _diverge(self, branch: Branch, event: int) -> None:
        """If another event is recorded here, note that it no longer counts."""
        if self.record.differs(branch.number, event):
            await self._keep(self._row(branch, event, kind="diverged"))

    async def _keep(self, row: TurnRow) -> None:
        beat()
        self.record.note(row)
        await self._write(row)

    def _segment(
        self, branch: Branch, prompt: str, new_ids: Sequence[int], new: Sequence[Any], answer: Answer
    ) -> TurnRow:
        generation = answer.generation
        assert generation is not None, "it was generated"
        return self._row(
            branch,
            branch.events,
            kind="segment",
            prompt=prompt,
            new_ids=list(new_ids),
            output_ids=generation.output_ids.tolist(),
            rollout_logprobs=generation.logprobs.tolist(),
            policy_versions=[
                {"first_token": first, "version": version} for first, version in generation.weight_versions
            ],
            engine_id=generation.engine_id,
            seed=turn_seed(self.opening.seed, branch.number, branch.turns),
            ended=generation.finish,
            new=json_text(_messages(new)) if new else None,
            text=generation.text,
            routed_experts=answer.routed,
            timings=[("started", answer.started), ("generate_s", answer.seconds)],
        )

    def _row(self, branch: Branch, event: int, *, kind: TurnKind, **given: Any) -> TurnRow:
        return TurnRow(
            rollout_id=self.opening.rollout_id,
            group_id=self.opening.group_id,
            order=self.record.next_order,
            branch=branch.number,
            parent=branch.parent,
            parent_turns=branch.parent_turns,
            name=branch.name,
            event=event,
            kind=kind,
            **given,
        )


def _messages(pieces: Sequence[Any]) -> list[Message]:
    return [piece for piece in pieces if "ids" not in piece]


def _said(turn: Turn) -> Message:
    """A turn as a message, for reading."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.thinking:
        message["reasoning_content"] = turn.thinking
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id else {}),
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in turn.tool_calls
        ]
    return message
