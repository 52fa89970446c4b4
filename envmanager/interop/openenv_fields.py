"""Actions and observations in the forms of JSON that OpenEnv has, and JSON schemas of them.

OpenEnv's actions and observations are mappings of fields. One of an environment that is no mapping, such as a number or
an array, is a mapping of one field, ``value``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from envmanager.adapters.openenv import json_form
from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.trees import Tree
from envmanager.observe.files import json_safe

_VALUE = "value"
_TYPES = {"b": "boolean", "i": "integer", "u": "integer", "f": "number"}
_STATE = {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}}


def fields_of(value: Any) -> Any:
    """Return an observation as a mapping of fields."""
    return value if isinstance(value, Mapping) else {_VALUE: value}


def action_of(fields: dict[str, Any], spec: BehaviorSpec | None) -> Any:
    """Return the action that a mapping of fields stands for.

    An empty field ``metadata``, which all action classes of OpenEnv have, is left out, unless the spec has it. A
    mapping that has no other field than ``value`` is that value, unless actions are mappings with that field.
    """
    known = spec.action if spec is not None and isinstance(spec.action, dict) else {}
    if "metadata" not in known and not fields.get("metadata", True):
        fields = {name: value for name, value in fields.items() if name != "metadata"}
    return fields[_VALUE] if fields.keys() == {_VALUE} and _VALUE not in known else fields


def as_json(message: dict[str, Any]) -> str:
    """Return a message as JSON, with null for NaN and infinite numbers.

    Infos that JSON has no form for are texts. Raises TypeError or ValueError for an observation that it has none for.
    """
    try:
        return json.dumps(message, default=json_form, allow_nan=False)
    except (TypeError, ValueError):
        data = dict(message["data"])
        if "metadata" in data:
            data["metadata"] = json.loads(json.dumps(data["metadata"], default=_form_or_text))
        return json.dumps(json_safe(json.loads(json.dumps({**message, "data": data}, default=json_form))))


def _form_or_text(value: Any) -> Any:
    try:
        return json_form(value)
    except TypeError:
        return str(value)


def schemas_of(spec: BehaviorSpec | None) -> dict[str, Any]:
    """Return the JSON schemas of actions, observations and states. ``spec``: None if it is not known yet."""
    parts = {"action": None if spec is None else spec.action, "observation": None if spec is None else spec.observation}
    schemas = {name: _schema(part if isinstance(part, dict) else {_VALUE: part}) for name, part in parts.items()}
    for name, part in parts.items():
        if part is None or (isinstance(part, ArraySpec) and part.is_object):
            schemas[name] = {"type": "object"}  # any mapping, or one with a value of any type
    return {**schemas, "state": {"type": "object", "properties": _STATE}}


def _schema(spec: Tree) -> dict[str, Any]:
    if isinstance(spec, dict):
        fields = {name: _schema(child) for name, child in spec.items()}
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    if isinstance(spec, tuple):
        parts = [_schema(child) for child in spec]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if spec.dtype.kind not in _TYPES:
        return {}
    schema: dict[str, Any] = {"type": _TYPES[spec.dtype.kind]}
    for key, bound, widest in (("minimum", spec.minimum, np.min), ("maximum", spec.maximum, np.max)):
        if bound is not None and schema["type"] != "boolean" and math.isfinite(limit := widest(bound).item()):
            schema[key] = limit
    for size in reversed(spec.shape):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return {**schema, "description": str(spec)}
