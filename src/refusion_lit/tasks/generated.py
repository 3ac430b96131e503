"""Generated tasks: the base class, sums, sheets of independent sums, and records to sort.

Every example of a generated task has a unique *key* in ``range(num_keys)``, and different keys give different queries.
A seeded permutation assigns the keys to train, validation and test in turn. Examples are therefore distinct and splits
are disjoint, without storing or comparing examples. Example ``i`` of a split does not depend on the split sizes.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from math import perm
from numbers import Integral
from operator import itemgetter
from random import Random
from typing import Any, overload

from refusion_lit.noise import stable_key
from refusion_lit.tasks.base import SPLITS, Example, Split, Task
from refusion_lit.utils.require import is_number, require

_NUM_FEISTEL_ROUNDS = 4
_NUM_OPERANDS = 90  # 10 to 99
_NUM_SUMS = _NUM_OPERANDS**2
_MAX_TERMS = 64
_PAIRS = tuple(combinations_with_replacement(range(10, 100), 2))  # the smaller number first

_COLUMNS = ("name", "age", "city")
_NAMES = (
    "ada amy ann ben bob cleo dan dora eli emma eve finn gus hana ida ivan joe kim leo mia nina omar rosa tom".split()  # noqa: SIM905
)
_AGES = range(10, 100)
_MIN_ROWS = 2
_CITIES = "accra bern cairo delhi kyiv lima lyon milan oslo paris quito riga rome seoul tokyo turin".split()  # noqa: SIM905


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task whose examples depend on seed, split and index only.

    A subclass defines the number of keys (``num_keys``) and generates a key's example (``draw``). It checks its options
    before it calls this class's ``__post_init__``.

    Attributes:
        num_train: Number of training examples. All examples in all splits are distinct.
        num_validation: Number of validation examples.
        num_test: Number of test examples.
        seed: Random seed.
    """

    num_train: int = 200_000
    num_validation: int = 500
    num_test: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that every split fits into a third of the keys.

        Raises:
            ValueError: If a split size is negative or greater than a third of the keys.
        """
        capacity = self.num_keys // len(SPLITS)
        for split in SPLITS:
            size = self.size(split)
            queries = f"{self.num_keys} distinct queries of {type(self).__name__} with these options"
            expected = f"0 to {capacity} (a third of the {queries})"
            fix = "change it, or the options that make queries longer"
            require(0 <= size <= capacity, f"num_{split}", expected, size, fix)

    @property
    @abstractmethod
    def num_keys(self) -> int:
        """Number of keys; at most 2**1024."""

    @abstractmethod
    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return a key's query and response.

        Args:
            key: Key in ``range(num_keys)``. Different keys give different queries, whatever ``rng`` returns.
            rng: Random numbers for the parts that the key does not determine. Task seed and key seed them.
        """

    def score(self, example: Example, response: str) -> float:
        """Return 1 if the response equals the reference, else 0."""
        return float(response == example.response)

    def size(self, split: Split) -> int:
        """Return the number of examples in a split."""
        return {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}[split]

    def examples(self, split: Split) -> Sequence[Example]:
        """Return a split's examples as a sequence that generates them on access."""
        return LazyExamples(size=self.size(split), make=partial(self.example, split))

    def example(self, split: Split, index: int) -> Example:
        """Generate an example.

        Args:
            split: The split.
            index: Index in ``range(size(split))``.
        """
        name = type(self).__name__
        key = permute(len(SPLITS) * index + SPLITS.index(split), self.num_keys, f"{name}:{self.seed}")
        query, response = self.draw(key, Random(stable_key("task", name, self.seed, str(key))))
        return Example(id=f"{split}-{index}", query=query, response=response)


@dataclass(frozen=True, kw_only=True)
class LazyExamples(Sequence[Example]):
    """A sequence that generates examples on access; its pickle is small for any length.

    Attributes:
        size: Number of examples.
        make: Returns the example at an index in ``range(size)``.
    """

    size: int
    make: Callable[[int], Example]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        chosen = range(self.size)[index]
        return [self.make(i) for i in chosen] if isinstance(chosen, range) else self.make(chosen)


def digits(number: int, base: int, count: int) -> list[int]:
    """Return the ``count`` lowest digits of a number in a base, lowest first.

    >>> digits(1234, 10, 3)
    [4, 3, 2]
    """
    result: list[int] = []
    for _ in range(count):
        number, digit = divmod(number, base)
        result.append(digit)
    return result


def permute(index: int, size: int, seed: str) -> int:
    """Return the image of an index under a seeded permutation of ``range(size)``.

    A Feistel network (Luby and Rackoff, SIAM J. Comput. 1988) permutes the numbers with an even number of bits. Images
    outside the range are permuted again until they are inside (cycle walking; Black and Rogaway, CT-RSA 2002). Time and
    memory do not grow with ``size``.

    Args:
        index: Index in ``range(size)``.
        size: From 1 to 2**1024.
        seed: Selects the permutation.

    >>> sorted(permute(index, 5, seed="a") for index in range(5))
    [0, 1, 2, 3, 4]
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left = value >> half
        right = value & mask
        for number in range(_NUM_FEISTEL_ROUNDS):
            digest = hashlib.blake2b(f"{seed}:{number}:{right:x}".encode()).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        value = left << half | right
        if value < size:
            return value


@dataclass(frozen=True, kw_only=True)
class Additions(GeneratedTask):
    """Two to five sums of two two-digit numbers: the response to ``12+34,56+78>`` is ``12+34=46;56+78=134;``.

    The key determines the first ``min_terms`` sums. The number of sums is uniformly distributed.

    Attributes:
        min_terms: Minimum number of sums in a query, 1 to 64.
        max_terms: Maximum number of sums in a query, ``min_terms`` to 64.

    >>> task = Additions()
    >>> example = task.examples("test")[1]
    >>> example.query, example.response
    ('92+13,56+83>', '92+13=105;56+83=139;')
    >>> task.score(example, example.response)
    1.0
    """

    min_terms: int = 2
    max_terms: int = 5

    def __post_init__(self) -> None:
        require_between("min_terms", self.min_terms, 1, _MAX_TERMS)
        require_between("max_terms", self.max_terms, self.min_terms, _MAX_TERMS)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """8100 sums to the power ``min_terms``."""
        return _NUM_SUMS**self.min_terms

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return the sums, and the sums with their results."""
        num_terms = rng.randint(self.min_terms, self.max_terms)
        number = key + self.num_keys * rng.randrange(_NUM_SUMS ** (num_terms - self.min_terms))
        operands = [10 + digit for digit in digits(number, _NUM_OPERANDS, 2 * num_terms)]
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        query = ",".join([f"{a}+{b}" for a, b in pairs]) + ">"
        response = "".join([f"{a}+{b}={a + b};" for a, b in pairs])
        return query, response

    def characters(self) -> str:
        """Return digits, operators and separators."""
        return "0123456789+=,;>"


@dataclass(frozen=True, kw_only=True)
class Sheet(GeneratedTask):
    """Eight sums or non-negative differences: the response to ``30+75=...;77-47=...;`` is ``30+75=105;77-47=030;``.

    The query has the same length as the response, and no cell depends on another. Decoding all cells in parallel
    therefore loses no accuracy.

    The key determines the unordered pair of numbers in each cell. A cell is a sum with probability 0.5.

    Attributes:
        num_terms: Number of cells in a query, 1 to 64.

    >>> example = Sheet(num_terms=2).examples("test")[0]
    >>> example.query, example.response
    ('53+67=...;79-48=...;', '53+67=120;79-48=031;')
    """

    num_terms: int = 8

    def __post_init__(self) -> None:
        require_between("num_terms", self.num_terms, 1, 64)
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """4095 unordered pairs to the power ``num_terms``."""
        return len(_PAIRS) ** self.num_terms

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return a sheet with blank results, and the sheet with results."""
        questions: list[str] = []
        answers: list[str] = []
        for digit in digits(key, len(_PAIRS), self.num_terms):
            small, large = _PAIRS[digit]
            if rng.random() < 0.5:
                question = f"{large}-{small}="
                result = large - small
            else:
                first, second = (small, large) if rng.random() < 0.5 else (large, small)
                question = f"{first}+{second}="
                result = first + second
            questions.append(f"{question}...;")
            answers.append(f"{question}{result:03d};")
        return "".join(questions), "".join(answers)

    def characters(self) -> str:
        """Return digits, operators, blank and separator."""
        return "0123456789+-=.;"


@dataclass(frozen=True, kw_only=True)
class Records(GeneratedTask):
    """People to sort by name, age or city; the values of a column are distinct, so there are no ties.

    Responses have long-range dependencies and a fixed format: the response to ``sort by age: eve 82 rome; bob 31 oslo``
    is ``[{"name":"bob","age":31,"city":"oslo"},{"name":"eve","age":82,"city":"rome"}]``.

    A query has two or more rows. The number of rows is uniformly distributed. The key determines name and age in the
    first two rows.

    Attributes:
        max_rows: Maximum number of rows in a query, 2 to 16.

    >>> example = Records(max_rows=2).examples("test")[0]
    >>> example.query
    'sort by name: ivan 27 milan; ida 18 tokyo'
    >>> example.response
    '[{"name":"ida","age":18,"city":"tokyo"},{"name":"ivan","age":27,"city":"milan"}]'
    """

    max_rows: int = 4

    def __post_init__(self) -> None:
        require_between("max_rows", self.max_rows, _MIN_ROWS, len(_CITIES))
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """Number of choices of distinct names and ages for two rows."""
        return perm(len(_NAMES), _MIN_ROWS) * perm(len(_AGES), _MIN_ROWS)

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return unsorted rows, and the sorted rows as JSON."""
        num_rows = rng.randint(_MIN_ROWS, self.max_rows)
        num_more = num_rows - _MIN_ROWS
        num_left = (len(_NAMES) - _MIN_ROWS, len(_AGES) - _MIN_ROWS)
        number = key + self.num_keys * rng.randrange(perm(num_left[0], num_more) * perm(num_left[1], num_more))
        names = list(_NAMES)
        ages = list(_AGES)
        cities = rng.sample(_CITIES, num_rows)
        rows: list[dict[str, Any]] = []
        for city in cities:
            number, name_index = divmod(number, len(names))
            number, age_index = divmod(number, len(ages))
            rows.append({"name": names.pop(name_index), "age": ages.pop(age_index), "city": city})
        column = rng.choice(_COLUMNS)
        listed = "; ".join([f"{row['name']} {row['age']} {row['city']}" for row in rows])
        rows.sort(key=itemgetter(column))
        return f"sort by {column}: {listed}", json.dumps(rows, separators=(",", ":"))

    def score(self, example: Example, response: str) -> float:
        """Return 1 for JSON with the same value as the reference, else 0.

        Spaces between JSON tokens and the order of an object's keys do not matter. The order of the rows matters, and
        repeated keys are wrong.
        """
        try:
            return float(_parse_json(response) == _parse_json(example.response))
        except (ValueError, RecursionError):
            return 0.0

    def characters(self) -> str:
        """Return the letters of columns, names and cities, digits, and the punctuation of JSON."""
        words = "".join((*_COLUMNS, *_NAMES, *_CITIES, "sort by"))
        return "".join(sorted(set(words + '0123456789:;[]{},"')))


def _parse_json(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON; objects become sorted lists of pairs, which keep repeated keys."""
    return json.loads(text, object_pairs_hook=lambda pairs: sorted(pairs, key=itemgetter(0)))


def require_between(option: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse an integer outside [``minimum``, ``maximum``]."""
    fix = f"set {option} to {minimum} to {maximum}"
    is_inside = is_number(value, Integral) and minimum <= value <= maximum
    require(is_inside, option, f"an integer from {minimum} to {maximum}", value, fix)
