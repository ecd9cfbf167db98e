"""Rules of `trainer.megatron`, `trainer.megatron_optimizer` and `trainer.megatron_ddp`."""

from collections.abc import Iterator

from millrace.core.config import layout_rules, lora_rules
from millrace.core.config.megatron_options.ddp import DDP
from millrace.core.config.megatron_options.optimizer import OPTIMIZER
from millrace.core.config.megatron_options.transformer import TRANSFORMER
from millrace.core.config.parts.problems import Problem
from millrace.core.config.rollout import routing_rules
from millrace.core.config.run_config import RunConfig
from millrace.core.errors import ConfigError
from millrace.core.families.architecture import Architecture


def problems(config: RunConfig) -> Iterator[Problem]:
    """Options of megatron-core that are refused, or would do nothing in this configuration."""
    t = config.trainer
    yield from TRANSFORMER.problems(config, t.megatron)
    yield from OPTIMIZER.problems(config, t.megatron_optimizer)
    yield from DDP.problems(config, t.megatron_ddp)
    modules = t.megatron.get("recompute_modules")
    needs = {
        "the routers' losses need": {"moe_aux_loss_coeff", "moe_z_loss_coeff"} & set(t.megatron),
        "rollout.routing_replay needs": config.rollout.routing_replay,
    }
    for who, needed in needs.items():
        if needed and isinstance(modules, list) and "moe" in modules:
            yield Problem(
                "trainer.megatron.recompute_modules",
                modules,
                f"experts that are computed again no longer know their pack, which {who}",
                "take trainer.recompute=full",
            )


def router_problems(config: RunConfig, architecture: Architecture) -> Iterator[Problem]:
    """Options of trainer.megatron for routers that this model does not have, and experts to replay without any."""
    options = config.trainer.megatron
    yield from routing_rules.model_problems(config, architecture)
    if not architecture.experts:
        yield from TRANSFORMER.experts_problems(options)
    for name in sorted({"moe_aux_loss_coeff", "moe_z_loss_coeff"} & set(options)):
        if architecture.routing:
            yield Problem(
                f"trainer.megatron.{name}",
                options[name],
                "it is for routers that take a softmax, and this model's take sigmoids",
                "remove it",
            )


def check(config: RunConfig, architecture: Architecture) -> None:
    """Raise ConfigError for the first option that is refused, or that does not fit the model."""
    of_model = (
        *router_problems(config, architecture),
        *layout_rules.problems(config, architecture),
        *lora_rules.model_problems(config, architecture),
    )
    for problem in (*problems(config), *of_model):
        raise ConfigError(problem.reason, where=problem.field, remedy=problem.remedy)
