"""The cards of the zoo beside the numbers of the paper: tables for docs/results.md and README.md, and figures."""

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from oformer.errors import InputError
from oformer.experiments.published import BY_SHARE, OURS, PLUS, ROWS, Row
from oformer.experiments.recipes import RECIPES
from oformer.files import write_text
from oformer.plots import lines, page, style
from oformer.terminal import markdown_table
from oformer.zoo.card import SHARES, ModelCard

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_YET = "not trained yet"
# Rows that are trained with other settings than the paper's text has: whose, and the error with those of the text.
OTHER_SETTINGS = {"ns1": ("settings of a public script", 0.0127)}  # runs/ns1-as-printed
# The lines of the front page: of each problem a row whose weights are shipped, so that a reader can measure it again
# (of Navier-Stokes two, since the number of sequences decides), and its first quantity.
HEADLINES = {
    "burgers-2048": "Burgers, 2,048 points",
    "darcy-141": "Darcy, 141 × 141 points",
    "ns2-part": "Navier-Stokes, 1,000 sequences",
    "ns2-full": "Navier-Stokes, 9,800 sequences",
    "electro-aug": "electrostatics, unseen shape",
    "magneto-aug": "magnetostatics, unseen shape",
    "airfoil": "flow around an airfoil",
}
BEGIN, END = "<!-- {}: written by `oformer zoo table` -->", "<!-- end of {} -->"


def full_table(cards: Mapping[str, ModelCard]) -> str:
    """Every row of the paper's tables that OFormer has, with what was trained here and how."""
    header = (
        "row", "quantity", "paper's OFormer", "best in the paper", "ours, faithful", "ours, plus",
        "parameters (paper)", "steps", "seeds", "command",
    )  # fmt: skip
    table = []
    for row in ROWS:
        faithful, plus = cards.get(row.recipe), cards.get(row.recipe + PLUS)
        trained = [card for card in (faithful, plus) if card is not None]
        steps = [card.seeds[0].steps for card in trained] or [RECIPES[row.recipe].training.steps]
        commands = [card.command for card in trained] or [f"oformer train {row.recipe}"]
        name, best = row.best
        table.append(
            (
                f"`{row.recipe}` ({row.table})",
                row.quantity + (row.multiple and f",{row.multiple}"),
                f"{row.number(row.errors[OURS])} ± {row.number(row.spread)}",
                f"{row.number(best)} ({name})",
                _ours(row, faithful),
                _ours(row, plus) if plus else "",
                "<br>".join([*(f"{card.parameters:,}" for card in trained), f"({row.parameters:.2f} M)"]),
                "<br>".join(f"{number:,}" for number in steps),
                "<br>".join(str(len(card.seeds)) for card in trained),
                "<br>".join(f"`{command}`" for command in commands),
            )
        )
    return markdown_table(header, table, right=(7, 8))


def short_table(cards: Mapping[str, ModelCard]) -> str:
    """One line for each problem, and in how many of all rows ours is lower or higher than the paper's OFormer."""
    header = ("problem", "test error", "paper's OFormer", "best in the paper", "ours", "ours, *plus*")
    first = {row.recipe: _in_percent(row) for row in reversed(ROWS)}
    table = []
    for recipe, problem in HEADLINES.items():
        row, card, plus = first[recipe], cards.get(recipe), cards.get(recipe + PLUS)
        name, best = row.best
        table.append(
            (
                f"{problem} (`{recipe}`)",
                row.quantity + (", %" if row.quantity.startswith("relative") else row.multiple and f",{row.multiple}"),
                row.number(row.errors[OURS]),
                f"{row.number(best)} ({name})",
                _error(row, card) if card else NOT_YET,
                _error(row, plus) if plus else "",
            )
        )
    ours = [(row, statistics.fmean(_errors(row, cards[row.recipe]))) for row in ROWS if row.recipe in cards]
    lower = sum(error < row.errors[OURS] for row, error in ours)
    missing = dict.fromkeys(f"`{row.recipe}`" for row in ROWS if row.recipe not in cards)
    tally = (
        f"Of the {len(ROWS)} test errors of OFormer in the paper's Tables 1 to 4 and section 4.2, ours are lower in "
        f"{lower} and higher in {len(ours) - lower}."
    )
    if missing:
        tally += f" {NOT_YET.capitalize()}: {', '.join(missing)}."
    return f"{markdown_table(header, table)}\n\n{tally}"


def _in_percent(row: Row) -> Row:
    """The row with relative errors in percent."""
    if not row.quantity.startswith("relative"):
        return row
    errors = {model: 100 * row.unit * error for model, error in row.errors.items()}
    return dataclasses.replace(row, unit=1e-2, digits=row.digits - round(math.log10(100 * row.unit)), errors=errors)


def _errors(row: Row, card: ModelCard) -> list[float]:
    """The shipped weights' error, or that of each of several seeds."""
    runs = card.seeds if len(card.seeds) > 1 else [card]
    return [row.measured(run.scores) for run in runs]


def _error(row: Row, card: ModelCard) -> str:
    """The shipped weights' error, or the mean and spread of several seeds."""
    errors = _errors(row, card)
    spread = f" ± {row.number(statistics.stdev(errors))}" if len(errors) > 1 else ""
    return row.number(statistics.fmean(errors)) + spread


def _ours(row: Row, card: ModelCard | None) -> str:
    """The error, and what a reader must know of it."""
    if card is None:
        return NOT_YET
    text = _error(row, card)
    if not card.with_weights:
        text += " (weights not shipped)"
    if card.averaged is not None and row.quantity == "relative L2":
        text += f" ({row.number(card.averaged.error / row.unit)} averaged over {card.averaged.symmetries} symmetries)"
    if card.name in OTHER_SETTINGS:
        settings, as_printed = OTHER_SETTINGS[card.name]
        text += f" ({settings}; {row.number(as_printed)} with those of the paper's text)"
    return text


def card_pictures(card: ModelCard) -> dict[str, "Figure"]:
    """Figures that a card alone can draw, by name."""
    figures = {"by-share": lines.error_by_share({card.name: by_share(card)})}
    if len(card.scores.by_step) > 1:
        figures["over-time"] = lines.error_over_time({card.name: card.scores.by_step})
    return figures


def by_share(card: ModelCard) -> dict[float, float]:
    """Errors by the share of the input points."""
    sparse = [row for row in card.views if row.kind == "sparse"]
    return {1.0: card.scores.error, **{share: row.error for share, row in zip(SHARES, sparse, strict=True)}}


def all_pictures(cards: Mapping[str, ModelCard]) -> dict[str, "Figure"]:
    """Figures of all operators together, by the name of their file; those without anything to show are left out."""
    figures = {}
    in_time = {name: card.scores.by_step for name, card in cards.items() if len(card.scores.by_step) > 1}
    if in_time:
        figures["results-over-time"] = lines.error_over_time(in_time)
    shares = {name: by_share(card) for name, card in cards.items() if name.startswith("ns")}
    if shares:
        of_the_paper = {f"paper's ns2-full, {how}": row for how, row in BY_SHARE.items()}
        # Sums over random points of equal weight are poorer quadrature: the curves differ by that besides the training.
        axis = "share of the input points that is given\n(ours: weighted by their cells; the paper's: equal weights)"
        figures["results-by-share"] = lines.error_by_share(shares, of_the_paper, axis=axis)
    return figures


_CAPTIONS = {
    "results-over-time": "Mean test error of each predicted step, from the cards.",
    "results-by-share": "Test error when the operator is given a random share of the input points. Ours are from the "
    "cards, and each point has the weight of its cell; the paper's two curves are from its appendix C, with equal "
    "weights: one operator was trained with dropped points, the other with all points. With equal weights our errors "
    "are larger too, as Row by row says of ns2-part.",
}
# Of what `oformer plot NAME --out IMAGES/NAME --movie IMAGES/NAME/movie.gif` draws of one operator.
_SHOWN = {
    "predictions.png": page.CAPTIONS["predictions"],
    "movie.gif": "Truth, prediction and error over time of the sample with the median error.",
    "by-resolution.png": page.CAPTIONS["by-resolution"],
}


def _drawn(cards: Mapping[str, ModelCard], images: Path) -> dict[str, str]:
    """Captions of the pictures that have been left for an operator, by their place."""
    return {
        f"{name}/{file}": f"{name}: {caption[0].lower()}{caption[1:]}"
        for name in cards
        for file, caption in _SHOWN.items()
        if (images / name / file).is_file()
    }


def write_results(cards: Mapping[str, ModelCard], results: Path, readme: Path, images: Path) -> list[Path]:
    """Rewrite the tables and the list of pictures between their marks, and the figures that show all operators.

    Args:
        cards: of the zoo, by name.
        results: the page of results.
        readme: the front page.
        images: the folder of the figures; those of one operator are shown where its folder in it holds some.

    Returns:
        What was written.
    """
    figures = all_pictures(cards)
    for name, figure in figures.items():
        style.save_figure(images / f"{name}.png", figure)
    place = images.relative_to(results.parent) if images.is_relative_to(results.parent) else images
    captions = {**{f"{name}.png": _CAPTIONS[name] for name in figures}, **_drawn(cards, images)}
    shown = [f"![{words}]({(place / name).as_posix()})\n\n*{words}*" for name, words in captions.items()]
    for path, mark, text in (
        (results, "results", full_table(cards)),
        (results, "pictures", "\n\n".join(shown)),
        (readme, "results", short_table(cards)),
    ):
        write_text(path, between_marks(path.read_text(encoding="utf-8"), mark, text, path))
    return [*(images / f"{name}.png" for name in figures), results, readme]


def between_marks(page: str, name: str, text: str, where: Path) -> str:
    """The page with what stands between the marks of that name replaced.

    Args:
        page: with both marks.
        name: of the marks.
        text: to put between them.
        where: the page comes from, for the error message.
    """
    begin, end = BEGIN.format(name), END.format(name)
    found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", page, re.S)
    if len(found) != 1:
        raise InputError(f"the marks `{begin}` and `{end}` in {where}", f"{len(found)} pairs of them", "Put them back")
    return page.replace(found[0], f"{begin}\n{text}\n{end}")
