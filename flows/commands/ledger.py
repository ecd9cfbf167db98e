"""`millrace ledger`: what became of every token that a run generated, from its stored tables alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.progress import track

from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.run_folder import RunFolder, open_iterations
from millrace.core.accounts.account import FATES, Account
from millrace.core.config import RunConfig
from millrace.core.contracts.ids import iteration_number
from millrace.core.errors import ConfigError, StorageError, of_run
from millrace.core.plain_text import PlainConsole
from millrace.flows.commands.listing import (
    NEWEST,
    CsvOption,
    JsonOption,
    Listing,
    NewestOption,
    print_listing,
)
from millrace.flows.commands.terminal import RootOption, errors, guarded
from millrace.flows.driver.stored_run import run_record, settings_of
from millrace.tasks.batching.credited import open_account, stored_account

COLUMNS = ("iteration", "samples", "generated", "carried", *FATES, "trained_again", "closes")
PARTS = ("fate", "dropped_by", "version", "tokens")  # columns of one iteration's listing


def ledger(
    run: str,
    at: Annotated[
        int | None, typer.Option(help="Show only this iteration, by cause and weight version.")
    ] = None,
    root: RootOption = "runs",
    newest: NewestOption = NEWEST,
    json: JsonOption = False,
    csv: CsvOption = False,
) -> None:
    """Account for every token that a run generated; exits with 1 if an iteration's account does not close."""
    accounts = guarded(lambda: accounts_of_run(root, run, at))
    print_listing(accounts.listing, json, csv, newest)
    for problem in accounts.problems:
        errors.print(problem, soft_wrap=True)
    raise SystemExit(1 if accounts.problems else 0)


@dataclass(frozen=True)
class Accounts:
    """Accounts as a listing, and the reasons why any does not close."""

    listing: Listing
    problems: list[str]


def accounts_of_run(root: str, run: str, at: int | None = None) -> Accounts:
    """The accounts of all iterations, a row each; or with `at` that iteration's, a row for each fate, cause and version.

    Iterations count from 1. Errors: StorageError if there is no such run or iteration; ConfigError for a supervised run.
    """
    record, folder = run_record(root, run), RunFolder(root, run)
    if RunConfig.model_validate(settings_of(record)).algorithm.supervised:
        raise ConfigError(
            "a supervised run generates nothing, so that there is nothing to account for",
            where=folder.store.url,
            remedy=f"`millrace show {of_run(run, folder.store.url)}` lists what it trained",
        )
    committed = folder.first_open_iteration()
    indices = [*range(committed), *open_iterations(folder)]
    if at is not None:
        if at - 1 not in indices:
            raise StorageError(
                f"has {len(indices)} iterations",
                where=folder.store.url,
                remedy=f"ask for 1 <= at <= {len(indices)}",
            )
        account = _account(folder, at - 1, committed)
        rows: list[Sequence[Any]] = [[row[name] for name in PARTS] for row in account.rows()]
        return Accounts(Listing(PARTS, rows, _facts(account)), account.problems())
    total, lines, problems = Account(), [], []
    shown = PlainConsole(stderr=True)  # on stderr, since the listing may be piped
    for index in track(indices, description=f"reading {run}", transient=True, console=shown):
        account = _account(folder, index, committed)
        lines.append(_row(index, account))
        problems += [f"iteration {iteration_number(index)}: {problem}" for problem in account.problems()]
        total.add(account)
    return Accounts(Listing(COLUMNS, lines, _facts(total)), problems)


def _account(folder: RunFolder, index: int, committed: int) -> Account:
    files = IterationFiles(folder, index)
    return stored_account(files) if index < committed else open_account(files)


def _row(index: int, account: Account) -> Sequence[Any]:
    fates = [account.tokens_of(fate) for fate in FATES]
    generated = sum(account.generated.values())
    closes = "no" if account.problems() else "yes"
    return [
        iteration_number(index),
        account.generated_samples,
        generated,
        sum(account.carried.values()),
        *fates,
        account.again_tokens,
        closes,
    ]


def _facts(account: Account) -> dict[str, str]:
    """Totals over the listed accounts."""
    facts = {"generated": _amount(sum(account.generated.values()), account.generated_samples)}
    if account.carried_samples:
        facts["carried"] = _amount(sum(account.carried.values()), account.carried_samples)
    for fate in FATES:
        facts[fate] = _amount(account.tokens_of(fate), account.samples_of(fate))
    if account.dropped_tokens():
        facts["dropped by"] = _counts(account.dropped_tokens())
    for trained, name in ((True, "lengths of trained samples"), (False, "lengths of others")):
        found = account.quantiles(trained)
        if found:
            facts[name] = ", ".join(f"{quantile} {value:.0f}" for quantile, value in found.items())
    if account.again_samples:
        facts["trained again"] = _amount(account.again_tokens, account.again_samples)
    return facts


def _amount(tokens: int, samples: int) -> str:
    return f"{tokens:,} tokens" + (f" in {samples:,} samples" if samples else "")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{cause or 'unknown'} {count:,}" for cause, count in counts.items())
