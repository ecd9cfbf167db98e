"""The columns of the views of `millrace sql`: the stored tables' columns, with prompts and labels as text.

Owns the differences from the tables (docs/tables.md has every column): text instead of JSON, the system message that was sent,
iterations counted from 1, and whether the iteration is committed.
"""

from __future__ import annotations

from typing import Any

# Text of a prompt: a plain text or a single user message unchanged, else its messages without a leading system message.
MACROS = """
CREATE MACRO its_system(x) AS CASE WHEN json_type(x) = 'ARRAY' AND x->>'$[0].role' = 'system' THEN x->>'$[0].content' END;
CREATE MACRO its_messages(x) AS CASE WHEN its_system(x) IS NULL THEN from_json(x, '["JSON"]')
  ELSE from_json(x, '["JSON"]')[2:] END;
CREATE MACRO message_text(m) AS coalesce(m->>'content', m->>'tool_calls', '');
CREATE MACRO messages_text(them) AS CASE WHEN len(them) = 1 AND them[1]->>'role' = 'user' THEN message_text(them[1])
  ELSE list_aggregate(list_transform(them, lambda m: (m->>'role') || ': ' || message_text(m)), 'string_agg', chr(10)) END;
CREATE MACRO prompt_text(x) AS CASE WHEN json_type(x) = 'ARRAY' THEN messages_text(its_messages(x)) ELSE x->>'$' END;
"""
WITH_PROMPT = {"prompts": "source", "samples": "source", "batches": "source", "evaluations": "set"}
REUSING = ("verdicts", "batches")  # name the iteration that generated a reused sample
DONE = r"""CAST(regexp_extract(filename, '(\d+)\.parquet$', 1) AS INTEGER)"""


def columns_of(view: str, settings: dict[str, Any], committed: int) -> str:
    """The columns that a view selects. settings: the run's configuration. committed: number of committed iterations."""
    changed, added = [], []
    if view in WITH_PROMPT:
        changed += ["prompt_text(prompt) AS prompt", "label->>'$' AS label"]
        added += [f"{_system(view, settings)} AS system", "prompt AS messages"]
    if view in REUSING:
        changed.append("reused_from + 1 AS reused_from")
    if view == "evaluations":
        added.append(f"{DONE} AS iteration")
    elif view in WITH_PROMPT:
        changed.append("iteration + 1 AS iteration")
        added.append(f"iteration < {committed} AS committed")
    replaced = f" REPLACE ({', '.join(changed)})" if changed else ""
    return ", ".join([f"* EXCLUDE (filename){replaced}", *added])


def quoted(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def _system(view: str, settings: dict[str, Any]) -> str:
    """The system message that a row's prompt was sent with: its own, else that of its source or set."""
    section = settings["evaluation"]["sets"] if view == "evaluations" else settings["data"]["sources"]
    given = {item["name"]: item["system"] for item in section if item.get("system")}
    cases = " ".join(f"WHEN {quoted(name)} THEN {quoted(text)}" for name, text in given.items())
    column = f'"{WITH_PROMPT[view]}"'
    return f"coalesce(its_system(prompt), CASE {column} {cases} END)" if cases else "its_system(prompt)"
