"""JSON values of a request's body, taken with their types checked; and the error that says what is wrong."""

from typing import Any


class ApiError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The JSON that clients of the API know."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


ARTICLES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def get(given: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """The value of a name, of the given Python type; a float may be written as an integer.

    Raises ApiError: 400, it is of another type.
    """
    value: Any = given.get(name, default)
    if value is default:
        return value
    # In Python a bool is an int, in JSON it is not; and every JSON number may be a float.
    if kind is float and type(value) is int:
        return as_float(value)
    if type(value) is not kind:
        raise ApiError(400, f"{name} is {kind_of(value)}; it must be {ARTICLES[kind]}", name)
    return value


def as_float(value: float) -> float:
    """A JSON number as a float: an integer beyond its range is infinite."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def kind_of(value: Any) -> str:
    """A JSON value in an error's words: a number itself, of other values what they are."""
    return repr(value) if type(value) in (bool, int, float) else ARTICLES[type(value)]
