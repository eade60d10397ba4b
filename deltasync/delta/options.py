"""What the options of users have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deltasync.errors import ConfigError


class OptionsModel(BaseModel):
    """Options that are checked when they are made, and never change.

    Whatever is wrong with them is a ConfigError, which names the option.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # which is to see the fields as arguments

        def __init__(self, /, **options: Any) -> None:
            with _refusing(type(self)):
                super().__init__(**options)

        @classmethod
        def model_validate(cls, *args: Any, **kwargs: Any) -> Any:
            with _refusing(cls):
                return super().model_validate(*args, **kwargs)

        @classmethod
        def model_validate_json(cls, *args: Any, **kwargs: Any) -> Any:
            with _refusing(cls):
                return super().model_validate_json(*args, **kwargs)

        def __setattr__(self, name: str, value: Any) -> None:
            raise ConfigError(
                f"{type(self).__name__}: {name} cannot be set; make others by model_copy"
            )


@contextmanager
def _refusing(options: type[BaseModel]) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_fault(options, error)) from None


def _fault(options: type[BaseModel], error: ValidationError) -> str:
    """The first one, on a line."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    called = f"{options.__name__}: {where}" if where else options.__name__
    if first["type"] == "extra_forbidden":
        known = ", ".join(options.model_fields)
        near = get_close_matches(where, options.model_fields, n=1)
        return f"{called} is no option; " + (f"did you mean {near[0]}?" if near else f"use {known}")
    if first["type"] == "missing":
        return f"{called} is missing"
    reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    field = options.model_fields.get(str(first["loc"][0]) if first["loc"] else "")
    if field is not None and (not field.repr or "Secret" in str(field.annotation)):
        return f"{called}: what it is {reason}"
    return f"{called} is {first['input']!r}, and {reason}"
