"""What we say on a terminal: sentences to stderr, tables to stdout."""

import sys
from collections.abc import Sequence


def say(text: str) -> None:
    """A line for the person who waits, at once."""
    print(text, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of strings."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*header, header_style="bold")
    for row in rows:
        drawn.add_row(*row)
    # A pipe has no width of its own; folding columns there would lose what a script wants to read.
    Console(width=None if sys.stdout.isatty() else 200).print(drawn)
