"""The performance page says what the rows say, and keeps what they do not speak of."""

import dataclasses

import accuracy
import plots
import pytest
import run

from oformer.errors import InputError
from oformer.experiments.recipes import RECIPES

BASE = run.Row("a card", "2.11", "train", "ns2-full", "bfloat16", "recipe", 16, "64 x 64", 20, 20)
MARKED = (*plots.PARTS, plots.ACCURACY, plots.PROFILE)
PAGE = "# Page\n" + "".join(f"<!-- {name} -->\nold {name}\n<!-- end {name} -->\nbetween\n" for name in MARKED)


def row(**changes):
    given = {"per_second": 100.0, "milliseconds": 10.0, "allocated_mib": 1000.0, "reserved_mib": 2000.0, "ratio": 4.0}
    return dataclasses.replace(BASE, **{**given, **changes})


@pytest.fixture
def page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "images").mkdir()
    return tmp_path / "page.md"


def test_parts_without_rows_stay_as_they_are(page):
    plots.rewrite(page, [row(tflops=500.0, of_peak=0.63, startup_seconds=21.0)])
    text = page.read_text()
    assert "old train" not in text
    assert "| ns2-full | 16 | recipe | bfloat16 | 10 | 100 | 2.10 | 500 | 63% | 21 | 4.0x |" in text
    assert all(f"old {name}" in text for name in ("infer", "growth", "horizon", "accuracy", "profile"))
    assert text.count("between") == len(MARKED)


def test_writing_twice_is_writing_once(page):
    rows = [row(what="infer", batch=200, milliseconds=50.0, per_second=20.0)]
    plots.rewrite(page, rows)
    once = page.read_text()
    plots.rewrite(page, rows)
    assert page.read_text() == once
    assert "| 200 | on the device | recipe | bfloat16 | 0.05 | 4,000 | 2.10 | - | - |" in once


def test_growth_has_its_powers_and_its_picture(page):
    rows = [
        row(what="growth-train", batch=1, points=str(n), milliseconds=n / 1e3, allocated_mib=n**0.5, times=20)
        for n in (1_000, 100_000, 10_000_000)
    ]
    plots.rewrite(page, rows)
    assert "| training step | 100,000 to 10,000,000 | 1.000 | 0.500 |" in page.read_text()
    assert (page.parent / "images" / "performance-growth.png").stat().st_size > 5000


def test_horizon_is_drawn(page):
    plots.rewrite(page, [row(what=w, times=t) for w in ("horizon-predict", "horizon-train") for t in (1, 5, 40)])
    assert "| prediction | 40 | 0.01 |" in page.read_text()
    assert (page.parent / "images" / "performance-horizon.png").is_file()


def test_a_page_without_marks_and_no_page_are_refused(page):
    page.write_text("# Nothing to fill")
    with pytest.raises(InputError, match="a part `<!-- scaling -->`"):
        plots.rewrite(page, [])
    assert plots.main(["--page", str(page.parent / "nowhere.md")]) == 2


def test_the_page_of_the_documentation_has_every_part():
    text = plots.PAGE.read_text()
    assert all(plots.replaced(text, name, "x") != text for name in MARKED)


def test_errors_of_short_runs_are_put_beside_each_other(page):
    """From a file of their own, and nothing else is touched."""
    result = accuracy.Result("a card", "2.11", "ns2-part", "plain", "float32", 1, 600, 8, 3, 0.3, 80.0, 60.0)
    results = [dataclasses.replace(result, seed=seed, error=0.3 + 0.01 * seed) for seed in (1, 2, 3)]
    results += [dataclasses.replace(r, way="recipe", precision="bfloat16", milliseconds=9.5) for r in results]
    file = page.parent / "accuracy.csv"
    file.write_text(accuracy.to_csv(results, accuracy.Result))
    assert plots.main(["--page", str(page), "--accuracy", str(file)]) == 0
    text = page.read_text()
    assert "old accuracy" not in text
    assert "old train" in text
    assert "a card, torch 2.11, up to 3 run(s) at once." in text
    assert "| ns2-part | 600 of 8 | plain | float32 | 3 | 0.32 | 0.01 | - | - | - | 80 |" in text
    assert "| ns2-part | 600 of 8 | recipe | bfloat16 | 3 | 0.32 | 0.01 | +0.00% | +0.00 | 1.00 | 9.5 |" in text


def test_kernels_of_a_step_are_added_up_by_their_purpose(page):
    taken = {
        "_sum": (5, 300.0),
        "_sum_back": (5, 200.0),
        "nvjet_one": (7, 1000.0),
        "_bend_kernel": (2, 400.0),
        "odd": (1, 100.0),
    }
    same = ("a card", "2.11", "ns2-full", "bfloat16", "recipe", 16, "64 x 64")
    folder = page.parent / "profiles"
    folder.mkdir()
    kernels = [run.Kernel(*same, name, *numbers) for name, numbers in taken.items()]
    (folder / "one.csv").write_text(run.to_csv(kernels, run.Kernel))
    assert plots.main(["--page", str(page), "--profiles", str(folder)]) == 0
    text = page.read_text()
    assert "`ns2-full`, batch 16, bfloat16, mode `recipe`; a card, torch 2.11: 2.0 ms of kernels." in text
    shown = [line for line in text.splitlines() if line.endswith("% |")]
    assert shown[:4] == [
        "| products of the vendor's library | 7 | 1.00 | 50% |",
        "| self-attention: sums over points | 10 | 0.50 | 25% |",
        "| rollout, backward: activations and their slopes | 2 | 0.40 | 20% |",
        "| everything else | 1 | 0.10 | 5% |",
    ]


def test_bytes_on_the_network_are_those_of_the_formulas():
    recipe = RECIPES["ns2-full"]
    assert plots.gradient_bytes(recipe) == 4 * 1_851_361
    # Five blocks of one head of 96, and a cross-attention of four heads of 192; there and back, float32, batch 16.
    assert plots.split_bytes(recipe) == 2 * 4 * 16 * (5 * 96**2 + 4 * 192**2)
    assert plots.split_messages(recipe) == 12
    assert plots.split_messages(RECIPES["electro"]) == 2 * (2 + 1 + 1)


def test_an_all_reduce_has_the_limits_of_the_model():
    assert plots.all_reduce(450e9, 2) == pytest.approx(1.0, rel=1e-3)  # each sends and receives its half twice
    assert plots.all_reduce(50e9, 4096) == pytest.approx(2.0, rel=1e-3)
    assert plots.all_reduce(0, 4096) == pytest.approx(2 * 12 * 10e-6)


def test_scaling_starts_from_the_measured_step(page):
    plots.rewrite(page, [row(milliseconds=10.0)])
    line = next(line for line in page.read_text().splitlines() if line.startswith("| 64 |"))
    _, by_samples, efficiency, by_points, speed_up = (cell.strip() for cell in line.split("|")[1:-1])
    assert float(efficiency.rstrip("%")) == pytest.approx(100 * 10 / (10 + float(by_samples)), abs=1)
    assert float(speed_up.rstrip("x")) == pytest.approx(10 / (10 / 64 + float(by_points)), abs=0.1)
    assert float(by_points) > float(by_samples)  # the gradients travel there as well
    plots.rewrite(page, [])
    assert plots.UNKNOWN in page.read_text()
