"""Check the rows of each file of prompts: keys, labels, lengths, and how many cannot be used.

Imports no torch and no transformers.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, cast

from millrace.core.config import RunConfig
from millrace.core.config.evaluation import EvalSet
from millrace.core.config.parts.problems import Problem
from millrace.core.config.reward import RewardFunction
from millrace.core.contracts.rows.chat_options import SAMPLING, TEMPLATE_KWARGS, TOOLS
from millrace.core.contracts.rows.prompts import PromptRow
from millrace.core.errors import MillraceError
from millrace.core.hooks.protocols import RewardInput
from millrace.core.hooks.reward_forms import answer_of, reward_of
from millrace.flows.preflight.check_dialogues import check_dialogues
from millrace.flows.preflight.check_model import ReadModel
from millrace.flows.preflight.check_prompts import rendered
from millrace.flows.preflight.first_rows import CheckedRows


def sources(config: RunConfig) -> list[CheckedRows]:
    """Every source and evaluation set, before reading."""
    training = [CheckedRows(f"data.sources.{source.name}", source) for source in config.data.sources]
    held_out = [
        CheckedRows(f"evaluation.sets.{held_out.name}", held_out) for held_out in config.evaluation.sets
    ]
    return training + held_out


def check_rows(config: RunConfig, rows: CheckedRows, model: ReadModel) -> Iterator[Problem]:
    """Problems of the rows that were read, under the model's template and tokenizer; fills their texts and lengths."""
    limit, training = config.data.max_prompt_tokens, rows.field.startswith("data.")
    yield from rows.set_aside(limit)
    sampling = config.rollout.sampling if training else cast(EvalSet, rows.source).sampling
    yield from rows.refuse_stops(model.tokenizer, skips_special=sampling.skip_special_tokens)
    # last of those that set rows aside: the pictures' tokens stand beside the rows that are left
    if rows.source.images_key and rows.usable:
        yield from rows.see(config, model.tokenizer)
    if not rows.usable:
        return
    yield from _metadata(rows)
    if rows.source.loss_on == "answer":
        yield from _labels(config, rows)
        rows.texts = yield from rendered(rows, model)
    else:
        yield from check_dialogues(rows, model)
    if model.tokenizer is not None and rows.texts:
        rows.measure(model.tokenizer, limit)
        if len(rows.too_long) == len(rows.lengths):
            yield Problem(
                "data.max_prompt_tokens",
                limit,
                f"each of the first {len(rows.lengths)} prompts of {rows.origin} is longer, the shortest "
                f"{min(rows.lengths)} tokens",
                f"set it to {max(rows.lengths)} or more",
            )
            return
    bad, share = len(rows.unusable), config.data.max_quarantined_share
    if training and rows.complete and bad > share * rows.total:
        first = rows.unusable[0]
        yield Problem(
            rows.place,
            rows.origin,
            f"{bad} of its {rows.total} rows cannot be used, and data.max_quarantined_share is {share:g}; "
            f"the first is row {first.row}: {first.reason}",
            "correct the rows or the keys of the source, or raise data.max_quarantined_share",
        )


def _labels(config: RunConfig, rows: CheckedRows) -> Iterator[Problem]:
    key = rows.source.label_key
    labels = [row.label for row in rows.usable]
    missing = all(label is None for label in labels)
    field, path = f"{rows.field}.label_key", rows.origin
    reward = rows.source.reward or config.reward
    if rows.source.label_from_prompt and missing:
        yield Problem(
            f"{rows.field}.label_from_prompt",
            True,
            f"none of the first {len(labels)} prompts of {path} ends in a text of the assistant",
            "set it to false, and label_key to the key that holds the reference answer",
        )
    elif key not in (None, "label") and missing:
        yield Problem(
            field,
            key,
            f"none of the first {len(labels)} rows of {path} has it",
            "set it to the key that holds the reference answer, or to null for rewards that need none",
        )
    elif config.algorithm.supervised and key is not None and rows.field.startswith("data."):
        wrong = next((row for row in rows.usable if not isinstance(row.label, str) or not row.label), None)
        if wrong is not None:
            yield Problem(
                field,
                key,
                f"algorithm.loss=sft trains text, and row {wrong.row} of {path} has {_kind(wrong.label)} there",
                "set it to the key that holds the reference answer as text, or correct the row",
            )
    elif missing and not _may_score_itself(config) and _reads_label(reward, rows.usable[0]):
        yield Problem(
            field,
            key,
            f"{reward.function} compares with the label, and none of the first {len(labels)} rows of "
            f"{path} has one",
            "set it to the key that holds the reference answer, or take another reward.function",
        )


def _may_score_itself(config: RunConfig) -> bool:
    """Whether a rollout's own code may give it a reward, so that none is called."""
    session = config.rollout.session
    return session is not None and bool(session.function or session.environment or session.named)


def _kind(label: Any) -> str:
    return "no text" if label in (None, "") else f"a {type(label).__name__}"


def _metadata(rows: CheckedRows) -> Iterator[Problem]:
    """Keys of metadata that no row has; a default key may be missing."""
    source, count = rows.source, len(rows.usable)
    absent = f"none of the first {count} rows of {rows.origin} has it"
    remedy = "correct it; a part of a column is dotted, as in extra_info.index"
    extra = {*source.extra_keys, TOOLS, TEMPLATE_KWARGS, SAMPLING}
    for name, key, held in (
        ("tools_key", source.tools_key, TOOLS),
        ("chat_template_kwargs_key", source.chat_template_kwargs_key, TEMPLATE_KWARGS),
        ("sampling_key", source.sampling_key, SAMPLING),
    ):
        if key and not any(row.metadata.get(held) for row in rows.usable):
            yield Problem(f"{rows.field}.{name}", key, absent, "correct it, or set it to null")
    if source.metadata_key not in (None, "metadata") and all(
        row.metadata.keys() <= extra for row in rows.usable
    ):
        yield Problem(f"{rows.field}.metadata_key", source.metadata_key, absent, remedy)
    for key in source.extra_keys:
        if all(key not in row.metadata for row in rows.usable):
            yield Problem(f"{rows.field}.extra_keys", key, absent, remedy)


def unknown_names(
    rows: CheckedRows, unknown: Sequence[tuple[PromptRow, str]], what: str, remedy: str
) -> Iterator[Problem]:
    """Rows whose metadata name something that the configuration does not have, with the reason. what: the kind of name."""
    if unknown:
        row, reason = unknown[0]
        yield Problem(
            rows.place,
            rows.origin,
            f"{len(unknown)} of the first {len(rows.usable)} rows name no {what}; the first is row {row.row}: {reason}",
            remedy,
        )


class _Watched(RewardInput):
    """A sample that records whether its label was read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "label":
            object.__setattr__(self, "label_was_read", True)
        return object.__getattribute__(self, name)


def _reads_label(reward: RewardFunction, row: PromptRow) -> bool:
    """Whether a reward that ships with millrace reads the label; False for a user's reward, which is not called."""
    if reward.group or not reward.function.startswith("millrace.core.rewards."):
        return False
    values: dict[str, Any] = {
        "prompt": row.prompt,
        "response": "",
        "metadata": row.metadata,
        "status": "completed",
    }
    sample = _Watched(
        **{field.name: values[field.name] for field in fields(RewardInput) if field.name in values}
    )
    with contextlib.suppress(MillraceError, ValueError, TypeError, LookupError, AttributeError):
        answer_of(reward_of(reward.function, reward.options), sample)
    return getattr(sample, "label_was_read", False)
