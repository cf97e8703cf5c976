"""Shows the constructors of ``msgspec.Struct`` classes in the API reference, as those of dataclasses are."""

from __future__ import annotations

from typing import Any

import griffe


class Structs(griffe.Extension):
    """A struct's annotated attributes are the parameters of its constructor, in their order."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if "__init__" in cls.members or not any(str(base).split(".")[-1] == "Struct" for base in cls.bases):
            return
        fields = [
            member
            for member in cls.members.values()
            if member.is_attribute and member.annotation is not None and not member.is_private
        ]
        either = griffe.ParameterKind.positional_or_keyword
        init = griffe.Function(
            "__init__",
            parameters=griffe.Parameters(
                griffe.Parameter("self", kind=either),
                *(
                    griffe.Parameter(
                        field.name, annotation=field.annotation, kind=either, default=field.value
                    )
                    for field in fields
                ),
            ),
        )
        cls.set_member("__init__", init)
