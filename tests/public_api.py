"""The public names of deltasync as text: `python -m tests.public_api` rewrites `public_api.txt`.

Public is what `docs/api.md` has. Of a class that is what begins with no underscore, or what its
`members` there name.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "public_api.txt"
_ENTRY = re.compile(
    r"^::: (deltasync\S*)\.(\w+)$(?:\n    options:\n(?:      .*\n)*?      members: \[(.*)\])?",
    re.MULTILINE,
)
_ATTRIBUTES = re.compile(r"^    Attributes:\n((?:        .*\n|\n)+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Name:
    """What a public name leads to; `only` are members, if not all of them are public."""

    path: str
    value: Any
    only: frozenset[str] | None

    def members(self) -> dict[str, Any]:
        """Attributes of a class that are ours; those of others' classes are theirs to change."""
        if not inspect.isclass(self.value):
            return {}
        bases = [one for one in self.value.__mro__[::-1] if one.__module__.startswith("deltasync")]
        found = {name: member for base in bases for name, member in vars(base).items()}
        return {name: m for name, m in found.items() if self._is_public(name)}

    def _is_public(self, name: str) -> bool:
        if name == "__init__" or self.only is None:
            return name == "__init__" or not name.startswith(("_", "test_", "model_"))
        return name in self.only


def public() -> list[Name]:
    """All public names, in order."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = []
    for entry in _ENTRY.finditer(page):
        module, name, members = entry.groups()
        only = None if members is None else frozenset(re.findall(r"\w+", members))
        found.append(Name(f"{module}.{name}", getattr(import_module(module), name), only))
    return sorted(found, key=lambda each: each.path)


def lines() -> Iterator[str]:
    """One for each name, and for each attribute of a class."""
    for name in public():
        if inspect.isclass(name.value):
            bases = [base.__name__ for base in name.value.__bases__ if base is not object]
            yield f"class {name.path}({', '.join(bases)})"
            yield from (f"    {line}" for line in sorted(_described(name)))
        else:
            yield name.path + (_signature(name.value) if callable(name.value) else "")


def _described(name: Name) -> Iterator[str]:
    if issubclass(name.value, enum.Enum):
        yield from name.value.__members__
        return
    fields = dict(_fields(name.value))
    yield from (f"{field}: {told}" for field, told in fields.items())
    told = _ATTRIBUTES.search(f"{name.value.__doc__}\n")
    members = name.members()
    for attribute in re.findall(r"^ {8}(\w+(?:, \w+)*): ", told[1] if told else "", re.MULTILINE):
        yield from (one for one in attribute.split(", ") if one not in {**fields, **members})
    for member, value in members.items():
        if isinstance(value, property) and value.fget is not None:
            settable = " (settable)" if value.fset else ""
            yield f"{member}: {_signature(value.fget).partition(' -> ')[2]}{settable}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{member}{_signature(value.__func__)}"
        elif (
            inspect.isfunction(value)
            and value.__name__ == member
            and not (member == "__init__" and fields)
        ):
            yield f"{member}{_signature(value)}"


def _fields(value: type) -> Iterator[tuple[str, str]]:
    """Type and default of what a dataclass or a model is made of."""
    if issubclass(value, BaseModel):
        known = {n: a for base in value.__mro__ for n, a in inspect.get_annotations(base).items()}
        for name, field in value.model_fields.items():
            default = (
                ""
                if field.is_required()
                else f" = {_shown(field.get_default(call_default_factory=True))}"
            )
            yield name, f"{known[name]}{default}"
    elif issubclass(value, tuple):
        yield from inspect.get_annotations(value).items()
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            is_set = each.default is not dataclasses.MISSING
            yield each.name, f"{each.type}" + (f" = {_shown(each.default)}" if is_set else "")


def _signature(function: Callable[..., Any]) -> str:
    """As it is written: Python puts annotations that are text into quotes."""
    text = []
    for each in inspect.signature(function).parameters.values():
        stars = "*" if each.kind == each.VAR_POSITIONAL else ""
        if each.kind == each.KEYWORD_ONLY and "*" not in text:
            text.append("*")
        annotation = "" if each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {_shown(each.default)}"
        text.append(f"{stars}{each.name}{annotation}{default}")
        if each.kind == each.POSITIONAL_ONLY:  # which all before it are
            text = [one for one in text if one != "/"] + ["/"]
    returned = inspect.signature(function).return_annotation
    return f"({', '.join(text)}) -> {returned}"


def _shown(default: object) -> str:
    return "..." if callable(default) else repr(default)


def main() -> None:
    FILE.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")


if __name__ == "__main__":
    main()
