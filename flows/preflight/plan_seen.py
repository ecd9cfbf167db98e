"""Lines of the plan about what the checks found: the stored run, the data, a prompt in its final form, the rewards' answers."""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.connectors.huggingface.response_templates import family_for
from millrace.core.config import RunConfig
from millrace.core.config.data import Source
from millrace.core.config.evaluation import EvalSet
from millrace.core.contracts.ids import iteration_number
from millrace.core.families.config_file import undeclared_keys
from millrace.core.logprob_gap import MULTIPLE
from millrace.core.rewards.trial import Trial
from millrace.flows.preflight.check import Checked
from millrace.flows.preflight.check_dialogues import trained_tokens
from millrace.flows.preflight.check_model import ReadModel, ends_text
from millrace.flows.preflight.check_run import StoredRun
from millrace.flows.preflight.first_rows import CheckedRows

Line = tuple[str, str]
MARKS = ("⟦", "⟧")  # marks around trained text
LONGEST_TEXT = 2_000  # characters that are shown of a prompt
EXCERPT = 80  # characters that are shown of a reward's text


def run_in_storage(config: RunConfig, run: StoredRun) -> Line:
    """Whether the run exists, and the iteration at which a start resumes."""
    wanted = config.run.iterations
    if not run.exists:
        return "run", f"new; {wanted} iterations"
    if run.committed >= wanted:
        return "run", f"exists, complete: {run.committed} iterations; raise run.iterations to train more"
    if run.branch_of:
        text = f"a branch of {run.branch_of}, not started yet"
    else:
        text = f"exists, {run.committed} of {wanted} iterations complete"
    text += f"; goes on with iteration {iteration_number(run.committed)} of {wanted}"
    text += f" from checkpoint {run.checkpoint}" if run.checkpoint else " from the initial weights"
    again = range(run.checkpoint, run.committed)
    if again:
        first, last = again[0], again[-1]
        which = (
            f"iteration {iteration_number(first)} is"
            if first == last
            else f"iterations {iteration_number(first)} to {iteration_number(last)} are"
        )
        text += f"; {which} trained again from the stored batches"
    return "run", text


def run_folder(found: Checked) -> Iterator[Line]:
    """The run's folder, if the shell is in another folder than the file: data are relative to the file, runs to the shell."""
    root, file = found.config.storage.root, found.file
    if file is None or "://" in root or os.path.isabs(root):
        return
    beside = file.absolute().parent
    if os.path.realpath(beside) == os.path.realpath(os.getcwd()):
        return
    yield (
        "run folder",
        f"{os.path.abspath(os.path.join(root, found.config.run.name))}: storage.root means the folder of the shell",
    )
    if other := _run_beside(found, beside):
        yield "", other


def run_elsewhere(found: Checked) -> str | None:
    """A warning if the run is new here, but a run of its name lies beside the file."""
    text = [text for name, text in run_folder(found) if not name]
    return text[0] if text else None


def _run_beside(found: Checked, folder: Path) -> str | None:
    if found.run.exists:
        return None
    root = folder / found.config.storage.root
    if not (root / found.config.run.name / "run.json").exists():
        return None
    return f"WARNING: run {found.config.run.name} exists beside the file, in {root}, and a start from here starts another. To resume it: storage.root={shlex.quote(str(root))}"


def weights(found: Checked) -> Iterator[Line]:
    """The type of the stored weights, and the type in which they are trained, served and exported."""
    stored, used = found.model.stored, found.located.dtype
    if not stored:
        return
    because = ""
    if found.config.model.dtype == "auto" and stored != used:
        kept = "the run began so" if found.run.dtype else "model.dtype: auto is float32 on a CPU"
        because = f" ({kept})"
    yield "weights", f"stored in {stored}; trained, served and exported in {used}{because}"


def keys_that_change_nothing(found: Checked) -> Iterator[Line]:
    """Keys of the model's config.json that its family does not have."""
    try:
        named = undeclared_keys(json.loads((Path(found.located.model.path) / "config.json").read_text()))
    except OSError:
        # run.prepare makes the model
        return
    if named:
        yield (
            "config.json",
            f"keys that the model's class does not have, and that change nothing: {', '.join(named)}",
        )


def comparison(config: RunConfig) -> Iterator[Line]:
    """The limit on the difference of engine and trainer before an iteration's first update."""
    limit = config.sync.max_logprob_gap
    if not config.generates:
        return
    if limit == "auto":
        text = f"engine and trainer may differ by {MULTIPLE:g} times what rounding makes of the model, measured at the run's first step"
    else:
        text = f"engine and trainer may differ by {limit:g} nats a token (sync.max_logprob_gap)"
    yield "log-probs", text


def data(found: Checked) -> Iterator[Line]:
    """A line for each source and each held-out set."""
    weights = sum(rows.source.weight for rows in found.training if isinstance(rows.source, Source))
    for rows in found.data:
        source = rows.source
        if isinstance(source, Source):
            share = f", {source.weight / weights:.3g} of the prompts" if len(found.training) > 1 else ""
            yield (
                f"data {source.name}",
                f"{rows.origin}: {_rows(rows)}{share}{_epoch(found, rows, weights)}{_unusable(rows)}",
            )
        else:
            text = f"{rows.origin}: {_rows(rows)}{_unusable(rows)}"
            if isinstance(source, EvalSet) and not found.config.algorithm.supervised:
                text += f"; {_answers(found.config, source)}"
            yield f"evaluation {source.name}", text
    for rows in found.absent:
        maker = found.config.run.prepare.function if found.config.run.prepare else ""
        yield rows.place, f"{rows.origin} is not there: the start fails unless run.prepare ({maker}) makes it"


def _answers(config: RunConfig, held_out: EvalSet) -> str:
    """How a held-out set is answered, and whether its answers are cut sooner than the rollout's."""
    sampling, rollout = held_out.sampling, config.rollout.sampling
    how = "greedily" if sampling.temperature == 0 else f"at temperature {sampling.temperature:g}"
    text = f"answered {how}, {held_out.samples_per_prompt} a prompt, at most {sampling.max_new_tokens} tokens"
    if sampling.max_new_tokens < rollout.max_new_tokens:
        text += (
            f" (the rollout's are at most {rollout.max_new_tokens}: longer answers count as cut ones here)"
        )
    return text


def _rows(rows: CheckedRows) -> str:
    if rows.whole:
        return f"{rows.total:,} rows"
    return f"about {rows.total:,} rows, of which the first {rows.seen:,} were read"


def _epoch(found: Checked, rows: CheckedRows, weights: float) -> str:
    assert isinstance(rows.source, Source)
    usable = rows.total - len(rows.unusable) if rows.complete else rows.total
    drawn = found.config.rollout.prompts * rows.source.weight / weights
    about = "" if rows.whole else "about "
    return f", an epoch of them is {about}{_whole(usable / drawn)} iterations"


def _whole(number: float) -> str:
    """A number of iterations with three digits, never in exponent form."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _unusable(rows: CheckedRows) -> str:
    bad = rows.unusable
    if not bad:
        return "; all usable" if rows.complete else "; none of them unusable"
    first = bad[0]
    return f"; {len(bad):,} unusable, the first is row {first.row} (from 0): {first.reason}"


def prompt(found: Checked) -> Iterator[Line]:
    """The first prompt in its final form, its tokens and its label."""
    rows = next((rows for rows in found.training if rows.texts), None)
    if rows is None:
        return
    if rows.pieces:
        yield "a dialogue", _dialogue(rows, found.model.tokenizer)
        return
    row, text = rows.usable[0], rows.texts[0]
    tokens = f", {rows.lengths[0]} tokens" if rows.lengths else ""
    yield (
        "a prompt",
        f"row {row.row} of {row.source}{tokens}, label {row.label!r}. The text that is sent:\n{_cut(text)}",
    )


def _dialogue(rows: CheckedRows, tokenizer: Any) -> str:
    """The first dialogue, with marks around trained text, and the trained share of the first dialogues."""
    number, pieces = next(iter(rows.pieces.items()))
    text = "".join(f"{MARKS[0]}{piece.text}{MARKS[1]}" if piece.trained else piece.text for piece in pieces)
    counted = ""
    if rows.lengths:
        trained = [trained_tokens(each, tokenizer) for each in rows.pieces.values()]
        counted = (
            f", {rows.lengths[0]} tokens, {trained[0]} of them trained; of the first {len(trained)} dialogues "
            f"{sum(trained)} of {sum(rows.lengths)} tokens"
        )
    where = f"row {number} of {rows.source.name}{counted}"
    return f"{where}. Trained text is between {MARKS[0]} and {MARKS[1]}:\n{_cut(text)}"


def _cut(text: str) -> str:
    more = len(text) - LONGEST_TEXT
    return f"{text[:LONGEST_TEXT]} ... and {more} more characters" if more > 0 else text


def answer(found: Checked) -> Iterator[Line]:
    """How an answer ends, if the model's files do not name every end token."""
    if text := ends_text(found.config, found.model):
        yield "an answer ends", text


def unverified(found: Checked) -> Iterator[Line]:
    """What is not checked of a model whose family is not known here."""
    model = found.model.unknown
    if model is not None:
        yield (
            "not verified",
            f"the family {model.family} is not one of docs/models.md: its memory, whether its files are whole, whether SGLang serves it "
            "and takes its weights. The first step compares engine and trainer",
        )


def session(found: Checked) -> Iterator[Line]:
    """How a rollout of several turns continues."""
    settings = found.config.rollout.session
    if settings is None:
        return
    made = settings.function or settings.environment
    by = f"by {made.function}" if made else "by calls of tools until a turn calls none"
    names = [tool["function"]["name"] for tool in found.model.tools]
    tools = f", with the tools {', '.join(names)}" if names else ""
    tools += _form_of_calls(found.model) if names else ""
    yield (
        "a rollout",
        f"{by}{tools}; at most {settings.max_turns} turns and {settings.max_tokens} tokens; in {settings.workers} "
        f"process{'es' if settings.workers > 1 else ''}, up to {settings.max_rollouts} at once",
    )


def _form_of_calls(model: ReadModel) -> str:
    """The form in which the model's calls of tools are parsed."""
    if model.reads_answers:
        return " (calls are read by the tokenizer's own response_template)"
    family = family_for(model.template.text) if model.template else None
    return f" (calls are read in the form of {family})" if family else ""


def reward(found: Checked) -> Iterator[Line]:
    """Each reward's answers on the first row that it scores."""
    for answers in found.rewards:
        if answers.row is None:
            continue
        given = [f"{_number(answer)} for {name} as response" for name, answer in answers.given.items()]
        yield (
            "reward",
            f"{answers.function} gives on row {answers.row.row} of {answers.row.source}: {'; '.join(given)}",
        )


def _number(answer: Trial | str) -> str:
    if isinstance(answer, str):
        return answer
    parts = [
        f"{name} {_excerpt(value)}" if isinstance(value, str) else f"{name} {value:g}"
        for name, value in answer["parts"].items()
    ]
    if answer["answer"] is not None:
        parts.insert(0, f"found {_excerpt(answer['answer'])}" if answer["answer"] else "found no answer")
    return f"{answer['reward']:g}" + (f" ({', '.join(parts)})" if parts else "")


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}...")
