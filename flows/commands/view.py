"""`millrace view`: a page on loopback that shows a run's samples, groups, tokens and where they went; or one file of it."""

from pathlib import Path
from typing import Annotated

import typer

from millrace.connectors.host.local_files import write_whole
from millrace.connectors.prefect.server import login_file
from millrace.core.errors import ConfigError
from millrace.flows.commands.terminal import RootOption, guarded, print_lines
from millrace.flows.viewer.answers import Viewer
from millrace.flows.viewer.app import opened, serve
from millrace.flows.viewer.export import exported


def view(
    run: str,
    root: RootOption = "runs",
    follow: Annotated[bool, typer.Option("--follow", help="Show what is committed as it comes.")] = False,
    port: Annotated[
        int | None, typer.Option(help="Port on loopback; 4300 or a free one when not given.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write one HTML file that opens anywhere, and serve nothing.")
    ] = None,
    at: Annotated[int | None, typer.Option(min=1, help="With --export: the iteration, not the run.")] = None,
    group: Annotated[str | None, typer.Option(help="With --export and --at: the group of this id.")] = None,
    sample: Annotated[str | None, typer.Option(help="With --export and --at: the sample of this id.")] = None,
) -> None:
    """Serve a page on loopback that shows a run: its samples and tokens, what was trained on them, why groups were dropped."""
    if export is not None:
        guarded(lambda: _write(root, run, export, at, group, sample))
        print_lines([f"wrote {export}"])
        return
    if at is not None or group or sample:
        raise typer.BadParameter(
            "--at, --group and --sample go with --export; the page has an address for each"
        )
    viewer = guarded(lambda: Viewer(root, run, follow))
    listener = guarded(lambda: opened(port))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/{run}"
    login = guarded(login_file)
    print_lines(
        [
            f"View  {address} (user millrace; its password is what follows the colon in {login})",
            "Ctrl-C ends it",
        ]
    )
    serve(viewer, login.read_text(), listener)


def _write(root: str, run: str, file: Path, at: int | None, group: str | None, sample: str | None) -> None:
    content = exported(Viewer(root, run), at, group, sample)
    try:
        write_whole(file, [content])
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", where=f"--export {file}", remedy="name another"
        ) from error
