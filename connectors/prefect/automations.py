"""Keeps automations on the Prefect server in line with a YAML file. Knows nothing of their purpose."""

from __future__ import annotations

from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore


async def keep_automations(file: Path) -> list[str]:
    """Create the automations of a YAML file, or update existing ones with the same names; returns their names.

    An automation that was disabled on the server stays disabled.
    """
    wanted = [AutomationCore.model_validate(item) for item in yaml.safe_load(file.read_text())["automations"]]
    async with get_client() as client:
        for automation in wanted:
            found = await client.read_automations_by_name(automation.name)
            if found:
                automation.enabled = found[0].enabled
                await client.update_automation(found[0].id, automation)
            else:
                await client.create_automation(automation)
    return [automation.name for automation in wanted]
