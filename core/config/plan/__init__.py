"""The plan of a run before anything starts: numbers, layout, memory and disk."""

from millrace.core.config.plan.layout import Layout as Layout
from millrace.core.config.plan.layout import layout_of as layout_of
from millrace.core.config.plan.layout import visible_gpus as visible_gpus
from millrace.core.config.plan.memory import MemoryPart as MemoryPart
from millrace.core.config.plan.memory import host_memory as host_memory
from millrace.core.config.plan.memory import parameters_of_rank as parameters_of_rank
from millrace.core.config.plan.memory import size_text as size_text
from millrace.core.config.plan.memory import trainer_memory as trainer_memory
from millrace.core.config.plan.memory import weights_on_disk as weights_on_disk
from millrace.core.config.plan.numbers import numbers_of as numbers_of
from millrace.core.config.plan.plan import Plan as Plan
from millrace.core.config.plan.plan import make_plan as make_plan
from millrace.core.config.plan.without_effect import NoEffect as NoEffect
from millrace.core.config.plan.without_effect import no_effect as no_effect
