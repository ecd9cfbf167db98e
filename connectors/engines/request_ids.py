"""Request ids, one for each attempt of a request.

    0a1b-0003~00@5f2e9c
    sample    |  sender
              attempt

Stored ids omit the sender.
"""

from __future__ import annotations

import secrets


def new_sender() -> str:
    """A unique name for a sender, among all processes."""
    return secrets.token_hex(3)


def request_id(rid: str, attempt: int, sender: str) -> str:
    """Id of one attempt. Its suffix has a fixed width: SGLang aborts by prefix, so no id may be a prefix of another.

    An id must not be used again either, for example when the next iteration continues an answer: SGLang 0.5.17 ends any request
    that has a streamed request's id two seconds after that stream has ended.
    """
    return f"{rid}~{attempt:02}@{sender}"


def without_sender(request: str) -> str:
    """The part of an id that is the same in every run."""
    return request.partition("@")[0]
