"""Ranges that stand beside a field in its type: `learning_rate: Positive[float] = 3e-4`.

To a type checker and to the command line the field is its plain type; `common.run.config` reads the
range and refuses values outside it. A field without a range is a choice that can be seen, and is
held to its type alone.
"""

import types
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

T = TypeVar("T", int, float)
SMALLEST = 2.0**-126  # in size, but for 0: XLA takes smaller ones for 0
LARGEST = {bool: 1, int: 2**31 - 1, float: 2.0**128 - 2.0**104}  # of 32 bits, as JAX computes


class Range(NamedTuple):
    """Limits of a number, of which each may be missing."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a number lies inside."""
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least:g} and {self.at_most:g}"
        words = {
            "above {:g}": self.above,
            "{:g} or more": self.at_least,
            "{:g} or less": self.at_most,
            "below {:g}": self.below,
        }
        return " and ".join(word.format(x) for word, x in words.items() if x is not None)


Finite = Annotated[T, Range()]
Positive = Annotated[T, Range(above=0)]
NonNegative = Annotated[T, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]
ProperFraction = Annotated[float, Range(at_least=0, below=1)]


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of a field; an integer is a float as well."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, parts[0])
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(x, parts[0]) for x in value)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if hint is Any or not isinstance(hint, type):
        return True  # a hint of a user's own that only a type checker knows
    if hint is str:
        return isinstance(value, str) and "\0" not in value  # which no path or module can hold
    return isinstance(value, int | float if hint is float else hint)


def accepted(hint: Any) -> str:
    """Say what a field takes."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return "a list of words"
    if get_origin(hint) in (Union, types.UnionType):
        return accepted(get_args(hint)[0])
    known = {int: "a whole number", float: "a number", bool: "true or false"}
    return known.get(hint, "a text")
