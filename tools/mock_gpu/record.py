"""Budgets and records of the rehearsal, and the tables that docs/gpu_rehearsal.md shows of them. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUDGETS = HERE / "budgets.json"
RECORDS = ("before", "now")
"""names of the records whose figures the page shows, in this order"""
BEGIN, END = "<!-- {name}: begin -->", "<!-- {name}: end -->"


@dataclass(frozen=True)
class Record:
    """Figures of one rehearsal."""

    revision: str
    """commit of rlite"""
    torch: str
    figures: dict[str, float]
    """by "program: figure" """


def record_path(name: str) -> Path:
    """Return the file of a record."""
    return HERE / "results" / f"{name}.json"


def read_record(name: str) -> Record | None:
    """Return a record; None if it was never written."""
    path = record_path(name)
    return Record(**json.loads(path.read_text())) if path.exists() else None


def write_record(name: str, record: Record) -> None:
    """Write a record."""
    record_path(name).parent.mkdir(exist_ok=True)
    record_path(name).write_text(json.dumps(asdict(record), indent=2) + "\n")


def read_budgets() -> dict[str, float]:
    """Return the most that each figure may be.

    Raises:
        ValueError: the file has another form.
    """
    budgets: Any = json.loads(BUDGETS.read_text())
    for figure, most in budgets.items():
        if ": " not in figure or isinstance(most, bool) or not isinstance(most, int | float) or not most >= 0:
            raise ValueError(
                f'{BUDGETS.name}: expected "program: figure" and a number of at least 0, found {figure!r}: {most!r}'
            )
    return budgets


def exceeded(budgets: Mapping[str, float], figures: Mapping[str, float], programs: Iterable[str]) -> Iterator[str]:
    """Yield a line for each budget of these programs that is exceeded, or whose figure is missing.

    Args:
        budgets: the most that each figure may be.
        figures: what was found.
        programs: programs that ran to their end.

    Yields:
        Lines for people.
    """
    ran = set(programs)
    for figure, most in budgets.items():
        if figure.partition(": ")[0] not in ran:
            continue
        found = figures.get(figure, math.nan)
        if math.isnan(found):
            yield f"{figure}: no such figure, and the budget is {shown(most)}"
        elif found > most:
            yield f"{figure}: {shown(found)}, and the budget is {shown(most)}"


def shown(value: float) -> str:
    """Return a figure with three digits, or all digits of a whole number."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(records: Mapping[str, Record], figures: Sequence[str], budgets: Mapping[str, float] | None = None) -> str:
    """Return a Markdown table of figures, a column for each record and, if given, one of budgets."""
    heads = [*records, *([] if budgets is None else ["budget"])]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for figure in figures:
        values = [record.figures.get(figure) for record in records.values()]
        values += [] if budgets is None else [budgets.get(figure)]
        lines.append(f"| {figure} | {' | '.join('' if value is None else shown(value) for value in values)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """Return the tables of the page by name: what is counted, and what is predicted of it."""
    found = {name: record for name in RECORDS if (record := read_record(name)) is not None}
    columns = {f"{name} ({record.revision})": record for name, record in found.items()}
    figures = list(dict.fromkeys(figure for record in found.values() for figure in record.figures))
    figures = [figure for figure in figures if not figure.endswith(": seconds")]
    predicted = [figure for figure in figures if "shapes: " in figure]
    counted = [figure for figure in figures if figure not in predicted]
    budgets = read_budgets()
    return {"counted": table(columns, counted, budgets), "predicted": table(columns, predicted, budgets)}


def with_tables(page: str) -> str:
    """Return the page with its tables replaced."""
    for name, text in tables().items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def write_tables(path: Path) -> None:
    """Replace the tables of the page."""
    path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    write_tables(HERE.parents[1] / "docs" / "gpu_rehearsal.md")
