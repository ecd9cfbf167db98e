"""The families of models that this process knows: built in, from installed packages, and registered by hand.

A package offers a family by an entry point, which every process of a run finds, on every node:

    [project.entry-points."millrace.families"]
    other = "my_package.families:OTHER"
"""

from importlib.metadata import entry_points

from millrace.core.errors import ConfigError
from millrace.core.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from millrace.core.families.family import Family
from millrace.core.families.glm4 import GLM4
from millrace.core.families.glm4_moe import GLM4_MOE
from millrace.core.families.glm4_moe_lite import GLM4_MOE_LITE
from millrace.core.families.gpt_oss import GPT_OSS
from millrace.core.families.llama import LLAMA
from millrace.core.families.mistral import MISTRAL
from millrace.core.families.qwen2 import QWEN2
from millrace.core.families.qwen2_moe import QWEN2_MOE
from millrace.core.families.qwen3 import QWEN3, QWEN3_MOE
from millrace.core.families.qwen3_5 import QWEN3_5, QWEN3_5_TEXT
from millrace.core.families.qwen3_5_moe import QWEN3_5_MOE, QWEN3_5_MOE_TEXT
from millrace.core.families.qwen3_next import QWEN3_NEXT
from millrace.core.families.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE

GROUP = "millrace.families"
BUILT_IN = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5_TEXT,
    QWEN3_5_MOE_TEXT,
    GLM4,
    DEEPSEEK_V3,
    KIMI_K2,
    GLM4_MOE_LITE,
    GPT_OSS,
    GLM4_MOE,
)
# of families that are there, as other checkpoints store them
OTHER_FORMS = (QWEN3_5, QWEN3_5_MOE, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE)
_known: dict[str, Family] = {family.name: family for family in (*BUILT_IN, *OTHER_FORMS)}


def register_family(family: Family) -> None:
    """Let this process know a family. Raises ConfigError if another family has its name.

    A run has several processes: offer the family by an entry point, and each of them knows it.
    """
    if _known.setdefault(family.name, family) != family:
        raise ConfigError(
            "another family has this name",
            where=f"family {family.name}",
            remedy="name yours as model_type of your config.json, and give it a name of its own",
        )


def family_of(model_type: object) -> Family | None:
    """The family that config.json names, or None. Looks at installed packages if it is none of those here."""
    if not isinstance(model_type, str):
        return None
    if model_type not in _known:
        for found in entry_points(group=GROUP, name=model_type):
            family = found.load()
            if not isinstance(family, Family) or family.name != model_type:
                raise ConfigError(
                    f"{found.value} is no Family of this name",
                    where=f"entry point {model_type} of {GROUP}",
                    remedy="let it name a millrace.Family whose name is the entry point's",
                )
            register_family(family)
    return _known.get(model_type)


def family_named(name: str) -> Family:
    """A family of this process or of an installed package, by its name; the name must be known."""
    family = family_of(name)
    assert family is not None, f"an architecture of the unknown family {name}"
    return family


def every_family() -> list[Family]:
    """The families of this process."""
    return list(_known.values())


def known_names() -> list[str]:
    """Names of all families that this process can have."""
    return sorted({*_known, *(found.name for found in entry_points(group=GROUP))})
