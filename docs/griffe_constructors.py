"""Shows attrs classes and named tuples in the reference by their constructors, one line per field, as `help()` does."""

from __future__ import annotations

from typing import Any

import griffe

DECORATORS = {"attrs.define", "attrs.frozen"}


class Constructors(griffe.Extension):
    """Turns fields into parameters of ``__init__``, which griffe only does for dataclasses."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        decorators = [each for each in cls.decorators if each.callable_path in DECORATORS]
        is_named_tuple = any(str(base) == "NamedTuple" for base in cls.bases)
        if not (decorators or is_named_tuple) or "__init__" in cls.members:
            return
        fields = [each for each in cls.attributes.values() if is_field(each)]
        keyword_only = any("kw_only=True" in str(each.value) for each in decorators)
        kind = griffe.ParameterKind.keyword_only if keyword_only else griffe.ParameterKind.positional_or_keyword
        computed = {str(each.value) for method in cls.functions.values() for each in method.decorators}
        parameters = [
            griffe.Parameter(
                field.name,
                annotation=field.annotation,
                kind=kind,
                default="..." if f"{field.name}.default" in computed else _default(field.value),
            )
            for field in fields
            if not field.name.startswith("_") and "init=False" not in str(field.value)
        ]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls))
        for parameter in parameters:
            cls.del_member(parameter.name)


def is_field(attribute: griffe.Attribute) -> bool:
    is_of_object = "instance-attribute" in attribute.labels and "property" not in attribute.labels  # no ClassVar
    return attribute.annotation is not None and is_of_object


def _default(value: Any) -> Any:
    if not isinstance(value, griffe.ExprCall) or not value.canonical_path.endswith("attrs.field"):
        return value
    given = {each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
    return f"{given['factory']}()" if "factory" in given else given.get("default")
