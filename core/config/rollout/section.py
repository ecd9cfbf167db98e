"""How samples are generated, and the off-policy reuse of finished groups."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START, fixed, in_a_branch
from millrace.core.config.parts.section import Section
from millrace.core.config.parts.user_function import UserFunction
from millrace.core.config.rollout.session import SessionSection


class Buffer(Section):
    """Trained groups that are trained once more, instead of freshly drawn ones."""

    share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Share of rollout.prompts that comes from the buffer, as far as it holds enough.",
    )
    max_age: int = Field(
        4,
        ge=1,
        description="A group is reused while the weights are at most this many versions newer than the weights that generated it.",
    )
    max_uses: int = Field(
        2,
        ge=2,
        description="Times that a group is trained, including the first time.",
    )
    choose: Literal["first_in_first_out", "prioritised", "stratified"] = Field(
        "first_in_first_out",
        description="Which groups are taken first: the oldest; groups whose rewards differ most (largest standard deviation); or one of each stratum in turn, the oldest first.",
    )
    strata: Literal["source", "reward"] = Field(
        "source",
        description="Strata of choose=stratified: data sources, or four equally wide bands of the groups' mean rewards.",
    )
    buffer_filter: UserFunction | None = Field(
        None,
        description="Function (millrace.BufferFilter) that gets the groups held, in the order of `choose`, and returns the groups to take, in their order.",
    )

    def wanted(self, prompts: int) -> int:
        """Groups of an iteration that come from the buffer if it holds enough. prompts: all groups of the iteration."""
        return round(self.share * prompts)


STEPS = "the number of steps an iteration follows from it"
ALWAYS = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
GRAMMAR = ("json_schema", "regex", "ebnf")
RESHAPING = (
    "min_new_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    *GRAMMAR,
)


class Sampling(Section):
    """for `evaluation.sets` alone. => ; they are for `evaluation.sets` alone."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy (evaluation only).")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="-1 keeps the whole vocabulary.")
    min_p: float = Field(0.0, ge=0, le=1, description="Smallest probability relative to the likeliest token.")
    max_new_tokens: int = Field(256, ge=1, description="Longest response. Tokens.")
    stop: list[str] = Field(
        [],
        description="Strings that end a response. A special token here acts as one of `stop_token_ids`.",
    )
    stop_token_ids: list[int] = Field(
        [], description="Token ids that end a response, besides the end-of-sequence token."
    )
    stop_regex: list[str] = Field(
        [], description="Regular expressions of Python; a response ends when one is found in its text."
    )
    ignore_eos: bool = Field(
        False, description="The end-of-sequence token ends no response; stops and max_new_tokens do."
    )
    skip_special_tokens: bool = Field(
        True,
        description="Leave special tokens out of a response's text, which rewards read. Its token ids hold them in any case.",
    )
    min_new_tokens: int = Field(
        0,
        ge=0,
        description="Shortest response: tokens that would end it are not drawn before. Evaluation only. Tokens.",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtracted from a token's logit for each time that the response holds it. Evaluation only.",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logit of each token that the response holds. Evaluation only.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=2,
        description="Logits of tokens that occurred before are divided by it, negative ones multiplied. Evaluation only.",
    )
    logit_bias: dict[int, float] = Field(
        {}, description="Added to the logits of these token ids. Evaluation only."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="A response is JSON of this schema. Needs SGLang. Evaluation only."
    )
    regex: str | None = Field(
        None, description="A response matches this regular expression. Needs SGLang. Evaluation only."
    )
    ebnf: str | None = Field(
        None, description="A response follows this grammar, in EBNF. Needs SGLang. Evaluation only."
    )

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.default
        }

    @property
    def reshaping(self) -> dict[str, Any]:
        """The fields that change the logits before a token is drawn.

        The engine reports log-probabilities of the changed distribution; the trainer computes the policy's.
        """
        return {name: value for name, value in self.given.items() if name in RESHAPING}

    @property
    def grammar(self) -> dict[str, Any]:
        """The fields that a grammar backend acts on."""
        return {name: value for name, value in self.given.items() if name in GRAMMAR}

    @property
    def request(self) -> dict[str, Any]:
        """`sampling_params` of a request: the fields that every engine knows, and the other fields that are set."""
        given = self.given
        return {
            **{name: getattr(self, name) for name in ALWAYS},
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids or None,
            "no_stop_trim": True,
            **{
                name: value
                for name, value in given.items()
                if name not in (*ALWAYS, "stop", "stop_token_ids")
            },
            **(
                {"logit_bias": {str(token): bias for token, bias in self.logit_bias.items()}}
                if self.logit_bias
                else {}
            ),
            **({} if self.json_schema is None else {"json_schema": json.dumps(self.json_schema)}),
        }


class Rollout(Section):
    """How samples are generated."""

    prompts: Annotated[int, fixed(STEPS)] = Field(
        32, ge=1, description="Prompts (groups) that one iteration trains on."
    )
    samples_per_prompt: Annotated[int, fixed(STEPS)] = Field(
        8, ge=1, description="Samples per prompt: the group size n."
    )
    sampling: Annotated[
        Sampling, in_a_branch("an open iteration may hold samples that were drawn with it")
    ] = Sampling()
    session: Annotated[
        SessionSection | None, in_a_branch("an open iteration may hold turns that were made with it")
    ] = Field(None, description="Rollouts of several turns; null: one answer to each prompt.")
    buffer: Annotated[Buffer | None, in_a_branch("an open iteration may have drawn by it")] = Field(
        None, description="Off-policy reuse of trained groups; null: every group is trained once."
    )
    max_concurrency: Annotated[int, ANY_START] = Field(
        64, ge=1, description="Samples in flight per engine, at most."
    )
    admission: Annotated[Literal["fixed", "kv"], ANY_START] = Field(
        "fixed",
        description="How many samples are in flight: `fixed`: max_concurrency; `kv`: as many as the engines' KV caches have room for, and no more than max_concurrency.",
    )
    shards: Annotated[int | None, ANY_START] = Field(
        None,
        ge=1,
        description="Shards that generate and score an iteration, with placement.task_runner=ray; null: one for each node with "
        "engines.",
    )
    part_groups: Annotated[int, ANY_START] = Field(
        16, ge=1, description="Finished groups gathered before a part is written."
    )
    flush_tokens: Annotated[int | None, ANY_START] = Field(
        None,
        ge=16,
        description="Most tokens of an unfinished answer that are generated again after a kill: answers are stored in parts while they are generated, and continue from the last part. null: answers are stored whole. For answers of many thousand tokens; 2048, say.",
    )
    routing_replay: Annotated[bool, in_a_branch("an open iteration may hold samples without experts")] = (
        Field(
            False,
            description="For a mixture of experts: engines return the experts that their routers chose, and the trainer's passes over the policy take the same ones (rollout routing replay, R3).",
        )
    )
    progress_timeout_s: Annotated[float, ANY_START] = Field(
        600,
        gt=0,
        description="A request that yields no token for this long is aborted and retried on another engine. Seconds.",
    )
    attempts: Annotated[int, ANY_START] = Field(
        3, ge=1, description="Tries per sample before it counts as failed."
    )
    max_failed_share: Annotated[float, ANY_START] = Field(
        0.1, ge=0, le=1, description="Share of samples that may fail before the run stops."
    )

    @property
    def longest_response(self) -> int:
        """Most tokens after a prompt, for an answer or a whole dialogue."""
        return self.session.max_tokens if self.session else self.sampling.max_new_tokens

    @property
    def longest_response_field(self) -> str:
        """The field that sets the longest response."""
        return "rollout.session.max_tokens" if self.session else "rollout.sampling.max_new_tokens"
