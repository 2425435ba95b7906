"""A page of text, tables and pictures as one HTML file that needs nothing else: no network, no scripts.

It can be mailed, opened from a disk or served. Light and dark follow the reader's system, and a phone is wide
enough.
"""

import base64
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from oformer.plots.style import rendered

if TYPE_CHECKING:
    import matplotlib.figure

# What is written under the pictures of a run, by their names.
CAPTIONS = {
    "training": "Training loss by training step, and the error on test samples, or on those held out for validation.",
    "predictions": "The best, the median and the worst of as many test samples as the picture counts: input, true "
    "solution, prediction and their difference.",
    "frames": "The test sample with the median error, at several frames: true solution, prediction, difference.",
    "by-step": "Relative L2 error of each predicted step: the median over test samples, and a band with 80% of them.",
    "by-resolution": "Mean test error of the same weights when the input has another number of points.",
}


def heading(text: str) -> str:
    """The title of the blocks that follow."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{escape(text)}</p>"


def code(caption: str, text: str) -> str:
    """Lines to copy, with a sentence about them."""
    # What scrolls must be reachable by keyboard, hence the tabindex here and below.
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f'<pre tabindex="0"><code>{escape(text.rstrip())}</code></pre></figure>'
    )


def picture(caption: str, figure: "matplotlib.figure.Figure") -> str:
    """A figure as a PNG inside the page, with a sentence about it."""
    width, height = (round(100 * inches) for inches in figure.get_size_inches())
    data, caption = base64.b64encode(rendered(figure)).decode(), escape(caption)
    # Below 50 pixels an inch its text would be too small to read: with less room than that, it scrolls.
    return (
        f'<figure><div class="wide" tabindex="0" role="group" aria-label="{caption}">'
        f'<img src="data:image/png;base64,{data}" alt="{caption}" '
        f'width="{width}" height="{height}" style="min-width:{width // 2}px"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header; the first cell of a row names it. Columns of numbers line up at the right."""
    numeric = [bool(rows) and all(map(_NUMBER.match, column)) for column in zip(*rows, strict=True)]
    style = [' class="number"' * is_numeric for is_numeric in numeric] or [""] * len(header)
    # A header without a name would be read aloud as one: an empty cell heads nothing.
    head = "".join(
        f'<th scope="col"{s}>{escape(name)}</th>' if name else "<td></td>"
        for s, name in zip(style, header, strict=True)
    )
    body = "\n".join(
        f'<tr><th scope="row"{style[0]}>{escape(row[0])}</th>'
        + "".join(f"<td{s}>{escape(cell)}</td>" for s, cell in zip(style[1:], row[1:], strict=True))
        + "</tr>"
        for row in rows
    )
    caption = escape(caption)
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def page_html(title: str, subtitle: str, blocks: Sequence[str]) -> str:
    """A page of blocks from top to bottom; each is what one of the functions above returns."""
    body = "\n".join(blocks)
    # The policy makes the browser keep our promise: pictures from this very file, no scripts, nothing else.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
</header>
{body}
</main>
</body>
</html>
"""


# Cells such as 1,024, -0.5, 1.3e-3, 0.35%, 12 ms, 2.1x, and a dash for none: a column of them lines up right.
_NUMBER = re.compile(r"^(?:[-−+]?[\d.,]+(?:e[-+]?\d+)?\s?\S{0,4}|nan|[-–—]?)$", re.IGNORECASE)

_CSS = """
:root { --ink: #1f2328; --muted: #57606a; --line: #d8dee4; --soft: #f6f8fa; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --muted: #a0a8b1; --line: #3a414a; --soft: #1c2128; --paper: #12161b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 1rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 52rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.2rem); line-height: 1.2; margin: 0 0 .3rem; text-wrap: balance; }
header p { color: var(--muted); font-size: 1.1rem; margin: 0 0 2rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 2.6rem 0 .6rem; }
p { margin: .8rem 0; overflow-wrap: anywhere; }
figure { margin: 1.4rem 0; }
figcaption, caption { color: var(--muted); font-size: .92rem; text-align: left; }
figcaption { margin: .5rem 0; }
caption { padding-bottom: .5rem; }
.wide { overflow-x: auto; margin: 1.4rem 0; }
figure .wide { margin: 0; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.wide:focus-visible, pre:focus-visible { outline: 2px solid #0072b2; outline-offset: 2px; }
img { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .45rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { border-bottom-width: 2px; white-space: nowrap; }
tbody th { font-weight: 500; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
pre { overflow-x: auto; margin: 0; padding: .9rem 1rem; background: var(--soft);
  border: 1px solid var(--line); border-radius: 8px; font-size: .88rem; line-height: 1.5; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print {
  .wide { overflow: visible; }
  img { min-width: 0 !important; }
  figure, tr { break-inside: avoid; }
}
"""
