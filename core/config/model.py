"""The `model` section."""

from typing import Annotated, Literal

from pydantic import Field

from millrace.core.config.parts.restart import ANY_START, fixed
from millrace.core.config.parts.section import READS, Reads, Section

BEGAN = "the run's weights started as this model's"
TOKENS = "it decides which prompts fit data.max_prompt_tokens, and epochs are drawn from those"


class Model(Section):
    """The policy that is trained."""

    path: Annotated[str, fixed(BEGAN, moves=True), Reads(or_name=True)] = Field(
        description="Hugging Face checkpoint folder (config.json, safetensors, tokenizer), or the name of a model there, as in "
        "Qwen/Qwen3-0.6B, which is downloaded into Hugging Face's cache."
    )
    preset: Annotated[str | None, ANY_START] = Field(
        None,
        description="Published model that the checkpoint is, as `millrace models` lists them. It sets the fields whose default is the preset's: "
        "how the model is split over trainer.world_size GPUs.",
    )
    revision: Annotated[str | None, fixed(BEGAN)] = Field(
        None,
        description="Branch, tag or commit of a model that is named. The run keeps the commit of its first start.",
    )
    tokenizer: Annotated[str | None, fixed(TOKENS, moves=True), READS] = Field(
        None, description="Folder of the tokenizer; the model's own when not given."
    )
    chat_template: Annotated[str | None, fixed(TOKENS, moves=True), READS] = Field(
        None, description="File with a Jinja chat template that replaces the tokenizer's own."
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        fixed("checkpoints hold it; a new run can start from an export of this one"),
    ] = Field(
        "auto",
        description="Type of the weights in the trainer's forward pass, in engines, on the way to them, and in exports, whose "
        "config.json names it. auto: the type that the checkpoint is stored in if the trainer has GPUs, float32 on a CPU. The run keeps the type of its first start.",
    )
