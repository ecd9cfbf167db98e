"""The fields of `algorithm.teacher_server`: a teacher on a server, instead of weights in the trainer's ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START
from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.contracts.references import WHOLE


class TeacherServer(Section):
    """A server that gives the log-probabilities of tokens it is sent. Its tokenizer must be the model's."""

    url: Annotated[str, ANY_START] = Field(
        pattern=r"^https?://",
        description="Address of the server: for SGLang as in http://host:30000, for the other protocols up to /v1.",
    )
    protocol: Annotated[Literal["sglang", "vllm", "openai"], ANY_START] = Field(
        "sglang",
        description="Its protocol: sglang (/generate), vllm (completions with prompt_logprobs) or openai "
        "(completions with echo).",
    )
    model: str | None = Field(None, description="The teacher's name on the server; only for vllm and openai.")
    key: Annotated[str | None, ANY_START] = Field(
        None,
        pattern=WHOLE,
        description="Its Bearer token, as a reference: ${env:NAME} or ${prefect:BLOCK}.",
    )
    top_k: int = Field(
        0,
        ge=0,
        le=256,
        description="Likeliest tokens of each position that it gives, and that the loss compares; 0: log-probabilities of the sampled token alone, in the advantage. Only for sglang and vllm.",
    )
    hint: UserFunction | None = Field(
        None,
        description="Function (millrace.TeacherHint) that gets a finished sample and returns text that is added to the teacher's prompt, not to the policy's. Not with rollout.session.",
    )
    concurrency: Annotated[int, ANY_START] = Field(32, ge=1, description="Samples that it scores at once.")
    timeout_s: Annotated[float, ANY_START] = Field(
        120, gt=0, description="Longest time for one attempt. Seconds."
    )
    attempts: Annotated[int, ANY_START] = Field(
        3, ge=1, description="Attempts for one sample before it counts as failed."
    )
    same_tokenizer: Annotated[bool, ANY_START] = Field(
        False,
        description="Assert that its tokenizer is the model's, if the server's answers cannot prove it.",
    )
