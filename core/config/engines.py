"""The `engines` section: one variant a kind of engine, each with only the fields that act there."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from millrace.core.config.engine_kinds import EMBEDDED, EXTERNAL, SGLANG, EngineKind
from millrace.core.config.parts.from_preset import EMPTY_IN_FORMS, FROM_PRESET
from millrace.core.config.parts.menu import Menu
from millrace.core.config.parts.section import Section
from millrace.core.contracts.references import WHOLE

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Router(Section):
    """An sglang-router process through which requests reach the engines, instead of millrace's dispatcher."""

    policy: Literal["random", "round_robin", "cache_aware", "power_of_two", "manual"] = Field(
        "cache_aware",
        description="Which engine gets a request. cache_aware: the engine that has cached the start of its prompt, until loads differ much; manual: the engine with the other samples of the group.",
    )
    options: dict[str, Any] = Field(
        {}, description="Fields of sglang-router's RouterArgs by their own names."
    )


class _Served(Section):
    kinds: ClassVar[tuple[EngineKind, ...]]  # on a host with a GPU the first, without one the last

    host: str = Field(
        "127.0.0.1",
        description="Address on which engines and router listen. Loopback unless you change it; 0.0.0.0 for engines on "
        "other nodes.",
    )
    start_timeout_s: float = Field(
        600, gt=0, description="Longest wait for a server to become healthy. Seconds."
    )
    restarts: int = Field(3, ge=0, description="Times engines may be restarted within the run.")
    router: Router | None = Field(
        None,
        description="Send requests through an sglang-router; when not given, each goes to the least loaded engine.",
    )

    def kind_at(self, gpus: int) -> EngineKind:
        """The kind on a host with so many GPUs."""
        return self.kinds[0 if gpus else -1]

    @property
    def started(self) -> bool:
        """Whether millrace starts, ends and configures the engines."""
        return all(kind.started for kind in self.kinds)

    def cached(self, longest: int) -> int | None:
        """Most tokens of sequences up to `longest` that a KV cache of the size in this section holds; None: it says no size."""
        return None


class _Started(_Served):
    model_config = EMPTY_IN_FORMS

    count: Annotated[int, FROM_PRESET] = Field(1, ge=1, description="Number of engines.")


class _OnGpus(Section):
    model_config = EMPTY_IN_FORMS

    gpus: Annotated[int, FROM_PRESET] = Field(1, ge=1, description="GPUs per engine (sglang).")


class _OverHosts(_OnGpus):
    model_config = EMPTY_IN_FORMS

    nodes: Annotated[int, FROM_PRESET] = Field(
        1,
        ge=1,
        description="Hosts that one engine spans, each with `gpus` / `nodes` of its GPUs (SGLang's nnodes). More than one need "
        "placement.tensor_over_hosts.",
    )


class _Disaggregated(Section):
    prefill: int = Field(
        0,
        ge=0,
        description="How many engines only prefill: the first ones. The others then only decode (sglang). SGLang "
        "moves the KV cache between them.",
    )


class _SglangOptions(Section):
    sglang: dict[str, Any] = Field({}, description="Fields of SGLang's ServerArgs by their own names.")


class EmbeddedOptions(Section):
    """Fields of an embedded engine."""

    threads: int | None = Field(None, ge=1, description="CPU threads of an embedded engine.")
    max_running: int = Field(64, ge=1, description="Requests that an embedded engine runs at once.")
    max_total_tokens: int = Field(65536, ge=1, description="Size of an embedded engine's KV cache. Tokens.")

    def cached(self, longest: int) -> int | None:
        """Most tokens of sequences up to `longest` that are cached at once."""
        return min(self.max_total_tokens, self.max_running * longest)


class AutoEngines(EmbeddedOptions, _SglangOptions, _Disaggregated, _OverHosts, _Started):
    """SGLang if there is a GPU, else embedded engines."""

    kinds = (SGLANG, EMBEDDED)
    kind: Literal["auto"] = "auto"


class EmbeddedEngines(EmbeddedOptions, _Started):
    """millrace's own engine, which runs the model with transformers on the CPU."""

    kinds = (EMBEDDED,)
    kind: Literal["embedded"] = "embedded"
    gpus: ClassVar[int] = 1
    nodes: ClassVar[int] = 1
    prefill: ClassVar[int] = 0
    sglang: ClassVar[dict[str, Any]] = {}


class SglangEngines(_SglangOptions, _Disaggregated, _OverHosts, _Started):
    """SGLang servers, each on `gpus` GPUs."""

    kinds = (SGLANG,)
    kind: Literal["sglang"] = "sglang"


class ExternalEngines(_Disaggregated, _OnGpus, _Served):
    """Running servers that millrace does not start, stop or configure."""

    kinds = (EXTERNAL,)
    kind: Literal["external"] = "external"
    addresses: list[str] = Field(
        min_length=1,
        description="URL of each engine, as in http://host:30000. They must serve model.path in "
        "model.dtype, to this run alone.",
    )
    key: str | None = Field(
        None,
        pattern=WHOLE,
        description="Their Bearer token (SGLang's api_key), as a reference: ${env:NAME} or ${prefect:BLOCK}.",
    )

    @property
    def count(self) -> int:
        """Number of engines."""
        return len(self.addresses)

    nodes: ClassVar[int] = 1
    sglang: ClassVar[dict[str, Any]] = {}


Engines = Annotated[
    AutoEngines | EmbeddedEngines | SglangEngines | ExternalEngines,
    Field(discriminator="kind"),
    Menu(
        """The servers that generate.

        - `auto` — sglang if there is a GPU, else embedded.
        - `embedded` — millrace's own engine, for the CPU.
        - `sglang` — SGLang servers. Needs GPUs.
        - `external` — servers that run already. Needs `addresses`.
        """,
        default="auto",
    ),
]
