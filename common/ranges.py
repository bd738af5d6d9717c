"""Ranges that stand beside a field in its type: `learning_rate: Positive[float] = 3e-4`.

To a type checker and to the command line the field is its plain type; `common.run.config` reads the
range and refuses values outside it. A field without a range is a choice that can be seen.
"""

from typing import Annotated, NamedTuple, TypeVar

T = TypeVar("T", int, float)


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


Positive = Annotated[T, Range(above=0)]
NonNegative = Annotated[T, Range(at_least=0)]
Fraction = Annotated[float, Range(at_least=0, at_most=1)]
ProperFraction = Annotated[float, Range(at_least=0, below=1)]
