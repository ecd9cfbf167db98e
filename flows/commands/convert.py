"""`millrace convert`: a checkpoint between Hugging Face's form and torch_dist."""

from typing import Annotated

import typer

from millrace.connectors.trainers.megatron.conversion.conversion import Conversion
from millrace.connectors.trainers.megatron.conversion.sources import Form
from millrace.flows.commands.terminal import guarded, lines_before_prefect, print_lines
from millrace.flows.driver.conversion_order import DType, order_of


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder or name, or torch_dist folder: a run's checkpoints/NNNNNN, or one of Megatron-LM or slime."
        ),
    ],
    target: Annotated[str, typer.Argument(help="New folder; one that was not finished goes on.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Hugging Face folder that describes a torch_dist source; a run's checkpoint has the run's. With --merge the model's; by default as the adapters name it."
        ),
    ] = None,
    to: Annotated[Form | None, typer.Option(help="Form of the target; by default the other one.")] = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Type of all weights; by default as they are stored.")
    ] = None,
    file_gib: Annotated[float, typer.Option(help="Size of a weight file, about.")] = 4.0,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="The source is a folder of adapters: add them to the weights that they belong to."
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read both back and compare them bit for bit.")
    ] = False,
) -> None:
    """Convert a checkpoint between Hugging Face's form and torch_dist, file by file; the same command goes on after a kill."""

    def done() -> list[str]:
        with lines_before_prefect():
            conversion = Conversion(order_of(source, target, model, to, dtype, file_gib, merge))
            lines = [f"{target}: {conversion.convert().line}"]
            if verify:
                conversion.verify()
                lines.append(f"{target}: equal to {source}, bit for bit")
            return lines

    print_lines(guarded(done))
