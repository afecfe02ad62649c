"""The generator's mini-language: `name` or `name(argument, ...)`; arguments may be quoted or calls.

Pure parsing; `rekindle.topology.generator.columns` defines the functions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")|(?P<mark>[(),])|"
    r"(?P<bare>[^(),'\"]+))"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_MAX_DEPTH = 32  # limits the recursion of the parser; only null takes an expression


class ExpressionError(ValueError):
    """A column's expression is invalid; the message says why, `hint` what to write."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class GeneratorCall:
    """A name with its arguments, each a text or a call."""

    name: str
    arguments: tuple[str | GeneratorCall, ...] = ()

    def text(self, index: int) -> str:
        """Argument `index` as a text."""
        if index >= len(self.arguments):
            raise ExpressionError(f"{self.name} needs {index + 1} arguments")
        argument = self.arguments[index]
        if isinstance(argument, GeneratorCall):
            raise ExpressionError(f"{self.name} takes no expression as argument {index + 1}")
        return argument

    def call(self, index: int) -> GeneratorCall:
        """Argument `index` as an expression."""
        argument = self.arguments[index]
        return argument if isinstance(argument, GeneratorCall) else parse_expression(argument)

    def number(self, index: int) -> float:
        text = self.text(index)
        try:
            number = float(text)
        except ValueError as e:
            raise ExpressionError(f"{text!r} is not a number") from e
        if not math.isfinite(number):
            raise ExpressionError(f"{text!r} is not a finite number")
        return number

    def integer(self, index: int) -> int:
        text = self.text(index)
        try:
            return int(text)
        except ValueError as e:
            raise ExpressionError(f"{text!r} is not an integer") from e

    def integers(self, *defaults: int | None) -> list[int]:
        """All arguments as integers; None means that the argument is required."""
        self._require_at_most(len(defaults))
        given = range(len(self.arguments))
        return [
            self.integer(i) if i in given or default is None else default
            for i, default in enumerate(defaults)
        ]

    def numbers(self, *defaults: float | None) -> list[float]:
        """All arguments as doubles; None means that the argument is required."""
        self._require_at_most(len(defaults))
        given = range(len(self.arguments))
        return [
            self.number(i) if i in given or default is None else default
            for i, default in enumerate(defaults)
        ]

    def _require_at_most(self, limit: int) -> None:
        if len(self.arguments) > limit:
            raise ExpressionError(f"{self.name} takes at most {limit} arguments")


def parse_expression(text: str) -> GeneratorCall:
    """`"null(0.1, choice(a, 'b c'))"` -> nested calls. Raises ExpressionError."""
    tokens = _tokens(text)
    call, rest = _call(tokens, text, _MAX_DEPTH)
    if rest:
        raise ExpressionError(f"{text!r} has extra text after its end: {rest[0][1]!r}")
    return call


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"{text!r} has an unclosed quote")
        kind = match.lastgroup or ""
        value = match[kind]
        if kind == "quoted":
            tokens.append((kind, value[1:-1].replace(value[0] * 2, value[0])))
        elif value.strip():
            tokens.append((kind, value.strip()))
        at = match.end()
    return tokens


def _call(
    tokens: list[tuple[str, str]], text: str, depth: int
) -> tuple[GeneratorCall, list[tuple[str, str]]]:
    if not depth:
        raise ExpressionError(f"calls are nested more than {_MAX_DEPTH} deep")
    if not tokens or tokens[0][0] != "bare" or not _NAME.fullmatch(tokens[0][1]):
        raise ExpressionError(f"{text!r} does not start with a name")
    name, rest = tokens[0][1], tokens[1:]
    if rest[:1] != [("mark", "(")]:
        return GeneratorCall(name), rest
    rest = rest[1:]
    arguments: list[str | GeneratorCall] = []
    while rest and rest[0] != ("mark", ")"):
        if arguments:
            if rest[0] != ("mark", ","):
                raise ExpressionError(f"{text!r} lacks a comma before {rest[0][1]!r}")
            rest = rest[1:]
        argument, rest = _argument(rest, text, depth)
        arguments.append(argument)
    if not rest:
        raise ExpressionError(f"{text!r} lacks a closing parenthesis")
    return GeneratorCall(name, tuple(arguments)), rest[1:]


def _argument(
    tokens: list[tuple[str, str]], text: str, depth: int
) -> tuple[str | GeneratorCall, list[tuple[str, str]]]:
    if len(tokens) > 1 and tokens[0][0] == "bare" and tokens[1] == ("mark", "("):
        return _call(tokens, text, depth - 1)
    if not tokens or tokens[0][0] == "mark":
        raise ExpressionError(f"{text!r} lacks an argument")
    return tokens[0][1], tokens[1:]
