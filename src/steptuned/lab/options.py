"""Typed options of problems and methods. A mistake in one is a single sentence."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, to_jsonable_python

Count = Annotated[int, Field(ge=1)]
"""A whole number that is at least 1."""
Whole = Annotated[int, Field(ge=0)]
"""A whole number that is at least 0."""


class OptionError(ValueError):
    """A mistake in an option: one sentence that starts with its name."""


class Options(BaseModel):
    """Options with their defaults, kinds, limits and choices. Every option needs a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    defaults: ClassVar[dict[str, Any]]
    """The default values as they are written to JSON."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise OptionError(_sentence(type(self), values, error.errors()[0])) from None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if required := [name for name, field in cls.model_fields.items() if field.is_required()]:
            raise TypeError(f"{cls.__qualname__}.{required[0]} needs a default value")
        values = {name: field.default for name, field in cls.model_fields.items()}
        cls.defaults = to_jsonable_python(values)

    def as_dict(self) -> dict[str, Any]:
        """The values as they are written to JSON."""
        return self.model_dump(mode="json")


def one_of(choices: Collection[str]) -> BeforeValidator:
    """For an option whose value is a key of a table. Keys may be added later."""

    def check(value: Any) -> Any:
        if value not in tuple(choices):
            raise PydanticCustomError("choice", "unknown", {"choices": tuple(choices)})
        return value

    return BeforeValidator(check)


def conflict(key: str, why: str) -> PydanticCustomError:
    """Raised by a validator whose option ``key`` does not fit the other options."""
    return PydanticCustomError("conflict", "{why}", {"key": key, "why": why})


def listed(names: Collection[Any]) -> str:
    return ", ".join(sorted(map(str, names)))


def _sentence(model: type[Options], values: dict[str, Any], error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "conflict":
        return f"{context['key']} = {values.get(context['key'])!r}: {context['why']}"
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{key} is not an option; the options are {listed(model.model_fields)}"
    told = f"{key} = {values[key]!r}"
    if error["type"] == "choice":
        return f"{told} is not one of {listed(context['choices'])}"
    if error["type"] == "literal_error":
        return f"{told} is not one of {listed(get_args(model.model_fields[key].annotation))}"
    if error["type"] == "greater_than_equal":
        return f"{told}: must be at least {context['ge']}"
    return f"{told}: must have the same type as the default, {model.defaults[key]!r}"
