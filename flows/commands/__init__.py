"""The `millrace` command line, a module a command. Commands parse, print and leave.

A command's module is imported when the command is typed, so that `millrace --help` and a wrong name are answered at once.
"""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from millrace.connectors.host.local_files import keep_private
from millrace.connectors.host.own_addresses import reach_own_directly
from millrace.core.plain_text import take_any_text
from millrace.flows.commands.terminal import CommandLine

# in the order of the help, with the first line of each command's own
COMMANDS = {
    "new": "Make a folder to start from: run.yaml, rewards.py and rows of data.",
    "train": "Train a run, or resume it: the same name resumes.",
    "check": "Resolve a configuration, check everything it names, and print the plan.",
    "quickstart": "Build a tiny model, warm it up, train it by GRPO on arithmetic, and show what it has learnt.",
    "pretrained": "Make a Hugging Face folder of SmolLM2-135M-Instruct, a pretrained chat model. Its weights are dequantised from 4 bits.",
    "models": "List the presets of model.preset: parameters, GPUs and memory. With a name, its layouts and notes.",
    "convert": "Convert a checkpoint between Hugging Face's form and torch_dist, file by file; the same command goes on after a kill.",
    "runs": "List the runs under a storage root.",
    "show": "Show a run: its folder and pages, and its iterations with the evaluations by set; 0 is before training.",
    "ledger": "Account for every token that a run generated; exits with 1 if an iteration's account does not close.",
    "verify": "Check every hash, the ledger and the lineage of a run again; exits with 1 if anything is wrong.",
    "replay": "Repeat stored steps from stored batches and compare metrics and weights; exits with 1 if they differ.",
    "sql": "Ask DuckDB about a run: views prompts, samples, turns, rewards, verdicts, batches, steps, evaluations, metrics.",
    "view": "Serve a page on loopback that shows a run: its samples and tokens, what was trained on them, why groups were dropped.",
    "top": "Watch a run in the terminal: its state, the open iterations, the newest figures and answers. Ctrl-C ends it.",
    "chat": "Talk with stored weights on this machine's CPU: answers as they come, with the run's tools, two checkpoints beside each other.",
    "plan": "Predict an iteration's time on shared and on split GPUs, synchronous and asynchronous, from a run's recorded times.",
    "score": "Score the rows of a file with a reward; print mean, distribution and failures. Exit code 1: no row could be scored.",
    "branch": "Start a new run from any checkpointed iteration of another.",
    "discard": "Discard an iteration that is not committed: its groups are drawn again, and its files are moved aside.",
    "stop": "End a run on this host, as Ctrl-C does, or the processes that a killed run left. Files stay; train resumes it.",
    "server": "Start (or find) the local Prefect server; or stop it, MLflow's, and the local Ray head with every actor on it.",
    "ui": "Start (or find) the Prefect and MLflow servers, and print the addresses of their pages.",
    "deploy": "Create Prefect deployments of the files, and of the flows for any run; a worker runs them from this folder.",
    "eval": "Answer held-out sets with stored weights; print reward, interval, pass@k and the majority.",
}


def command_of(name: str) -> Any:
    """A command with its options: the function of its name in its module."""
    module = import_module(f"millrace.flows.commands.{name}")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name)(getattr(module, "evaluate" if name == "eval" else name))
    return typer.main.get_command(single)


class _Commands(TyperGroup):
    """The help needs names and lines alone; a command that is typed is imported."""

    def __init__(self, **options: Any) -> None:
        listed = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}
        super().__init__(**{**options, "commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and command_of(name), rest


app = CommandLine(
    cls=_Commands,
    help="LLM reinforcement-learning post-training as resumable Prefect flows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _process() -> None:
    keep_private()
    take_any_text()
    reach_own_directly()
