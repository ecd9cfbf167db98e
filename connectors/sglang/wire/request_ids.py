"""Request ids: what an engine knows one attempt of a request by.

    0a1b-0003~00@5f2e9c
    sample    |  sender
              attempt

What is stored of a request leaves the sender out.
"""

from __future__ import annotations

import secrets


def new_sender() -> str:
    """A name that no other sender has, in this process or another."""
    return secrets.token_hex(3)


def request_id(rid: str, attempt: int, sender: str) -> str:
    """Id of one attempt. Of fixed width after the rid: SGLang aborts by prefix, so no id may be a prefix of another.

    Nor may an id come again, as where the next iteration goes on with an answer: SGLang 0.5.17 ends whatever has a streamed
    request's id two seconds after that stream has ended.
    """
    return f"{rid}~{attempt:02}@{sender}"


def without_sender(request: str) -> str:
    """What of an id is the same in every run."""
    return request.partition("@")[0]
