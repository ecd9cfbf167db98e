"""Counts an iteration's tokens in its stored tables, a batch of rows at a time. Pure: Arrow tables in, an account out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.core.accounts.account import UNVERSIONED, Account, Fate
from millrace.core.contracts.ids import rollout_of
from millrace.core.contracts.turns import place_of_columns, rows_that_count

COLUMNS = {  # columns read from each kind of table
    "rollouts": ["sample_id", "loss_mask", "policy_versions", "status", "samples"],
    "turns": ["rollout_id", "order", "branch", "event", "kind", "output_ids", "policy_versions"],
    "verdicts": ["sample_id", "verdict", "dropped_by", "reused_from"],
    "batch": ["sample_id", "loss_mask", "trained_mask", "policy_versions", "samples", "reused_from"],
}
AT_ONCE = 128  # rows whose tokens are summed at once
SUPERSEDED = "superseded"  # turns whose rollout was run again and made other turns
RETURNED: tuple[Fate, str] = ("returned", "")
NOT_GENERATED: tuple[Fate, str] = ("dropped", "not_generated")  # for failed samples of kept groups
Outcome = tuple[Fate, str]
"""What became of a sample, and what dropped it."""


def account_of(
    rollouts: pa.Table,
    turns: pa.Table,
    verdicts: pa.Table | None = None,
    batch: pa.Table | None = None,
    *,
    cut: pa.Table | None = None,
    carried: pa.Table | None = None,
) -> Account:
    """The account of an iteration. verdicts, batch: None while it is open; all that it generated is then in flight.

    cut: samples of the groups that it deferred, finished ones included. carried: the same of the previous iteration.
    Only policy tokens are counted: no prompts, no observations between turns. A rollout of several turns generated the
    tokens of its turns, even if it failed afterwards. An answer stored by segments generated the tokens of its row, or of
    its segments while it has no row. Tables may have more columns than COLUMNS.
    """
    columns = COLUMNS["rollouts"]
    tables = [rollouts.select(columns)]
    before = _by_sample(carried)
    if cut is not None:
        tables.append(cut.select(columns).filter(_in_no_part(cut, rollouts, before)))
    counting = _Counting(turns.select(COLUMNS["turns"]), verdicts, before)
    return counting.done(pa.concat_tables(tables), batch)


class _Counting:
    def __init__(
        self, turns: pa.Table, verdicts: pa.Table | None, carried: Mapping[str, list[tuple[int, int]]]
    ) -> None:
        """carried: samples that the previous iteration deferred to this one, with the pieces that they have."""
        self._account = Account()
        self._carried = carried
        self._turned = _by_rollout(turns)
        self._whole: set[str] = set()  # samples whose rows hold their segments too
        self._outcomes = None if verdicts is None else self._read(verdicts)
        self._seen: set[str] = set()

    def done(self, rollouts: pa.Table, batch: pa.Table | None) -> Account:
        failed: set[str] = set()
        for rows in rollouts.to_batches(max_chunksize=AT_ONCE):
            failed |= self._samples(rows)
        self._carry()
        self._turns(failed)
        for rows in batch.to_batches(max_chunksize=AT_ONCE) if batch is not None else ():
            self._trained(rows)
        return self._account

    def _read(self, verdicts: pa.Table) -> Mapping[str, Outcome]:
        fresh = verdicts.filter(pc.is_null(verdicts.column("reused_from")))
        columns = [fresh.column(name).to_pylist() for name in ("sample_id", "verdict", "dropped_by")]
        outcomes = {
            sample: _outcome(verdict, dropped_by)
            for sample, verdict, dropped_by in zip(*columns, strict=True)
        }
        self._account.strays += [sample for sample, count in Counter(columns[0]).items() if count > 1]
        return outcomes

    def _outcome_of(self, sample: str) -> Outcome | None:
        """What became of a sample; None without a verdict."""
        return ("in flight", "") if self._outcomes is None else self._outcomes.get(sample)

    def _samples(self, rows: pa.RecordBatch) -> set[str]:
        """Count rows of rollout parts; returns the rollouts that failed. The batch counts trained tokens."""
        account, pieces = self._account, _Pieces(rows)
        samples, status = rows.column("sample_id").to_pylist(), rows.column("status").to_pylist()
        outcomes: list[Outcome | None] = []
        turned = _of_several_turns(rows)
        for at, sample in enumerate(samples):
            outcome = self._outcome_of(sample)
            if outcome is None or sample in self._seen:
                account.strays.append(sample)
                outcome = None  # count a second row of a sample as a row without a verdict
            self._seen.add(sample)
            if not turned[at]:
                self._whole.add(sample)
            outcomes.append(outcome)
            self._take_from_generated(sample, turned[at], status[at], outcome)
            trained = outcome is not None and outcome[0] == "trained"
            if outcome is not None and not trained:
                account.samples[outcome] += 1
            # whether a deferred sample is trained is counted by the iteration that ends it
            if outcome is None or outcome[0] != "deferred":
                account.lengths[trained][pieces.policy[at] if turned[at] else pieces.length[at]] += 1
        for row, version, count, policy in pieces:
            outcome = outcomes[row]
            if not turned[row]:
                account.generated[version] += count
                if outcome is not None and outcome[0] != "trained":
                    account.tokens[(*outcome, version)] += count
            elif outcome is not None and self._outcomes is not None:
                fate, cause = outcome
                # all tokens of a trained sample count as masked until the batch says which are trained
                account.tokens["masked" if fate == "trained" else fate, cause, version] += policy
        failed = zip(samples, status, strict=True)
        return {rollout_of(sample) for sample, each in failed if each == "failed"}

    def _take_from_generated(self, sample: str, turned: bool, status: str, outcome: Outcome | None) -> None:
        """Count a sample as generated, or as carried here without the tokens that it had before."""
        account = self._account
        if sample not in self._carried:
            account.generated_samples += 1
            return
        account.carried_samples += 1
        for version, count in self._carried[sample]:
            # the row of a failed sample has no tokens that could go on with its group
            if status == "failed":
                if outcome is not None:
                    fate = NOT_GENERATED if outcome[0] == "deferred" else outcome
                    account.tokens[(*fate, version)] += count
            elif not turned:
                account.generated[version] -= count

    def _carry(self) -> None:
        """Count what was carried here. Samples without a row are in flight while the iteration is open."""
        for sample, pieces in self._carried.items():
            for version, count in pieces:
                self._account.carried[version] += count
            if sample not in self._seen:
                outcome = self._outcome_of(sample) if self._outcomes is None else None
                if outcome is None:
                    self._account.strays.append(sample)
                    continue
                self._account.carried_samples += 1
                self._account.samples[outcome] += 1
                for version, count in pieces:
                    self._account.tokens[(*outcome, version)] += count

    def _turns(self, failed: set[str]) -> None:
        """Count turns as generated. A turn that is in no sample is also counted by what became of it."""
        account = self._account
        known = {rollout_of(sample) for sample in self._seen} | self._carried.keys()
        for rollout, rows in self._turned.items():
            if rollout in self._whole:
                continue
            counted = {row["order"] for row in rows_that_count(rows, place_of_columns)}
            outcome = None
            if self._outcomes is None:
                outcome = self._outcome_of(rollout)
                if rollout not in known:
                    account.generated_samples += 1
                    account.samples["in flight", ""] += 1
            elif rollout in failed:
                outcome = self._outcome_of(rollout)
            elif self._outcome_of(rollout) == RETURNED and any(row["kind"] == "answer" for row in rows):
                # the answer was ended with its group
                outcome = RETURNED
                account.generated_samples += 1
                account.samples[outcome] += 1
            for row in rows:
                if row["kind"] in ("segment", "answer"):
                    superseded = self._outcomes is not None and row["order"] not in counted
                    fate: Outcome | None = ("dropped", SUPERSEDED) if superseded else outcome
                    for version, tokens in _split(row["policy_versions"], row["length"]):
                        account.generated[version] += tokens
                        if fate is not None:
                            account.tokens[(*fate, version)] += tokens

    def _trained(self, rows: pa.RecordBatch) -> None:
        """Count rows of the batch: what is trained, and what the loss leaves out."""
        account, pieces = self._account, _Pieces(rows)
        turned = _of_several_turns(rows)
        again = [earlier is not None for earlier in rows.column("reused_from").to_pylist()]
        for at, reused in enumerate(again):
            account.again_samples += reused
            account.again_tokens += pieces.policy[at] if reused else 0
            account.samples["trained", ""] += not reused
        for row, version, count, policy in pieces:
            if again[row]:
                continue
            account.tokens["trained", "", version] += policy
            account.tokens["masked", "", version] += -policy if turned[row] else count - policy


class _Pieces:
    """The responses of rows, each cut at changes of the weight version: (row, version, tokens, tokens whose mask is 1)."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        masks = rows.column("loss_mask")
        # a batch has this column if a rollout left tokens out
        if "trained_mask" in rows.schema.names:
            masks = pc.coalesce(rows.column("trained_mask"), masks)
        lengths = masks.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        self._sums = np.concatenate([[0], np.cumsum(masks.flatten().to_numpy(), dtype=np.int64)])
        self._spans: list[list[dict[str, Any]]] = rows.column("policy_versions").to_pylist()
        self._starts: list[int] = starts.tolist()
        self.length: list[int] = lengths.tolist()
        self.policy: list[int] = (self._sums[ends] - self._sums[starts]).tolist()

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        for row, (start, length) in enumerate(zip(self._starts, self.length, strict=True)):
            at = start
            for version, count in _split(self._spans[row], length):
                yield row, version, count, int(self._sums[at + count] - self._sums[at])
                at += count


def _in_no_part(cut: pa.Table, rollouts: pa.Table, before: Mapping[str, Any]) -> pa.ChunkedArray:
    """Rows of a cut that no rollout part has: unfinished answers, and finished ones that a kill kept out of the parts."""
    names = cut.column("sample_id")
    carried = pc.is_in(names, pa.array(before, pa.string()))
    stored = pc.is_in(names, rollouts.column("sample_id").combine_chunks())
    return pc.or_(pc.equal(cut.column("status"), "aborted"), pc.and_not(carried, stored))


def _by_sample(carried: pa.Table | None) -> dict[str, list[tuple[int, int]]]:
    """Version and tokens of each piece of carried samples, by sample. For samples with turns only policy tokens count."""
    found: dict[str, list[tuple[int, int]]] = {}
    for rows in carried.select(COLUMNS["rollouts"]).to_batches() if carried is not None else ():
        samples, turned = rows.column("sample_id").to_pylist(), _of_several_turns(rows)
        found |= {sample: [] for sample in samples}
        for row, version, count, policy in _Pieces(rows):
            found[samples[row]].append((version, policy if turned[row] else count))
    return found


def _by_rollout(turns: pa.Table) -> dict[str, list[dict[str, Any]]]:
    """Rows of turns by rollout, with the length of the generated tokens instead of the tokens."""
    found: dict[str, list[dict[str, Any]]] = {}
    for rows in turns.to_batches():
        lengths = rows.column("output_ids").value_lengths()
        for row in rows.drop_columns(["output_ids"]).append_column("length", lengths).to_pylist():
            found.setdefault(row["rollout_id"], []).append(row)
    return found


def _of_several_turns(rows: pa.RecordBatch) -> list[bool]:
    """For each sample: whether its rollout has turns."""
    return [samples is not None for samples in rows.column("samples").to_pylist()]


def _split(spans: list[dict[str, Any]], length: int) -> Iterator[tuple[int, int]]:
    """Tokens by the weight version that generated them, in order."""
    if not length:
        return
    if not spans:
        yield UNVERSIONED, length
    ends = [span["first_token"] for span in spans[1:]] + [length]
    start = 0
    for span, end in zip(spans, ends, strict=True) if spans else ():
        yield span["version"], end - start
        start = end


def _outcome(verdict: str, dropped_by: str | None) -> Outcome:
    if verdict == "kept":
        return "trained", ""
    if verdict in ("returned", "deferred"):
        return ("deferred" if verdict == "deferred" else "returned"), ""
    assert verdict == "dropped", f"the account does not know the verdict {verdict}"
    return "dropped", dropped_by or ""
