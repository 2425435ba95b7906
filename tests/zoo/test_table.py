"""The cards of the zoo beside the numbers of the paper, and the pages into which they are written."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from oformer import zoo
from oformer.checkpoint import zoo_names
from oformer.errors import InputError
from oformer.experiments.published import ROWS
from oformer.zoo import table
from oformer.zoo.card import read_card
from oformer.zoo.table import HEADLINES, NOT_YET, OTHER_SETTINGS, between_marks, full_table, short_table, write_results
from tests.zoo.cards import card_of

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_table_shows_ours_beside_the_paper_s(tmp_path):
    second = dataclasses.replace(card_of().seeds[0], seed=2, scores=card_of(error=0.3).scores)
    faithful = dataclasses.replace(card_of("ns2-part"), seeds=(card_of().seeds[0], second))
    cards = {"ns2-part": faithful, "ns2-part-plus": card_of("ns2-part-plus", error=0.12, by_step=[0.1, 0.14])}
    lines = {line.split("`")[1]: line for line in full_table(cards).splitlines()[2:]}
    assert lines["ns1"].count(NOT_YET) == 1
    assert "| 0.1755 ± 0.0059 | 0.1399 (Galerkin Transformer) | 0.2000 ± 0.1414 | 0.1200 |" in lines["ns2-part"]
    assert "`oformer train ns2-part`<br>`oformer train ns2-part-plus`" in lines["ns2-part"]
    short = short_table(cards)
    assert "(`ns2-part`) | relative L2, % | 17.55 | 13.99 (Galerkin Transformer) | 20.00 ± 14.14 | 12.00 |" in short
    assert "lower in 0 and higher in 1. Not trained yet: `ns1`, `ns2-full`" in short


def test_the_front_page_counts_what_is_lower_and_higher_than_the_paper():
    cards = {"darcy-141": card_of("darcy-141", error=0.0125), "ns3": card_of("ns3", error=0.1706)}
    assert "lower in 1 and higher in 1." in short_table(cards)
    every = {row.recipe: card_of(row.recipe, error=0.0, channels=3) for row in ROWS if row.table != "Section 4.2"}
    assert short_table(every).endswith(" Not trained yet: `airfoil`.")


def test_each_problem_of_the_front_page_can_be_measured_again():
    problems = {row.recipe.partition("-")[0].rstrip("123") for row in ROWS}
    assert {name.partition("-")[0].rstrip("123") for name in HEADLINES} == problems
    assert set(HEADLINES) <= set(zoo_names())


def test_a_row_with_settings_of_others_says_so_beside_what_those_of_the_paper_give():
    (line,) = [line for line in full_table({"ns1": card_of("ns1", error=0.011)}).splitlines() if "`ns1`" in line]
    assert "0.0110 (settings of a public script; 0.0127 with those of the paper's text)" in line
    lines = (ROOT / "runs" / "ns1-as-printed" / "journal.jsonl").read_text().splitlines()
    last = [entry for entry in map(json.loads, lines) if entry["kind"] == "evaluate"][-1]
    assert f"{last['error']:.4f}" == f"{OTHER_SETTINGS['ns1'][1]:.4f}"


def test_results_are_rewritten_between_their_marks_and_nothing_else(here, tmp_path):
    shutil.copy(ROOT / "docs" / "results.md", tmp_path / "results.md")
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    card = read_card(here / "tiny")
    flow = dataclasses.replace(card, name="ns2-part", scores=dataclasses.replace(card.scores, by_step=[0.1, 0.2]))
    paths = tmp_path / "results.md", tmp_path / "README.md", tmp_path / "images"
    (tmp_path / "images" / "ns2-part").mkdir(parents=True)
    for name in ("predictions.png", "training.png", "movie.gif"):
        (tmp_path / "images" / "ns2-part" / name).write_bytes(b"\x89PNG")
    write_results({"ns2-part": flow}, *paths)
    page = paths[0].read_text()
    assert "each point has the weight of its cell; the paper's two curves are from its appendix C, with equal" in page
    assert page.count("![") == 4  # two of all operators, and two of those that were drawn of this one
    assert page.index("](images/ns2-part/predictions.png)") < page.index("](images/ns2-part/movie.gif)")
    for image in re.findall(r"\]\((images/[^)]*)\)", page):
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")
    before = (ROOT / "docs" / "results.md").read_text()
    for mark in ("results", "pictures"):
        page, before = (between_marks(text, mark, "", paths[0]) for text in (page, before))
    assert page == before
    assert f"{100 * card.scores.error:.2f}" in paths[1].read_text()
    with pytest.raises(InputError, match="0 pairs of them"):
        between_marks("no marks", "results", "text", paths[0])


def test_the_tables_are_those_of_the_cards(monkeypatch):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    cards = zoo.all_cards(ROOT / "runs")
    assert full_table(cards) in (ROOT / "docs" / "results.md").read_text(), "run `oformer zoo table`"
    assert short_table(cards) in (ROOT / "README.md").read_text(), "run `oformer zoo table`"


def test_the_page_of_the_paper_has_the_numbers_of_its_tables_and_of_our_cards():
    cards = {path.parent.name: read_card(path.parent) for path in ROOT.glob("*/*/card.json")}
    found, header = {}, []
    for line in (ROOT / "docs/paper.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| row"):
            header = cells
        elif line.startswith("| `"):
            shown = dict(zip(header, cells, strict=True))
            found[shown.pop("row").strip("`"), shown.pop("quantity", "").partition(",")[0]] = shown
    assert len(found) == len(ROWS)
    for row in ROWS:
        quantity = row.quantity.removeprefix("squared error of ").replace("relative L2", "")
        ours = table._error(row, cards[row.recipe]) if row.recipe in cards else NOT_YET
        expected = {model: row.number(error) for model, error in row.errors.items()}
        assert found[row.recipe, quantity] == {**expected, "ours": ours}, row
