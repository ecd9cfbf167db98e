"""A reward for responses that are JSON of a given schema."""

import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.core.hooks.protocols import RewardInput

FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(sample: RewardInput, *, schema: Mapping[str, Any], fenced: bool = True) -> float:
    """1 if the response is JSON that the schema (JSON Schema) accepts, else 0.

    fenced: if the response has blocks between ```, the last one counts.
    Errors: jsonschema's SchemaError for an invalid schema.
    """
    # imported here, since other rewards do not need it
    from jsonschema import validators

    validator = validators.validator_for(schema)
    validator.check_schema(schema)
    blocks = FENCED.findall(sample.response) if fenced else []
    try:
        value = json.loads(blocks[-1] if blocks else sample.response)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator(schema).is_valid(value))
