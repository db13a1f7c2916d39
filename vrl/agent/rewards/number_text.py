"""Numbers in text, read exactly: what the rules for arithmetic, gsm8k and boxed answers compare."""

import re
from fractions import Fraction

# Sign, currency, digits with commas, decimals, exponent, denominator. A sign right after a digit, letter or bracket is
# an operator. The exponent is bounded: 1e999999999 would be a number of a billion digits.
_SIGN = r"(?:(?<![0-9A-Za-z)\]}])[-+\u2212])?"
_UNSIGNED = r"(?:[0-9](?:[0-9,]*[0-9])?(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})(?:\\?[$\u20ac\u00a3]\s?)?(?P<sign_after>{_SIGN})"
    rf"(?P<number>{_UNSIGNED})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9]))?(?:\s?/\s?(?P<denominator>{_UNSIGNED}))?"
)
_MAX_DIGITS = 1000
_TAIL = re.compile(r"\.?\s*(?:\\?%|\u00b0)?\s*\.?")


def read_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number and nothing else; None otherwise.

    Thousands separators, currency, percent and degree signs and a trailing dot do not matter; "1e-1" is 1/10.
    """
    match = _NUMBER.match(text.strip())
    if match is None or not _TAIL.fullmatch(text.strip(), match.end()):
        return None
    return _value(match)


def first_number(text: str) -> Fraction | None:
    """Return the first number in a text, whatever stands around it; None when there is none."""
    match = _NUMBER.search(text)
    return None if match is None else _value(match)


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, whatever stands around it; None when there is none."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return None if last is None else _value(last)


def _value(match: re.Match[str]) -> Fraction | None:
    if match.end() - match.start() > _MAX_DIGITS:
        return None
    value = Fraction(match["number"].replace(",", "")) * Fraction(10) ** int(match["exponent"] or 0)
    if match["denominator"]:
        denominator = Fraction(match["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    negative = (match["sign"] + match["sign_after"]).translate({0x2212: "-"}).count("-") % 2
    return -value if negative else value
