"""The `millrace` command line, a module a group of commands. Commands parse, print and leave.

Heavy imports happen inside commands, so that a wrong configuration is answered at once.
"""

from __future__ import annotations

from millrace.connectors.host.local_files import keep_private
from millrace.connectors.host.own_addresses import reach_own_directly
from millrace.core.plain_text import take_any_text
from millrace.flows.commands import evaluate, look, run, score, server, start, tools
from millrace.flows.commands.terminal import CommandLine

app = CommandLine(
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


for command in (
    *(start.new, run.train, run.check, run.quickstart, start.pretrained),
    *(
        look.runs,
        look.show,
        look.ledger,
        tools.verify,
        tools.replay,
        look.sql,
        look.plan,
        score.score,
        tools.branch,
        tools.discard,
        tools.stop,
    ),
    *(server.server, server.ui, server.deploy),
):
    app.command()(command)
app.command("eval")(evaluate.evaluate)
