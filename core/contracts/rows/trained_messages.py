"""Which messages of a dialogue are trained: by the source's setting, and by a switch that a message may carry. Pure.

Owns the switches: `weight` (0 or 1), as OpenAI's format for fine-tuning has it, and `train` (true or false). Chat templates
never see them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

LossOn = Literal["answer", "assistant", "last_assistant"]
SWITCHES = ("weight", "train")
Message = Mapping[str, Any]


def trained_messages(messages: Sequence[Message], loss_on: LossOn) -> list[int]:
    """Numbers of the messages that are trained, in order. A message's switch overrides the source's setting.

    Raises ValueError, with `kind of reason: details`, for a switch that cannot be obeyed, or if no message is trained.
    """
    assert loss_on != "answer", "an answer is not a message"
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = said if loss_on == "assistant" else said[-1:]
    trained: list[int] = []
    for number, message in enumerate(messages):
        own = _switch(number, message)
        if own and message["role"] != "assistant":
            raise ValueError(
                f"bad message: number {number}: it is to be trained, and its role is {message['role']}, not assistant"
            )
        if own or (own is None and number in wanted):
            trained.append(number)
    if not trained:
        raise ValueError(
            "nothing to train: no message is the assistant's"
            if not said
            else "nothing to train: every message of the assistant is switched off"
        )
    return trained


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without their switches."""
    return [{name: item for name, item in message.items() if name not in SWITCHES} for message in messages]


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The messages, after this system message if they have none at the start."""
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*(first if messages[0]["role"] != "system" else []), *messages]


def _switch(number: int, message: Message) -> bool | None:
    """A message's switch: whether it is trained; None without a switch."""
    said: list[bool] = []
    for name in SWITCHES:
        value = message.get(name)
        if value is None:
            continue
        # true and false equal 1 and 0, so `train` passes too
        if value not in (0, 1):
            raise ValueError(f"bad message: number {number}: {name} is {str(value)[:20]}, neither 0 nor 1")
        said.append(bool(value))
    if len(set(said)) == 2:
        raise ValueError(f"bad message: number {number}: its weight and its train contradict each other")
    return said[0] if said else None
