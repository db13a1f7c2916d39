"""Schemas of function tools: checked once when a tool is made known, and used to check every call."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from vrl.protocol.errors import ConfigError

_MAX_PROBLEM_CHARACTERS: Final = 300


@final
class SchemaView(dict[str, Any]):
    """A schema as users' tools read it: a mapping, and with verl's attributes (`tool_schema.function.name`)."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError as error:
            raise AttributeError(name) from error
        return SchemaView(value) if isinstance(value, Mapping) else value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return a plain mapping, as verl's schemas do."""
        return dict(self)


def checked_schema(schema: Any, key: str) -> dict[str, Any]:
    """Return an OpenAI function schema, wrapped in `{"type": "function", ...}` where it was not.

    Raises ConfigError that begins with `key`: no name, no valid JSON schema, a required name that is no parameter, a
    reference that leads nowhere.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"{key}: a tool needs a schema, a mapping with type: function and function: {{name, ...}}")
    function = schema.get("function", schema)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{key}: the schema has no function.name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    _check_parameters(parameters, f"{key}, tool {name}")
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


def _check_parameters(parameters: Any, key: str) -> None:
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise ConfigError(f"{key}: function.parameters must be a JSON schema with type: object")
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ConfigError(f"{key}: function.parameters is no valid JSON schema: {error.message}") from error
    unknown = set(parameters.get("required", ())) - set(parameters.get("properties", {}))
    if unknown:
        raise ConfigError(f"{key}: required names {', '.join(sorted(unknown))} are not among the properties")
    resolver = Registry().with_resource("", DRAFT202012.create_resource(parameters)).resolver()
    for reference in _references(parameters):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ConfigError(f"{key}: the reference {reference!r} leads nowhere in the schema") from error


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


@final
class ArgumentChecker:
    """Checks the arguments of calls against one tool's schema. Takes whatever a parser lets through."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._name = schema["function"]["name"]
        self._parameters = schema["function"]["parameters"]
        self._validator = Draft202012Validator(self._parameters, registry=Registry())

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the arguments, for the model; None when they fit."""
        error = best_match(self._validator.iter_errors(arguments))
        if error is None:
            return None
        return f"bad arguments for {self._name}: {_describe(error)}. {self._expected()}"

    def _expected(self) -> str:
        properties = self._parameters.get("properties", {})
        required = ", ".join(self._parameters.get("required", ())) or "none"
        return f"Parameters: {', '.join(properties) or 'none'}; required: {required}."


def _describe(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    message = error.message
    if len(message) > _MAX_PROBLEM_CHARACTERS:  # it spells the value out
        half = _MAX_PROBLEM_CHARACTERS // 2
        message = f"{message[:half]}...{message[-half:]}"
    return f"{where}: {message}" if where else message
