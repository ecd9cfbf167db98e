"""The `model` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from millrace.core.config.parts.section import Section


class Model(Section):
    """The policy that is trained."""

    path: str = Field(description="Hugging Face checkpoint folder: config.json, safetensors, tokenizer.")
    tokenizer: str | None = Field(
        None, description="Folder of the tokenizer; the model's own when not given."
    )
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's own."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the parameters in the trainer's forward pass."
    )
