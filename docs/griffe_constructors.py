"""Shows attrs classes, named tuples and managers in the reference by their constructors, as ``help()`` does."""

from __future__ import annotations

import re
from typing import Any

import griffe

DECORATORS = {"attrs.define", "attrs.frozen"}
TAKES = "envmanager.options.takes"
FULL = "SubprocessEnvManager"
"""Manager whose docstring describes all options; others describe those that mean something else."""
ARGUMENT = re.compile(r"^    (\w+): .*(?:\n {8}.*)*", re.M)
"""An argument in the section ``Args`` of a docstring."""


class Constructors(griffe.Extension):
    """Turns fields into parameters of ``__init__``, which griffe only does for dataclasses."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        is_named_tuple = any(str(base) == "NamedTuple" for base in cls.bases)
        if not (decorators_of(cls) or is_named_tuple) or "__init__" in cls.members:
            return
        parameters = parameters_of(cls)
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls))
        for parameter in parameters:
            cls.del_member(parameter.name)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give constructors of managers the parameters that ``takes(OPTIONS)`` gives them, with their descriptions."""
        managers = []
        for cls in classes_in(pkg):
            constructor = cls.members.get("__init__")
            for decorator in constructor.decorators if isinstance(constructor, griffe.Function) else ():
                if decorator.callable_path == TAKES:
                    options = pkg.modules_collection[decorator.value.arguments[0].canonical_path]
                    own = list(constructor.parameters)[:2]
                    constructor.parameters = griffe.Parameters(*own, *inherited_parameters_of(options))
                    managers.append(cls)
        described = {cls.name: arguments_in(cls) for cls in managers}
        for cls in managers:
            if described[cls.name]:
                known = {**described[FULL], **described[cls.name]}
                texts = [known[each.name] for each in cls.members["__init__"].parameters if each.name in known]
                cls.docstring.value = cls.docstring.value.partition("Args:\n")[0] + "\n".join(["Args:", *texts])


def arguments_in(cls: griffe.Class) -> dict[str, str]:
    """Return the lines that describe each argument in the section ``Args`` of a class's docstring."""
    section = "" if cls.docstring is None else cls.docstring.value.partition("\nArgs:\n")[2]
    return {found[1]: found[0] for found in ARGUMENT.finditer(section)}


def classes_in(module: griffe.Module) -> Any:
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from classes_in(member)


def inherited_parameters_of(cls: griffe.Class) -> list[griffe.Parameter]:
    """Return the parameters of an attrs class: first those of the classes that it inherits from."""
    own = list(cls.members["__init__"].parameters)[0:] if "__init__" in cls.members else []
    bases = [cls.modules_collection[base.canonical_path] for base in cls.bases if not isinstance(base, str)]
    before = [parameter for base in bases for parameter in inherited_parameters_of(base)]
    names = {parameter.name for parameter in own}
    return [*(each for each in before if each.name not in names), *own]


def decorators_of(cls: griffe.Class) -> list[griffe.Decorator]:
    return [each for each in cls.decorators if each.callable_path in DECORATORS]


def parameters_of(cls: griffe.Class) -> list[griffe.Parameter]:
    """Return the parameters that attrs makes of the fields of this class itself."""
    fields = [each for each in cls.attributes.values() if is_field(each)]
    keyword_only = any("kw_only=True" in str(each.value) for each in decorators_of(cls))
    computed = {str(each.value) for method in cls.functions.values() for each in method.decorators}
    return [
        griffe.Parameter(
            field.name,
            annotation=field.annotation,
            kind=griffe.ParameterKind.keyword_only
            if keyword_only or "kw_only=True" in str(field.value)
            else griffe.ParameterKind.positional_or_keyword,
            default="..." if f"{field.name}.default" in computed else _default(field.value),
        )
        for field in fields
        if not field.name.startswith("_") and "init=False" not in str(field.value)
    ]


def is_field(attribute: griffe.Attribute) -> bool:
    is_of_object = "instance-attribute" in attribute.labels and "property" not in attribute.labels  # no ClassVar
    return attribute.annotation is not None and is_of_object


def _default(value: Any) -> Any:
    if not isinstance(value, griffe.ExprCall) or not value.canonical_path.endswith("attrs.field"):
        return value
    given = {each.name: each.value for each in value.arguments if isinstance(each, griffe.ExprKeyword)}
    return f"{given['factory']}()" if "factory" in given else given.get("default")
