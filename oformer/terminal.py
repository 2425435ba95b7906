"""Output for people: sentences to stderr, tables and other answers to stdout, and tables of Markdown for pages.

Names of channels, files and recipes come from other people's files. Here they are text and nothing else: no markup, and
no characters that would move the cursor, change colors or reverse the line.
"""

import html
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any


def printable(text: str, kept: str = "\n\t") -> str:
    r"""The text with each character that is not seen written as in Python: an escape character is `\x1b`.

    Args:
        text: anything.
        kept: what stays all the same.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def say(text: str) -> None:
    """A line for the person who waits, at once."""
    print(printable(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """An answer that was asked for, at once."""
    print(printable(text), flush=True)


class Described:
    """An object whose `repr` is one line of facts, which a notebook shows as a table."""

    def _facts(self) -> dict[str, Any]:
        """What tells this object from others, by name, the most important first."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._facts().items())
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(printable(str(value)))}</td></tr>"
            for name, value in self._facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"


class ProgressBar:
    """A progress bar on stderr, for a terminal."""

    def __init__(self, name: str, total: int, done: int):
        """Draw the bar; call `close` at the end.

        Args:
            name: of the work, on the left.
            total: the number of steps.
            done: how many of them are done.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(printable(name), total=total, completed=done, numbers="")
        self._bar.start()

    def show(self, done: int, numbers: str) -> None:
        """Draw it anew, with some numbers behind it."""
        self._bar.update(self._task, completed=done, numbers=numbers)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(printable(text), highlight=False, markup=False, emoji=False)

    def close(self) -> None:
        """Leave the bar as it stands, and go on below it."""
        self._bar.stop()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of strings."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*map(printable, header), header_style="bold")
    for row in rows:
        drawn.add_row(*map(printable, row))
    # A pipe has no width of its own; folding columns there would lose what a script wants to read.
    Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False).print(drawn)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table as Markdown.

    Args:
        header: the names of the columns.
        rows: the cells of each row, from left to right.
        right: numbers of the columns whose cells line up at the right.
    """
    marks = ["---:" if column in right else "---" for column in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, marks, *rows))
