"""What we say on a terminal: sentences to stderr, tables and other answers to stdout.

Names of channels, files and recipes come from other people's files. Here they are text and nothing else: no markup, and
no characters that would move the cursor, change colors or reverse the line.
"""

import sys
import unicodedata
from collections.abc import Sequence


def printable(text: str, kept: str = "\n\t") -> str:
    r"""The text with each character that is not seen written as in Python: an escape character is `\x1b`.

    Args:
        text: anything.
        kept: what stays all the same.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def say(text: str) -> None:
    """A line for the person who waits, at once."""
    print(printable(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """An answer that was asked for, at once."""
    print(printable(text), flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of strings."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*map(printable, header), header_style="bold")
    for row in rows:
        drawn.add_row(*map(printable, row))
    # A pipe has no width of its own; folding columns there would lose what a script wants to read.
    Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False).print(drawn)
