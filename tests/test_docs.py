"""The documentation: every page is reachable, every link leads somewhere, every block of the how-to pages runs."""

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import oformer
from oformer.cli import COMMANDS, main, parse
from oformer.cli.options import override
from oformer.experiments.published import ROWS
from oformer.experiments.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "runs/README.md", "zoo/README.md")
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.S | re.M)


def blocks(page: Path, *kinds: str) -> list[tuple[str, str]]:
    return [(kind, code) for kind, code in FENCE.findall(page.read_text()) if kind in kinds]


def prose(page: Path) -> str:
    """What is no block of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


def run(page: Path, names: dict, smaller: dict[str, str]) -> dict:
    """Run the Python and the commands of a page in their order, with some sizes made smaller."""
    used = set()
    for kind, code in blocks(page, "python", "bash"):
        for large, small in smaller.items():
            if large in code:
                code, _ = code.replace(large, small), used.add(large)
        if kind == "python":
            exec(compile(code, str(page), "exec"), names)
            continue
        for line in code.splitlines():
            if line.startswith("oformer "):
                assert main(shlex.split(line, comments=True)[1:]) == 0, line
    assert used == set(smaller), "the page no longer says what the test makes smaller"
    return names


def listed(page: Path) -> list[Path]:
    """The pages that the toctrees of a page name."""
    found = []
    for tree in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), re.S | re.M):
        entries = [line for line in tree.splitlines() if line and not line.startswith(":")]
        found += [(page.parent / f"{entry}.md").resolve() for entry in entries]
    return found


def test_every_page_is_in_the_tree_once_and_every_entry_is_a_page():
    found, queue = [], [DOCS / "index.md"]
    while queue:
        page = queue.pop()
        found.append(page)
        queue += listed(page)
    assert sorted(found) == PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_no_line_of_text_is_a_comment(page):
    """Where a number ends a line and its % begins the next, the site would leave the rest of the sentence out."""
    assert not re.findall(r"^\s*%.*", prose(page), re.M)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)", prose(page)):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)", file.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}#{anchor}"


def test_the_api_page_has_the_public_names_and_no_others_of_the_package_itself():
    shown = re.findall(r"(?:autoclass|autofunction|autoexception|py:data):: oformer\.(\w+)$", _text("api.md"), re.M)
    assert sorted(shown) == sorted(oformer.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_commands_are_understood(page):
    for _, code in blocks(page, "bash", "sh"):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["oformer"]:
                assert words[1] in COMMANDS, line
                verb, rest = parse(words[1:])
                assert not rest or words[1] in ("train", "generate", "demo"), line
                if words[1] == "train" and verb.name in RECIPES:
                    assert override(RECIPES[verb.name], rest), line


def test_the_layers_of_the_pages_are_those_of_the_contract():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    rows = [re.findall(r"\w+", row) for row in contract]
    (drawing,) = re.findall(r"^## Import layers\n.*?^```\n(.*?)^```", _text("how-it-works.md"), re.S | re.M)
    assert [line.split(", ") for line in drawing.splitlines()] == rows
    (table,) = re.findall(r"^\| row \|.*\n\|---.*\n((?:\|.*\n)+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()] == rows


def test_the_tree_of_the_page_names_every_module_and_nothing_else():
    (tree,) = re.findall(r"## Where the code is\n\n```\n(.*?)```", _text("how-it-works.md"), re.S)
    for name in re.findall(r"(?:├──|└──) ([\w/.]+)(?:, ([\w/.]+))?", tree):
        for part in filter(None, name):
            found = [ROOT / "oformer" / part, ROOT / "oformer" / "data" / part]
            assert any(path.exists() for path in found), part
    mentioned = set(re.findall(r"([\w]+)\.py", tree)) | set(re.findall(r"([\w]+)/", tree))
    for module in (ROOT / "oformer").iterdir():
        if module.name.startswith("__") or module.name == "py.typed":
            continue
        assert module.stem in mentioned, f"{module.name} is missing from the tree"


def test_all_commands_of_the_command_line_are_on_their_page():
    page = _text("commands.md")
    assert set(re.findall(r"^oformer (\w+)", page, re.M)) == set(COMMANDS)
    assert all(f"`{name}`" in page for name in COMMANDS)


def test_the_page_of_decisions_has_the_counts_and_which_of_them_are_the_paper_s():
    (table,) = re.findall(r"^## Parameters\n(.*?)^## ", _text("decisions.md"), re.S | re.M)
    rows = {
        row.recipe: row
        for row in ROWS
        if row.recipe in ("burgers-2048", "darcy-141", "ns1", "electro", "magneto", "airfoil")
    }
    equal = set()
    for recipe, row in rows.items():
        model = RECIPES[recipe].model.build(RECIPES[recipe].data_spec())
        count = sum(p.numel() for p in model.parameters())
        assert f"| {count:,} | {row.parameters:.2f} M |" in table
        equal |= {recipe} if f"{count / 1e6:.2f}" == f"{row.parameters:.2f}" else set()
    assert equal == {"ns1", "electro"}
    assert "the\npaper's for Navier-Stokes and electrostatics, and" in table


def test_the_tutorial_runs(tmp_path, monkeypatch):
    """From files to a picture, with six small parts and three steps."""
    pytest.importorskip("skfem")
    monkeypatch.chdir(tmp_path)
    tiny = "--training.steps 3 --model.encoder.width 24 --model.query.width 24 --device cpu"
    names = run(
        DOCS / "tutorial.md",
        {},
        {
            "COUNT, CELLS = 160, 12": "COUNT, CELLS = 6, 6",
            "--test 16": "--test 2",
            "oformer train --data datasets/parts": f"oformer train --data datasets/parts {tiny}",
        },
    )
    wanted, points = names["wanted"], names["truth"].points
    # The stand-in for a solver solves: heat flows in, so that all is warmer than the coolant, and the bores are not.
    cooled = names["truth"].point_data["cooled"] == 1
    assert (wanted[cooled] == 0).all()
    assert (wanted[~cooled] > 0).mean() > 0.95
    assert names["along"].shape == (200,)
    assert len(names["answer"]) == len(points)
    assert (tmp_path / "part.png").stat().st_size > 5000
    assert {"predicted", "error"} <= names["meshio"].vtu.read(tmp_path / "predicted.vtu").point_data.keys()


def test_the_page_of_gradients_runs():
    names = run(DOCS / "gradients.md", {}, {})
    u, places, slope = (names[name].detach().double().flatten() for name in ("u", "places", "slope"))
    difference = (u[2:] - u[:-2]) / (places[2:] - places[:-2])
    torch.testing.assert_close(slope[1:-1], difference, rtol=0.02, atol=0.05)
    assert names["curvature"].abs().max() > 10


def test_the_start_page_runs(tmp_path, monkeypatch):
    """Its two blocks of Python, with few steps; and a command switches on what it says."""
    monkeypatch.chdir(tmp_path)
    regressor, training = (code for _, code in blocks(DOCS / "start.md", "python"))
    assert "minutes=2" in regressor
    names: dict = {}
    exec(regressor.replace("minutes=2", "steps=2, width=16, depth=1, quiet=True"), names)
    assert names["answer"].shape == (1000, 1)
    assert "steps=500, evaluate_every=100" in training
    exec(training.replace("steps=500, evaluate_every=100", "steps=3, evaluate_every=3"), names)
    assert names["answer"].values.shape == (1, 1000, 1)
    (dropped,) = re.findall(r"^oformer (train burgers-2048 --training.drop.*)$", _text("start.md"), re.M)
    command, rest = parse(shlex.split(dropped))
    recipe, faithful = command.recipe(rest), RECIPES["burgers-2048"]
    drop = recipe.training.drop
    assert drop is not None
    assert (drop.probability, drop.keep, drop.weights) == (0.2, (0.5, 1.0), "scaled")  # the paper's
    assert dataclasses.replace(recipe.training, drop=None) == faithful.training


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("furo") is None:
        pytest.skip("the docs extra is not installed; `make docs` installs it")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "OperatorRegressor" in (tmp_path / "api.html").read_text()


def _text(name: str) -> str:
    return (DOCS / name).read_text()
