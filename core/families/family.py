"""What a family of models is: the keys of its config.json, its parts, and the tensors that a checkpoint stores for each part.

One description serves the check, the plan, the trainer, the embedded engine and exports. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from millrace.core.families.delta_net import LAYER_KEYS
from millrace.core.families.windows import Windows

# without this key the model is unclear: upstream's default differs between families
REFUSED: Final = object()


@dataclass(frozen=True)
class Honoured:
    """A key that the model is built from.

    `kind`: int, float, bool or list. A number is above 0, or as `least` says; a list is one that `allows` accepts. `absent` and
    `null`: the value if the key is missing or null, or a function of the sizes read before it; REFUSED if a file must have the key.
    """

    kind: type
    absent: Any = REFUSED
    null: Any = REFUSED
    least: int | None = None
    allows: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Bound:
    """A key whose allowed values, listed or accepted by `allows`, mean the model that is built.

    `default`: the value that upstream's class takes if the key is missing; a missing key is refused if it is not allowed.
    """

    values: tuple[Any, ...] = ()
    allows: Callable[[Any], bool] | None = None
    remedy: str = "take another model"
    default: Any = REFUSED

    def takes(self, value: Any) -> bool:
        """Whether the value means the model that is built."""
        listed = any(type(value) is type(one) and value == one for one in self.values)
        return listed or (self.allows is not None and self.allows(value))


@dataclass(frozen=True)
class ModelPart:
    """One parameter of megatron's model, and the tensors of a checkpoint that hold it.

    `parameter`: megatron-core's name. `tensors`: Hugging Face names with their shapes, in names of `Architecture.sizes`. A
    layer of which one of these sizes is 0 does not have the part. Names may contain {layer} and {expert}.
    `form`: how the tensors make the parameter: `one` is alone; `pair` stands one after the other, `halves` are such a pair in one
    tensor, `turns` the same with their columns in turns, `heads` query, key and value by group of heads, `gated_heads` these with
    a gate after each query, `key_heads` as `DeltaNet.rows_by_key_head` says, `joined` one after the other. An expert's part whose
    tensors do not name the expert is `stacked`: they hold all experts of a layer, [experts, out, in], or if `inputs_first`
    [experts, in, out]. `split`: the dimension that is cut over tensor parallel ranks; None: each has all of it. `pieces`: names of the parts of that dimension that are cut each by itself, and of their sizes. `when`: the
    flag of an Architecture without which a model has no such part. `trained`: whether steps
    change it; a part that they do not change is in float32, whatever the type of the weights.
    """

    parameter: str
    tensors: Mapping[str, tuple[str, ...]]
    split: int | None = None
    form: Literal["one", "pair", "halves", "turns", "heads", "gated_heads", "key_heads", "joined"] = "one"
    pieces: Mapping[str, str] = field(default_factory=dict)
    when: str = ""
    trained: bool = True
    inputs_first: bool = False

    @property
    def of_experts(self) -> bool:
        """Whether each expert of a layer has one."""
        return "{expert}" in self.parameter

    @property
    def stacked(self) -> bool:
        """Whether its tensors hold all experts of a layer."""
        return self.of_experts and not any("{expert}" in name for name in self.tensors)

    def of_expert(self, tensor: Any) -> Any:
        """An expert's parameter, whole, from its share of a stacked tensor; gate and up are its halves."""
        rows = tensor.transpose(0, 1) if self.inputs_first else tensor
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.form == "turns" else rows

    def to_stack(self, parameter: Any) -> Any:
        """The inverse of `of_expert`."""
        turned = self.form == "turns"
        rows = parameter.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if turned else parameter
        return rows.transpose(0, 1) if self.inputs_first else rows

    def renamed(self, old: str, new: str) -> ModelPart:
        """The same part with other names of tensors."""
        tensors = {name.replace(old, new): shape for name, shape in self.tensors.items()}
        return replace(self, tensors=tensors)


@dataclass(frozen=True)
class Family:
    """A family of decoder-only models, named as `model_type` of config.json names it.

    `model_class`: its class in transformers. `keys`: what the model is built from. `bound`: keys with one
    meaning here; `architectures` is among them by itself. `harmless`: keys of which no value changes a log-probability. The three have every key that the class declares. `layer`: parts of
    layers; `before` and `after`: parts outside of layers, of which a tied model has no output layer.
    `rotary_part`: partial_rotary_factor if the key is missing; None: only whole heads rotate. `interleaved`: whether neighbouring
    dimensions rotate together, instead of those half a head apart. `windows`: None: attention is full in every layer.
    `rotary_default`: rope_parameters of a config.json without any; its rope_theta also with others. `delta_net`: whether some
    layers have it. `centred`: whether weights of norms are stored less 1. `beside`: how names of tensors start that the model here
    does not have, which may predict tokens after the next one. `within`: the key of config.json under which keys of the
    language model are. `rotary_axes`: whether positions of pictures have several axes, which a text's tokens do not tell apart.
    `ties_in_sglang`: whether SGLang's model of the family takes the embedding for its output layer if tie_word_embeddings says so.
    """

    name: str
    title: str
    model_class: str
    keys: Mapping[str, Honoured]
    bound: Mapping[str, Bound]
    harmless: frozenset[str]
    before: tuple[ModelPart, ...]
    layer: tuple[ModelPart, ...]
    after: tuple[ModelPart, ...]
    rotary_part: float | None = None
    interleaved: bool = False
    windows: Windows | None = None
    rotary_default: Mapping[str, Any] = field(default_factory=dict)
    delta_net: bool = False
    centred: bool = False
    beside: tuple[str, ...] = ()
    within: str = ""
    rotary_axes: bool = False
    ties_in_sglang: bool = True

    @property
    def declared(self) -> frozenset[str]:
        """All keys of config.json that the family has a meaning for, those of rotary embeddings left out."""
        by_layer = (*(self.windows.keys if self.windows else ()), *(LAYER_KEYS if self.delta_net else ()))
        return frozenset({*self.keys, *self.bound, *self.harmless, *by_layer})

    @property
    def embedding(self) -> str:
        """The name of the embedding's tensor."""
        return next(iter(self.before[0].tensors))

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """All parts, as a model has them in order."""
        return (*self.before, *self.layer, *self.after)

    def __post_init__(self) -> None:
        only = Bound((None, [self.model_class]))
        object.__setattr__(self, "bound", {**self.bound, "architectures": only})
        twice = sorted(
            {*self.keys} & {*self.bound} | {*self.keys} & self.harmless | {*self.bound} & self.harmless
        )
        assert not twice, f"family {self.name}: {twice} has two meanings"

    def has(self, parameter: str) -> bool:
        """Whether layers may have such a parameter. parameter: the end of megatron's name."""
        return any(part.parameter.endswith(parameter) for part in self.layer)
