"""Tables and figures of the paper from data to page, scaled down to two steps."""

import dataclasses
import json

import pytest

from oformer.cli import main
from oformer.errors import TrainingDiverged
from oformer.experiments.items import BASELINE_ROWS, ITEMS
from oformer.experiments.published import ROWS
from oformer.experiments.recipes import BASELINES, RECIPES, recipe_named
from oformer.experiments.scaled_down import scaled_down
from oformer.models import OFormerConfig
from oformer.reproduce import SHOWN, plan, reproduce, seconds_per_step

TINY = ["--training.steps", "2", "--training.log-every", "1", "--data.train", "6", "--data.test", "3"]


def tiny(recipe):
    """Two steps on six samples."""
    training = dataclasses.replace(recipe.training, steps=2, batch=2, log_every=1)
    data = dataclasses.replace(recipe.data, train=6, test=3, limit=recipe.data.limit and 4)
    return dataclasses.replace(recipe, data=data, training=training)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder that the tests share: what one of them made, another one finds."""
    return tmp_path_factory.mktemp("work")


def made(name, work, **changes):
    """The page of an item whose recipes may be fewer."""
    item = dataclasses.replace(ITEMS[name], **changes)
    runs = plan(item, work / "runs", quick=True, change=tiny)
    return reproduce(item, runs, work / name, work / "datasets", "cpu", quiet=True)


def cells(page):
    """The rows of the table of a page."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if "---" not in line]


def test_every_row_and_every_baseline_of_the_tables_is_in_an_item():
    tables = {name: item for name, item in ITEMS.items() if item.kind == "errors"}
    listed = {recipe for item in tables.values() for recipe in item.recipes}
    assert listed == {row.recipe for row in ROWS} | set(BASELINES)
    assert set(BASELINE_ROWS) == set(BASELINES)
    for item in ITEMS.values():
        assert item.kind in SHOWN
        for name in item.recipes:
            assert item.recipe(name).training.steps == item.steps.get(
                name.partition("+")[0], recipe_named(name).training.steps
            )


def test_scaled_down_recipes_keep_what_makes_them_and_take_a_moment_for_a_step():
    names = {name for item in ITEMS.values() for name in item.recipes}
    for name in names:
        full, small = recipe_named(name), scaled_down(recipe_named(name))
        assert small.name == f"{name}-quick"
        assert type(small.model) is type(full.model)
        assert type(small.problem) is type(full.problem)
        assert (small.training.loss, small.training.optimizer) == (full.training.loss, full.training.optimizer)
        if isinstance(full.model, OFormerConfig):
            kept = ("attention", "norm", "start", "position")
            assert [getattr(small.model, n) for n in kept] == [getattr(full.model, n) for n in kept]
            assert small.model.encoder.width < full.model.encoder.width
    large, base = (scaled_down(recipe_named(name)).model for name in ("ns2-full+size=large", "ns2-full"))
    assert large.encoder.width > base.encoder.width
    for name in ("darcy-141", "ns3", "ns2-part-mwt", "darcy-141-galerkin-transformer", "electro-aug-gnn", "airfoil"):
        assert 0 < seconds_per_step(scaled_down(RECIPES[name]), "cpu") < 60


def test_a_table_from_one_command_has_the_paper_s_numbers_beside_ours_and_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "table2", "--quick", "--device", "cpu", *TINY]
    assert main([*command, "--plan"]) == 0
    announced = capsys.readouterr()
    assert "burgers-2048-mwt-quick" in announced.out
    assert "min of training, beside the data" in announced.err
    assert not (tmp_path / "outputs").exists()
    assert main(command) == 0
    page = tmp_path / "outputs/reproduce-quick/table2/README.md"
    rows = cells(page)
    assert rows[0][:5] == ("row", "quantity", "model", "paper", "here")
    found = {(row[0], row[2]): row[3:] for row in rows[1:]}
    assert len(found) == 15
    assert found["burgers-512", "FNO"] == ("3.15", "no recipe", "", "")
    for model, printed in (("OFormer", "1.30"), ("FNO+", "0.72"), ("MWT", "1.86"), ("Fourier Transformer", "1.12")):
        paper, here, parameters, speed = found["burgers-2048", model]
        assert paper == printed
        assert 10 < float(here) < 1e5  # two steps: the error of nothing, in thousandths
        assert int(parameters.replace(",", "")) > 100
        assert float(speed) > 0
    records = {record["recipe"]: record for record in json.loads((page.parent / "runs.json").read_text())}
    ours = records["burgers-2048-quick"]["scores"]["error"]
    assert found["burgers-2048", "OFormer"][1] == f"{ours / 1e-3:.2f}"
    journals = {path: path.read_bytes() for path in tmp_path.glob("outputs/reproduce-quick/runs/*/journal.jsonl")}
    assert len(journals) == 6
    before = page.read_text()
    page.unlink()
    capsys.readouterr()
    assert main(command) == 0
    assert "trained" in capsys.readouterr().out
    assert page.read_text() == before
    assert all(path.read_bytes() == content for path, content in journals.items())


def test_variants_stand_beside_the_recipe_that_they_change_and_may_diverge(work, monkeypatch):
    from oformer import reproduce as module

    train = module.train

    def diverging(recipe, folder, *arguments, **options):
        if "start=xavier-quick" in recipe.name:
            raise TrainingDiverged(1, "nothing saved")
        return train(recipe, folder, *arguments, **options)

    monkeypatch.setattr(module, "train", diverging)
    names = ("burgers-2048", "burgers-2048+start=xavier-scaled", "burgers-2048+start=xavier")
    page = made("initialization", work, recipes=names, printed={"burgers-2048": 1.3e-3})
    _, base, scaled, diverged = cells(page)
    assert base[:3] == ("burgers-2048", "unchanged", "0.0013")
    assert base[4] == "1.00"
    assert scaled[1:3] == ("start=xavier-scaled", "drawn only")
    assert float(scaled[3]) / float(base[3]) == pytest.approx(float(scaled[4]), abs=0.006)
    assert diverged[3] == "diverged"
    assert (work / "initialization/errors.png").stat().st_size > 5000


def test_shares_are_weighed_as_in_the_paper_and_as_here(work):
    page = made("sparse", work, recipes=("burgers-2048",), shares=(1.0, 0.5))
    _, paper, equal, gaps = cells(page)
    assert paper == ("burgers-2048", "equal (paper)", "0.0646", "0.2065")
    assert equal[2] == gaps[2]
    assert equal[3] != gaps[3]


def test_an_interrupted_item_says_so(work, monkeypatch):
    from types import SimpleNamespace

    from oformer import reproduce as module

    monkeypatch.setattr(module, "train", lambda *a, **o: SimpleNamespace(finished=False))
    assert made("initialization", work, recipes=("burgers-2048",)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure4", "figure6", "trend", "dropping"])
def test_the_other_kinds_of_items(name, work):
    recipes = {"trend": ("ns3", "airfoil"), "dropping": ("ns3", "ns3+drop=on")}.get(name, ITEMS[name].recipes)
    item = dataclasses.replace(ITEMS[name], recipes=recipes)

    def change(recipe):  # the latents want more samples than channels
        more = dataclasses.replace(recipe, training=tiny(recipe).training)
        return more if recipe.name.startswith("ns-latent") else tiny(recipe)

    runs = plan(item, work / "runs", quick=True, change=change)
    page = reproduce(item, runs, work / name, work / "datasets", "cpu", quiet=True)
    assert len(cells(page)) == 1 + len(recipes)
    assert list(page.parent.rglob("*.png"))


def test_an_unknown_item_and_a_list_of_all(capsys):
    assert main(["reproduce", "tabel2"]) == 2
    assert "Did you mean `table2`" in capsys.readouterr().err
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ITEMS)
