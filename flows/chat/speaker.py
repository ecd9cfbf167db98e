"""A model that answers in this process: the embedded engine, one request at a time, with its text as it comes.

Owns the engine and what may be shown of an unfinished text. Knows nothing of dialogues, tools or terminals.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millrace.connectors.engines.embedded.engine import Engine
from millrace.connectors.engines.embedded.model import ModelError
from millrace.connectors.engines.embedded.sampling import RequestError, SamplingParams
from millrace.connectors.engines.embedded.slots import Request
from millrace.core.errors import ConfigError

LONGEST = 32_768  # tokens of a conversation, if the model has so many positions
HALF = "\ufffd"  # what a tokenizer writes for bytes that are no whole character yet
OnText = Callable[[str], None]
"""Gets the next piece of an answer's text."""


@dataclass(frozen=True)
class Said:
    """An answer. text: with the special tokens that the sampling parameters keep."""

    output_ids: list[int]
    text: str
    truncated: bool


class Speaker:
    """One model with its weights, ready to answer."""

    def __init__(self, folder: str, dtype: str) -> None:
        """Loads the folder. Raises ConfigError if the embedded engine cannot serve it."""
        try:
            self._engine = Engine(
                folder,
                max_running=1,
                max_total_tokens=LONGEST,
                weight_version="chat",
                seed=None,
                dtype=dtype,
            )
        except ModelError as error:
            raise ConfigError(
                f"the embedded engine does not serve it: {error}",
                where=folder,
                remedy="name a folder of a family that `millrace models` lists, with a tokenizer.json",
            ) from error
        self.longest = min(LONGEST, self._engine.shape.positions)
        self._engine.start()

    async def answer(
        self, prompt: Sequence[int], params: SamplingParams, seed: int | None, on_text: OnText
    ) -> Said:
        """Generate one answer. seed: equal seeds give equal answers; None draws one. Raises ConfigError if the prompt is too long.

        Cancelling ends the request.
        """
        news: asyncio.Queue[None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def notify(_: Request) -> None:
            loop.call_soon_threadsafe(news.put_nowait, None)

        room = self.longest - len(prompt)
        params = replace(params, max_new_tokens=max(1, min(params.max_new_tokens, room)))
        request = Request(
            rid=uuid.uuid4().hex,
            prompt=list(prompt),
            params=params,
            seed=self._engine.draw_seed() if seed is None else seed,
            notify=notify,
        )
        try:
            self._engine.check(request.prompt, params)
        except RequestError as error:
            raise ConfigError(
                f"the conversation does not fit: {error}", where="chat", remedy="start another one by /new"
            ) from error
        try:
            self._engine.submit(request)
        except RequestError as error:
            raise ConfigError(str(error), where="chat", remedy="start the chat again") from error
        shown = 0
        try:
            while request.finish is None:
                await news.get()
                text = self._text(request)
                sure = settled(text, params.stop)
                if len(sure) > shown:
                    on_text(sure[shown:])
                    shown = len(sure)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.to_thread(self._engine.withdraw, [request]))
            raise
        if request.finish["type"] == "abort":
            raise ConfigError(
                str(request.finish.get("message", "it was ended")),
                where="chat",
                remedy="start the chat again",
            )
        text = self._text(request)
        on_text(text[shown:])
        return Said(request.output, text, request.finish["type"] == "length")

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.stop()

    def _text(self, request: Request) -> str:
        if request.stopped_text is not None:
            return request.stopped_text
        return self._engine.text.decode(list(request.output), request.params)


def settled(text: str, stops: Sequence[str]) -> str:
    """The start of an unfinished text that later tokens cannot change: without half a character or the start of a stop string."""
    text = text.rstrip(HALF)
    held = max((len(stop) for stop in stops), default=1) - 1
    return text[: len(text) - held] if held else text
