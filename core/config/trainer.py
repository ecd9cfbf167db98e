"""The `trainer` section."""

from typing import Annotated, Any, Literal

from pydantic import Field

from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, FROM_PRESET
from millrace.core.config.parts.restart import ANY_START, fixed, in_a_branch
from millrace.core.config.parts.section import READS, Section
from millrace.core.families.adapters import USUAL

ALGORITHM = "one run has one algorithm"
CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"  # package.module:Class


class Parallel(Section):
    """How the model is split over the trainer's ranks; data parallel size is what remains."""

    model_config = EMPTY_IN_FORMS

    tensor: Annotated[int, FROM_PRESET] = Field(1, ge=1, description="Tensor parallel size (tp).")
    pipeline: Annotated[int, FROM_PRESET] = Field(1, ge=1, description="Pipeline parallel size (pp).")
    virtual: int = Field(
        1,
        ge=1,
        description="Virtual stages (vpp): parts of the model that each rank of a pipeline holds, so that ranks wait less for each other.",
    )
    context: int = Field(1, ge=1, description="Context parallel size (cp).")
    replicate: int = Field(
        1,
        ge=1,
        description="Copies of the weights and of the optimizer's state (HSDP; the mesh's `replicate`), with trainer.kind=fsdp: each "
        "is cut over world_size / replicate ranks, and gradients are summed over copies too.",
    )
    expert: Annotated[int, FROM_PRESET] = Field(1, ge=1, description="Expert parallel size (ep).")
    expert_tensor: int | None = Field(
        None,
        ge=1,
        description="Tensor parallel size of experts (etp); when not given 1 with expert parallelism, else as tensor.",
    )
    sequence: Annotated[bool, FROM_PRESET] = Field(
        False, description="Sequence parallelism (sp) within tensor parallel groups."
    )

    @property
    def tensor_of_experts(self) -> int:
        """Tensor parallel size of experts."""
        return self.expert_tensor or (1 if self.expert > 1 else self.tensor)


class Optimizer(Section):
    """AdamW and gradient clipping."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.98), description="Adam's decay rates.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Largest gradient norm; 0 does not clip.")
    distributed: Annotated[bool, fixed("checkpoints hold the optimizer in its form")] = Field(
        True, description="Shard optimizer state over data parallel ranks."
    )
    offload: Annotated[float, ANY_START] = Field(
        0.0,
        ge=0,
        le=1,
        description="Fraction of the parameters whose optimizer state and fp32 weights are in the host's memory, also while they are "
        "stepped: by AdamW on the CPU, with gradients on their way to it and weights on their way back meanwhile. A rank "
        "takes 12 bytes a parameter less of GPU memory, or 8 with trainer.kind=fsdp, which keeps its fp32 weights there too; the plan says "
        "how long a step waits.",
    )


class Schedule(Section):
    """Learning rate over optimizer steps: step n has the rate that megatron and transformers give it."""

    kind: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after the warm-up.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up; the first of them has rate 0.")
    decay_steps: int | None = Field(
        None, ge=1, description="Steps until min_lr; the run's steps when not given."
    )
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")


class Lora(Section):
    """Adapters that are trained instead of the model's weights (LoRA, arXiv:2106.09685)."""

    rank: int = Field(32, ge=1, description="Rank of each pair of matrices.")
    alpha: float = Field(32.0, gt=0, description="What a pair adds is multiplied by alpha / rank.")
    targets: str = Field(
        USUAL,
        description="Which matrices get a pair: a regular expression for their whole names in Hugging Face's checkpoint, without "
        "`.weight`. By default all of attention and of dense MLPs.",
    )
    path: Annotated[str | None, fixed("the run began with it"), READS] = Field(
        None,
        description="Folder of adapters to start from, as PEFT or an export of a run with adapters has it. null: adapters that add "
        "nothing at first.",
    )


class Trainer(Section):
    """The trainer: megatron-core's, FSDP's, or yours."""

    model_config = EMPTY_IN_FORMS

    kind: Annotated[Literal["megatron", "fsdp"], fixed("checkpoints are in its form")] = Field(
        "megatron",
        description="megatron: megatron-core, for the families of [models](models.md). fsdp: PyTorch's FSDP2 on Hugging Face's model of "
        "the folder, for any causal language model of transformers whose layers are attention.",
    )
    rank: Annotated[str | None, fixed("checkpoints are in its form")] = Field(
        None,
        pattern=CLASS,
        description="Your trainer instead of megatron-core: the class of its processes, by its import path. "
        "`connectors/trainers/rank.py` has what a run asks of them.",
    )
    world_size: Annotated[int, ANY_START, FROM_PRESET] = Field(
        1, ge=1, description="Ranks: one process each, one GPU each if there are GPUs."
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], ANY_START] = Field(
        "auto", description="auto takes the GPU when there is one."
    )
    parallel: Annotated[Parallel, ANY_START] = Parallel()
    lora: Annotated[Lora | None, fixed("checkpoints hold the adapters alone")] = Field(
        None,
        description="Trains adapters beside the model's weights, which do not change and have no gradients and optimizer state; "
        "checkpoints and exports hold the adapters. null: all weights are trained.",
    )
    optimizer: Annotated[Optimizer, in_a_branch(ALGORITHM)] = Optimizer()
    schedule: Annotated[Schedule, in_a_branch(ALGORITHM)] = Schedule()
    global_batch: Annotated[int | None, fixed("the number of steps an iteration follows from it")] = Field(
        None, ge=1, description="Samples per optimizer step; all samples of the iteration when not given."
    )
    passes: Annotated[int, fixed("the number of steps an iteration follows from it")] = Field(
        1,
        ge=1,
        description="Times that an iteration's batch is trained, each time in the same steps and the same order. Advantages and old log-probabilities are computed before the first pass; the loss's clip bounds the later ones.",
    )
    max_pack_tokens: Annotated[int, ANY_START] = Field(
        8192, ge=1, description="Longest pack (one microbatch of one rank). Tokens."
    )
    recompute: Annotated[Literal["none", "selective", "full"], ANY_START, FROM_PRESET] = Field(
        "none",
        description="What the backward pass computes again instead of storing it. selective: outputs of norms and activations, "
        "about a quarter of what a dense layer stores, without a matrix product. full: every layer from its input, a third "
        "more time.",
    )
    logprob_chunk_tokens: Annotated[int, ANY_START] = Field(
        1024,
        ge=1,
        description="Tokens whose logits are in memory at once, in fp32 on the CPU; on a GPU four times as many in the model's type, and more if memory allows.",
    )
    store_logprobs: Annotated[bool, ANY_START] = Field(
        False,
        description="Store the trainer's log-probability of each response token, under the weights from before the iteration and at "
        "the engines' temperature, for the view `logprobs` of [`millrace sql`](tables.md#logprobs). 4 bytes a token. An iteration of "
        "several steps or passes takes a forward pass more, unless its algorithm makes that pass anyway.",
    )
    threads: Annotated[int | None, ANY_START] = Field(
        None,
        ge=1,
        description="CPU threads per rank. When not given: 1 beside a GPU, else cores divided by ranks, as for "
        "trainer.optimizer.offload.",
    )
    deterministic: Annotated[bool, ANY_START] = Field(
        True, description="Deterministic kernels: repeated runs on CPU are equal bit for bit."
    )
    megatron: Annotated[dict[str, Any], in_a_branch(ALGORITHM), FROM_PRESET] = Field(
        {},
        description="Fields of megatron-core's TransformerConfig by their own names: [supported fields](#trainermegatron).",
    )
    megatron_optimizer: Annotated[
        dict[str, Any], fixed("the optimizer's state has groups that follow from it")
    ] = Field(
        {}, description="Fields of its OptimizerConfig: [supported fields](#trainermegatron_optimizer)."
    )
    megatron_ddp: Annotated[dict[str, Any], ANY_START] = Field(
        {},
        description="Fields of its DistributedDataParallelConfig: [supported fields](#trainermegatron_ddp).",
    )

    @property
    def by_megatron(self) -> bool:
        """Whether megatron-core's trainer is the run's."""
        return self.kind == "megatron" and self.rank is None

    @property
    def not_megatron(self) -> tuple[str, str]:
        """Why a setting of megatron-core's trainer has no effect, and the remedy."""
        field, whose = ("trainer.rank", "yours") if self.rank else ("trainer.kind", "FSDP's")
        return f"it is for megatron-core's trainer, and {field} names {whose}", f"remove it, or {field}"
