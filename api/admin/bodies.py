"""Bodies of admin requests: read once the key is checked, and refused with the field and what it takes."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from clawloop.errors import RequestRejected


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


Body = TypeVar("Body", bound=RequestBody)


def described(model: type[RequestBody], *, required: bool = True) -> dict[str, Any]:
    """The body for the OpenAPI description, of a route that reads its body itself."""
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"required": required, "content": {"application/json": schema}}}


def check(model: type[Body], body: dict[str, Any]) -> Body:
    """
    Raises:
        RequestRejected: 400, naming the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        takes = ", ".join(f"`{name}`" for name in model.model_fields)
        raise RequestRejected(
            f"`{field}`: {first['msg'][:1].lower()}{first['msg'][1:]}. This takes {takes}.",
            code="missing_required_parameter" if first["type"] == "missing" else "invalid_value",
            field=field,
        ) from None
