"""The configuration of a run. `RunConfig` is the whole; each of its sections has the module of its name."""

from millrace.core.config.parts.user_function import UserFunction as UserFunction
from millrace.core.config.run_config import RunConfig as RunConfig
