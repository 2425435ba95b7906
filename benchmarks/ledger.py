"""The ledger of fused code: what each row of `oformer.gpu.ROWS` gains, and whether that is enough to keep it.

`run.py --what ledger` measures; this module says what is switched off in which process, and judges what came out. A
ratio is a time or a memory with something switched off over the median with all rows on, in the same run: 1.25 without
`attention` means that the row saves a fifth of the time.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from oformer.errors import unknown_name
from oformer.gpu import ROWS

NAMES = ("ns2-full", "darcy-141", "burgers-2048", "electro@16", "airfoil")
WORKS = ("train", "infer")  # a training step, a prediction
SOLVERS = ("euler", "vorticity")  # rows of the data generators, which neither a training step nor a prediction runs
CANDIDATES = ("lookup", "norm", "rotary", "adam")  # for deletion
TOGETHER, ALL, NONE = "candidates", "all", ""  # what may be switched off beside single rows
COLUMNS = (*(row for row in ROWS if row not in SOLVERS), TOGETHER, ALL)
# Rows that run only as a part of another: what else is off where a row is.
PARTS = {
    "attention": ("sums", "lookup", "norm"),
    "sums": ("lookup", "norm"),
    "lookup": ("norm",),
    "blocks": ("feedforward", "norm"),
}
UNUSED = {"infer": ("adam",)}  # rows that a work cannot use
LIMITS = {"time": 0.10, "memory": 0.20}  # gains from which on a row earns its keep, on one recipe
KEEP, UNCLEAR, BELOW, UNKNOWN = "keep", "unclear", "below", "-"
HEADER = ("recipe", "work", "of", "all on", "spread")


@dataclass(frozen=True)
class Entry:
    """What one process measured; the columns of the CSV file."""

    machine: str
    torch: str
    recipe: str
    precision: str
    batch: int
    points: str
    times: int
    steps: int
    work: str  # train, infer
    off: str  # a row, `candidates` or `all`; empty where all rows are on
    milliseconds: float = math.nan
    reserved_mib: float = math.nan
    startup_seconds: float = math.nan  # from the start of the process to the end of the first training step
    time_ratio: float = math.nan  # relative to the median with all rows on
    memory_ratio: float = math.nan
    startup_ratio: float = math.nan
    failure: str = ""

    @property
    def group(self) -> tuple[str, ...]:
        """What two entries must share for their numbers to have a ratio."""
        return (self.machine, self.torch, self.recipe, self.precision, str(self.batch), self.points, self.work)


class Line(NamedTuple):
    """One line of the table: the time, the memory or the start-up of a recipe's training step or prediction."""

    recipe: str
    work: str
    of: str  # time, memory, start-up
    base: float  # the median with all rows on
    spread: float  # of the repeats with all rows on: largest minus smallest, over the median
    ratios: dict[str, float]  # by what is off
    judged: bool
    failed: frozenset[str] = frozenset()  # columns whose process failed

    def verdict(self, column: str) -> str:
        """Whether a ratio reaches the limit, with the spread as its error."""
        gain = self.ratios.get(column, math.nan) - 1
        if self.judged and column in self.failed:
            return UNCLEAR
        if not self.judged or math.isnan(gain) or math.isnan(self.spread):
            return UNKNOWN
        limit = LIMITS[self.of]
        if self.spread > limit:  # then one measurement without the row proves nothing
            return UNCLEAR
        if gain - self.spread >= limit:
            return KEEP
        return UNCLEAR if gain + self.spread >= limit else BELOW

    def cell(self, column: str) -> str:
        """A ratio for people, marked `*` where it earns the row its keep and `~` where it is within the spread."""
        ratio = self.ratios.get(column, math.nan)
        if math.isnan(ratio):
            return "failed" if column in self.failed else "-"
        within = abs(ratio - 1) <= self.spread
        return f"{'~' if within else ''}{ratio:.2f}{'*' if self.verdict(column) == KEEP else ''}"


def chosen_columns(names: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of `--rows`, in the order of the table."""
    for name in names or ():
        if name not in COLUMNS:
            raise unknown_name("column of the ledger for --rows", name, COLUMNS)
    return tuple(column for column in COLUMNS if names is None or column in names)


def switched_off(column: str) -> tuple[str, ...]:
    """The rows that a column switches off."""
    return {NONE: (), TOGETHER: CANDIDATES, ALL: tuple(ROWS)}.get(column, (column,))


def fused(column: str) -> str:
    """The value of OFORMER_FUSED for a column."""
    off = switched_off(column)
    if len(off) in (0, len(ROWS)):
        return "0" if off else "1"
    return ",".join(row for row in ROWS if row not in off)


def order(columns: Sequence[str], work: str, repeats: int) -> list[str]:
    """What is off in one process after the other; the repeats with all rows on lie evenly between the columns."""
    columns = [column for column in columns if column not in UNUSED.get(work, ())]
    cuts = [round(i * len(columns) / (repeats - 1)) for i in range(repeats)]
    found = [NONE]
    for first, last in itertools.pairwise(cuts):
        found += [*columns[first:last], NONE]
    return found


def with_ratios(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of one run with their ratios to the medians with all rows on."""
    found = []
    for entry in entries:
        on = [e for e in entries if e.group == entry.group and e.off == NONE and not e.failure]
        if on and not entry.failure:
            entry = replace(
                entry,
                time_ratio=entry.milliseconds / _median(e.milliseconds for e in on),
                memory_ratio=entry.reserved_mib / (_median(e.reserved_mib for e in on) or math.nan),
                startup_ratio=entry.startup_seconds / _median(e.startup_seconds for e in on),
            )
        found.append(entry)
    return found


def table_lines(entries: Sequence[Entry]) -> list[Line]:
    """The lines of the table, from entries of one run with their ratios."""
    lines = []
    for group in dict.fromkeys(e.group for e in entries):
        ran = [e for e in entries if e.group == group and not e.failure]
        on = [e for e in ran if e.off == NONE]
        if not on:
            continue
        first, off = on[0], [e for e in ran if e.off != NONE]
        failed = frozenset(e.off for e in entries if e.group == group and e.failure and e.off != NONE)
        judged = "thread(s)" not in first.machine  # what a process on a CPU takes differs from run to run
        numbers = (
            ("time", [e.milliseconds for e in on], {e.off: e.time_ratio for e in off}, True),
            ("memory", [e.reserved_mib for e in on], {e.off: e.memory_ratio for e in off}, judged),
            ("start-up", [e.startup_seconds for e in on], {e.off: e.startup_ratio for e in off}, False),
        )
        for of, repeats, ratios, counts in numbers:
            if not any(math.isnan(number) for number in repeats):
                base = _median(repeats)
                # One measurement has no spread: nothing is judged by it.
                spread = (max(repeats) - min(repeats)) / base if base and len(repeats) > 1 else math.nan
                name = f"{first.recipe}@{first.batch}"
                lines.append(Line(name, first.work, of, base, spread, ratios, counts, failed))
    return lines


def shown_columns(lines: Sequence[Line]) -> list[str]:
    """The columns that were measured somewhere, or should have been."""
    return [column for column in COLUMNS if any(column in {*line.ratios, *line.failed} for line in lines)]


def table(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """The table, with its header and the verdicts as the last line."""
    columns = shown_columns(lines)
    units = {"time": ("ms", ".4g"), "memory": ("MiB", ",.0f"), "start-up": ("s", ".1f")}
    rows: list[tuple[str, ...]] = [(*HEADER, *columns)]
    for line in lines:
        unit, shape = units[line.of]
        spread = "-" if math.isnan(line.spread) else f"{line.spread:.1%}"
        base = f"{line.base:{shape}} {unit}"
        rows.append((line.recipe, line.work, line.of, base, spread, *(line.cell(column) for column in columns)))
    rows.append(("verdict", "", "", "", "", *(verdict(lines, column) for column in columns)))
    return rows


def verdict(lines: Sequence[Line], column: str) -> str:
    """Whether a column earns its keep on at least one recipe; `all` is shown and not judged."""
    found = {line.verdict(column) for line in lines} if column != ALL else set()
    return next((v for v in (KEEP, UNCLEAR, BELOW) if v in found), UNKNOWN)


def notes(lines: Sequence[Line], entries: Sequence[Entry]) -> Iterator[str]:
    """What a reader of the table must know, and the cases that failed."""
    yield (
        "Each number under a row is a ratio: measured without that row, over the median with all rows on. More than 1: "
        "the row gains. `~`: the difference is within the spread of the repeats with all rows on."
    )
    yield (
        f"`*` and `keep`: time without the row is at least {LIMITS['time']:.0%} more, or memory at least "
        f"{LIMITS['memory']:.0%} more, also after the spread is subtracted. `unclear`: the limit is within the spread, "
        "the spread exceeds the limit, or the case failed; measure again, with more --steps or on a quieter machine. "
        "`below`: no recipe of this table reaches a limit."
    )
    shown = shown_columns(lines)
    for row, parts in PARTS.items():
        if row in shown:
            yield f"Without `{row}`, {_listed(parts)} cannot run either: the column `{row}` has their gains too."
    if TOGETHER in shown:
        yield f"`{TOGETHER}`: {_listed(CANDIDATES)} off together. Rows that gain little alone may gain more together."
    yield f"{_listed(SOLVERS)} belong to the data generators: `benchmarks/solvers.py` measures those."
    if any("thread(s)" in entry.machine for entry in entries):
        yield "On a CPU most rows have no kernels and change nothing; memory is shown and not judged there."
    for e in entries:
        if e.failure:
            yield f"Failed: {e.recipe}, {e.work}, off: {e.off or 'nothing'}: {e.failure}"


def reasons(lines: Sequence[Line]) -> Iterator[str]:
    """One sentence for each verdict: the recipe and work on which a column gains most relative to its limit."""
    for column in COLUMNS:
        said = verdict(lines, column)
        judged = [line for line in lines if line.verdict(column) != UNKNOWN and column in line.ratios]
        if said == UNKNOWN or not judged:
            continue
        best = max(judged, key=lambda line: (line.verdict(column) == said, _share(line, column)))
        where = f"{best.recipe}, {best.work}, {best.of} {best.ratios[column]:.2f}, spread {best.spread:.1%}"
        yield f"{column}: {said}; most on {where}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    header, *body = (f"| {' | '.join(row)} |" for row in rows)
    rule = f"| {' | '.join('---' if i < 3 else '---:' for i in range(len(rows[0])))} |"
    return "\n".join([header, rule, *body])


def _share(line: Line, column: str) -> float:
    return (line.ratios[column] - 1) / LIMITS[line.of]


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


def _median(numbers: "Iterator[float] | Sequence[float]") -> float:
    return statistics.median(numbers)
