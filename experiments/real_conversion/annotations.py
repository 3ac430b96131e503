"""The calculator annotations of GSM8K's solutions, such as ``<<48/2=24>>``, and which of them are right."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

_ANNOTATION = re.compile(r"<<([\d+\-*/(). ]{1,100})=([\d+\-. ]{1,20})>>")
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


def count_annotations(text: str) -> tuple[int, int]:
    """Count a solution's calculator annotations, ``<<expression=value>>``, and the right annotations among them.

    A value is right if it is the expression's, rounded or truncated to the decimals that it is written with. An
    annotation that is not closed or cannot be read is wrong. 135-million-parameter models solve few problems; how many
    of their steps are right is a finer figure than the score.

    Args:
        text: The response.

    Returns:
        The number of right annotations and the number of annotations.
    """
    return sum(_is_right(*match.groups()) for match in _ANNOTATION.finditer(text)), text.count("<<")


def _is_right(expression: str, written: str) -> bool:
    try:
        value, result = _value(expression), _value(written)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    unit = Fraction(1, 10 ** len(written.strip().partition(".")[2]))
    return abs(value - result) < unit


def _value(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Raises:
        SyntaxError, ValueError, ZeroDivisionError: If it has none.
    """
    without_leading_zeros = re.sub(r"(?<![\d.])0+(?=\d)", "", expression.strip())
    return _evaluated(ast.parse(without_leading_zeros, mode="eval").body)


def _evaluated(node: ast.expr) -> Fraction:
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_evaluated(left), _evaluated(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_evaluated(operand))
        case ast.Constant(int() | float() as number):
            return Fraction(repr(number))
    raise ValueError(f"expression: expected + - * / of numbers, got {ast.dump(node)[:60]}.")
