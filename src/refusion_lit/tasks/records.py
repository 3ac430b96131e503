"""Records: sort rows by a column and write them as JSON; the output has long-range dependencies and a fixed format.

The response to ``sort by age: eve 82 rome; bob 31 oslo`` is
``[{"name":"bob","age":31,"city":"oslo"},{"name":"eve","age":82,"city":"rome"}]``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import perm
from operator import itemgetter
from random import Random
from typing import Any

from refusion_lit.tasks.base import GeneratedTask
from refusion_lit.types import Example
from refusion_lit.utils.require import require_between

_COLUMNS = ("name", "age", "city")
_NAMES = (
    "ada amy ann ben bob cleo dan dora eli emma eve finn gus hana ida ivan joe kim leo mia nina omar rosa tom".split()  # noqa: SIM905
)
_AGES = range(10, 100)
_CITIES = "accra bern cairo delhi kyiv lima lyon milan oslo paris quito riga rome seoul tokyo turin".split()  # noqa: SIM905


@dataclass(frozen=True, kw_only=True)
class Records(GeneratedTask):
    """Two to four people to sort by name, age or city; the values of a column are distinct, so there are no ties.

    The key determines name and age in the first ``min_rows`` rows.

    Attributes:
        min_rows: Minimum number of rows in a query, 2 to 16.
        max_rows: Maximum number of rows in a query, ``min_rows`` to 16. The number is uniformly distributed.
    """

    min_rows: int = 2
    max_rows: int = 4

    def __post_init__(self) -> None:
        require_between("min_rows", self.min_rows, 2, len(_CITIES))
        require_between("max_rows", self.max_rows, self.min_rows, len(_CITIES))
        super().__post_init__()

    @property
    def num_keys(self) -> int:
        """All choices of distinct names and distinct ages in ``min_rows`` rows."""
        return perm(len(_NAMES), self.min_rows) * perm(len(_AGES), self.min_rows)

    def draw(self, key: int, rng: Random) -> tuple[str, str]:
        """Return unsorted rows, and the sorted rows as JSON."""
        num_rows = rng.randint(self.min_rows, self.max_rows)
        num_more = num_rows - self.min_rows
        num_left = (len(_NAMES) - self.min_rows, len(_AGES) - self.min_rows)
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

        Spaces between JSON tokens and the order of an object's keys do not matter. The order of the rows does, and
        repeated keys are wrong.
        """
        try:
            return float(_parsed(response) == _parsed(example.response))
        except (ValueError, RecursionError):
            return 0.0

    def characters(self) -> str:
        """Return the letters of columns, names and cities, digits, and the punctuation of JSON."""
        words = "".join((*_COLUMNS, *_NAMES, *_CITIES, "sort by"))
        return "".join(sorted(set(words + '0123456789:;[]{},"')))


def _parsed(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON with each object as a sorted list of pairs, which keeps repeated keys."""
    return json.loads(text, object_pairs_hook=lambda pairs: sorted(pairs, key=itemgetter(0)))
