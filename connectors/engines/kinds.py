"""How each kind of engine is started and called: the one place that chooses by the kind's name."""

from millrace.connectors.engines.client import Connect
from millrace.connectors.engines.embedded.launch import launch_embedded
from millrace.connectors.engines.launch import LaunchEngine
from millrace.connectors.engines.sglang.client import SglangClient
from millrace.connectors.engines.sglang.launch import launch_sglang
from millrace.core.config.engine_kinds import EMBEDDED, EXTERNAL, SGLANG
from millrace.core.config.engines import Engines

LAUNCH: dict[str, LaunchEngine] = {SGLANG.name: launch_sglang, EMBEDDED.name: launch_embedded}
"""By the name of each kind that millrace starts."""
CONNECT: dict[str, Connect] = dict.fromkeys((SGLANG.name, EMBEDDED.name, EXTERNAL.name), SglangClient)


def connect_to(engines: Engines) -> Connect:
    """What makes a client of these engines. All kinds that a section may be are called alike."""
    return CONNECT[engines.kinds[0].name]
