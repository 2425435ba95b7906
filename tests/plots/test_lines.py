"""Figures say what the data say: what is drawn and printed is checked against numbers computed here."""

import dataclasses
import math
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib._pylab_helpers import Gcf

from oformer.errors import InputError
from oformer.fields import Field, Sample
from oformer.plots import style
from oformer.plots.lines import (
    FEW,
    Panel,
    Resolution,
    error_by_resolution,
    error_by_share,
    error_by_step,
    error_over_time,
    loss_curves,
    prediction,
    smoothed,
    solutions,
)


def shuffled_panel(points: int = 128, size: float = 0.1, times: int = 1) -> Panel:
    """A sine whose points come in random order, with unequal weights and a cosine of the given size as error."""
    coords = torch.rand(points, 1, dtype=torch.float64)
    weights = torch.rand(points, dtype=torch.float64) + 0.1
    field = Field(coords, torch.sin(2 * torch.pi * coords)[None].repeat(times, 1, 1), weights / weights.sum())
    error = size * torch.cos(4 * torch.pi * coords)
    frames = torch.arange(1, times + 1, dtype=torch.float64)[:, None, None]
    return Panel("a title", Sample(field, field, field.values), field.values + frames * error)


def line(axis, label: str):
    return next(item for item in axis.get_lines() if item.get_label() == label)


def test_importing_plots_does_not_import_matplotlib():
    code = "import sys, oformer.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_figures_leave_pyplot_and_the_settings_alone():
    before = matplotlib.rcParams.copy()
    style.rendered(solutions([shuffled_panel()]))
    assert matplotlib.rcParams.copy() == before
    assert not Gcf.get_all_fig_managers()  # pyplot's list of all figures


def test_solutions_draw_the_data_sorted_by_coordinate():
    panel = shuffled_panel()
    upper, lower = solutions([panel], input="u at time 0", target="u at time 1").axes
    x = panel.sample.query.coords[:, 0].sort().values.numpy()
    for label in ("u at time 0 (input)", "u at time 1 (truth)", "prediction"):
        np.testing.assert_allclose(line(upper, label).get_xdata(), x)
    np.testing.assert_allclose(line(upper, "u at time 1 (truth)").get_ydata(), np.sin(2 * np.pi * x))
    difference = lower.get_lines()[-1]
    np.testing.assert_allclose(difference.get_xdata(), x)
    np.testing.assert_allclose(difference.get_ydata(), 0.1 * np.cos(4 * np.pi * x), atol=1e-12)


@pytest.mark.parametrize("time", [0, -1])
def test_the_printed_error_is_the_relative_l2_of_the_frame_drawn(time):
    panel = shuffled_panel(times=3)
    _, lower = solutions([panel], time=time).axes
    w = panel.sample.query.weights.numpy()
    truth, answer = panel.sample.target[time, :, 0].numpy(), panel.prediction[time, :, 0].numpy()
    expected = math.sqrt((w * (answer - truth) ** 2).sum() / (w * truth**2).sum())
    (printed,) = [float(m[1]) for t in lower.texts if (m := re.search(r"([\d.]+)%", t.get_text()))]
    assert printed == pytest.approx(100 * expected, rel=5e-3)  # three digits are printed


@pytest.mark.parametrize("name", [r"$\nosuch{x}$", "one $ of two", "_hidden", "a\\b", "line\nbreak \x1b"])
def test_names_are_drawn_as_text(name):
    field = Field.of(torch.rand(20, 1), torch.rand(1, 20, 1))
    panel = Panel(name, Sample(field, field, field.values), field.values)
    figures = [
        solutions([panel], input=name, target=name),
        prediction(field, field, input=name, target=name),
        error_by_resolution([Resolution(name, 20, 0.1, "sparse")]),
        error_over_time({name: [0.1, 0.2]}),
    ]
    for figure in figures:
        style.rendered(figure)  # a formula that is none is refused only here
        texts = [text.get_text() for text in figure.findobj(matplotlib.text.Text)]
        assert any(style.plain(name) in text.replace("\n", " ") for text in texts)


def test_few_input_points_are_dots_and_many_are_a_line():
    many, few = shuffled_panel(), shuffled_panel()
    known = few.sample.input
    sparse = Field.of(known.coords[:FEW], known.values[:, :FEW])
    few = dataclasses.replace(few, sample=dataclasses.replace(few.sample, input=sparse))
    figure = solutions([many, few], input="u")
    dots = line(figure.axes[2], f"u ({FEW} input points)")
    assert (dots.get_linestyle(), dots.get_marker()) == ("None", "o")
    assert len(dots.get_xdata()) == FEW
    assert line(figure.axes[0], "u (input)").get_linestyle() == "-"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["u (input)", f"u ({FEW} input points)", "truth (truth)", "prediction"]


def test_padding_is_not_drawn():
    whole = shuffled_panel()
    nothing = torch.zeros(5, 1, dtype=torch.float64)

    def pad(field: Field) -> Field:
        values = torch.cat([field.values, nothing[None] + 99], 1)
        return Field(torch.cat([field.coords, nothing]), values, torch.cat([field.weights, nothing[:, 0]]))

    field = pad(whole.sample.query)
    answer = torch.cat([whole.prediction, nothing[None]], 1)
    padded = Panel("padded", Sample(pad(whole.sample.input), field, field.values), answer)
    for a, b in zip(solutions([whole]).axes, solutions([padded]).axes, strict=True):
        for x, y in zip(a.get_lines(), b.get_lines(), strict=True):
            np.testing.assert_array_equal(x.get_xydata(), y.get_xydata())
        assert [t.get_text() for t in a.texts] == [t.get_text() for t in b.texts]


def test_panels_share_their_scales_and_name_their_axes_once():
    panels = [shuffled_panel(size=size) for size in (0.01, 0.1, 0.2, 0.3)]
    axes = solutions(panels, target="u in m/s").axes
    upper, lower = axes[::2], axes[1::2]
    assert len({axis.get_ylim() for axis in upper}) == 1
    assert len({axis.get_ylim() for axis in lower}) == 1
    assert lower[0].get_ylim()[0] < -0.3 < 0.3 < lower[0].get_ylim()[1]
    assert [axis.get_ylabel() for axis in upper] == ["u in m/s", "", "", "u in m/s"]
    assert [axis.get_xlabel() for axis in lower] == ["", "x", "x", "x"]


def test_a_perfect_and_a_broken_prediction_can_be_drawn():
    panel = shuffled_panel(size=0.0)
    broken = dataclasses.replace(panel, prediction=torch.full_like(panel.prediction, torch.nan))
    assert style.rendered(solutions([panel, broken])).startswith(b"\x89PNG")


def test_a_panel_refuses_what_is_not_one_sample_on_a_line():
    panel = shuffled_panel()
    field = Field.of(torch.rand(4, 2), torch.rand(1, 4, 1))
    with pytest.raises(InputError, match="1-D"):
        solutions([Panel("a map", Sample(field, field, field.values), field.values)])
    with pytest.raises(InputError, match="target's shape"):
        Panel("too short", panel.sample, panel.prediction[:, :-1])
    with pytest.raises(InputError, match="at least one sample"):
        solutions([])


def journal(steps: int = 50) -> list[dict]:
    train = [
        {"kind": "train", "step": 20 * i, "loss": 0.5 * 0.9**i, "rate": 1e-3 / i, "minutes": 0.1}
        for i in range(1, steps + 1)
    ]
    tests = [{"kind": "evaluate", "step": s, "error": 40 / s, "by_step": [40 / s]} for s in (400, 800)]
    return [{"kind": "start", "step": 0, "hardware": "x"}, *train, *tests, {"kind": "stop", "step": 1000}]


def test_loss_curves_hold_the_records():
    records = journal()
    upper, lower = loss_curves(records).axes
    raw, smooth, tests = upper.get_lines()
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    np.testing.assert_allclose(raw.get_ydata(), losses)
    np.testing.assert_allclose(smooth.get_ydata(), losses)  # an exponential has no noise to take off
    np.testing.assert_allclose(tests.get_xydata(), [[400, 0.1], [800, 0.05]])
    rates = lower.get_lines()[0].get_xydata()
    np.testing.assert_allclose(rates, [[r["step"], r["rate"]] for r in records if r["kind"] == "train"])
    assert upper.get_yscale() == "log"
    assert [t.get_text() for t in upper.texts] == ["5%"]  # the last test error, in words


@pytest.mark.parametrize("records", [[], [{"kind": "start", "step": 0}]])
def test_an_empty_journal_says_so(records):
    figure = loss_curves(records)
    assert [text.get_text() for text in figure.texts] == ["nothing recorded yet"]


def test_loss_curves_name_the_split_of_the_errors():
    records = [{**r, "split": "validation"} if r["kind"] == "evaluate" else r for r in journal()]
    upper, _ = loss_curves(records).axes
    assert [text.get_text() for text in upper.get_legend().get_texts()] == ["training loss", "validation error"]


def test_loss_curves_take_incomplete_journals():
    records = journal(1)
    records[1]["loss"] = None  # it was not finite
    upper, _ = loss_curves(records).axes
    assert [item.get_label() for item in upper.get_lines()] == ["test error"]
    only_one = [{"kind": "train", "step": 20, "loss": 0.3}]
    assert style.rendered(loss_curves(only_one)).startswith(b"\x89PNG")


def test_smoothing_keeps_constants_and_takes_noise_off():
    np.testing.assert_allclose(smoothed(np.full(37, 0.25)), 0.25)
    trend = 0.5 * 0.99 ** np.arange(400)
    noise = np.exp(0.3 * np.random.default_rng(0).standard_normal(400))
    before, after = np.log(noise).std(), np.log(smoothed(trend * noise) / trend).std()
    assert after < before / 3


def test_smoothing_leaves_out_what_has_no_logarithm():
    values = np.full(30, 2.0)
    values[[3, 10, 29]] = 0.0, np.nan, np.inf
    result = smoothed(values)
    np.testing.assert_allclose(np.delete(result, [3, 10, 29]), 2.0)
    assert np.isnan(result[[3, 10, 29]]).all()


ROWS = [
    Resolution("512 points", 512, 0.012, "resolution"),
    Resolution("256 points", 256, 0.010, "trained"),
    Resolution("64 points", 64, 0.080, "resolution"),
    Resolution("30%", 77, 0.03, "sparse"),
]


def test_resolutions_are_drawn_in_order_with_their_marks():
    (axis,) = error_by_resolution(ROWS).axes
    np.testing.assert_allclose(line(axis, "whole grid").get_xydata(), [[64, 0.08], [256, 0.01], [512, 0.012]])
    np.testing.assert_allclose(line(axis, "trained here").get_xydata(), [[256, 0.01]])
    np.testing.assert_allclose(line(axis, "random points").get_xydata(), [[77, 0.03]])
    # The dashed line at the trained resolution spans the axis.
    assert [list(item.get_xdata()) for item in axis.get_lines() if item.get_linestyle() == "--"] == [[256, 256]]
    assert [text.get_text() for text in axis.texts] == ["30%"]
    assert axis.get_xscale() == "log"
    assert list(axis.get_xticks()) == [64, 77, 256, 512]


def test_resolutions_that_would_touch_share_a_tick():
    near = [dataclasses.replace(ROWS[1], points=points, kind="resolution") for points in (256, 260)]
    (axis,) = error_by_resolution(near).axes
    assert list(axis.get_xticks()) == [256]


def test_like_errors_start_at_zero_and_unlike_ones_are_on_a_log_scale():
    (alike,) = error_by_resolution(ROWS[:2]).axes
    (unlike,) = error_by_resolution(ROWS).axes
    assert (alike.get_yscale(), alike.get_ylim()[0]) == ("linear", 0)
    assert unlike.get_yscale() == "log"
    with pytest.raises(InputError, match="at least one row"):
        error_by_resolution([])


def test_errors_over_time_are_medians_in_a_band():
    errors = torch.arange(11.0)[:, None] * torch.tensor([0.01, 0.02, 0.03])
    (axis,) = error_by_step(errors).axes
    np.testing.assert_allclose(line(axis, "median").get_xydata(), [[1, 0.05], [2, 0.10], [3, 0.15]], rtol=1e-6)
    corners = axis.collections[0].get_paths()[0].vertices
    last = corners[np.isclose(corners[:, 0], 3), 1]
    assert (last.min(), last.max()) == (pytest.approx(0.03), pytest.approx(0.27))
    assert axis.get_xlabel() == "step"


def test_samples_that_are_not_finite_are_left_out_and_counted():
    errors = torch.full((5, 2), 0.1)
    errors[3, 1] = torch.nan
    (axis,) = error_by_step(errors).axes
    np.testing.assert_allclose(line(axis, "median").get_xydata(), [[1, 0.1], [2, 0.1]], rtol=1e-6)
    assert [text.get_text() for text in axis.texts] == ["1 of 5 samples are not finite"]


def test_errors_over_time_of_no_sample_are_refused():
    with pytest.raises(InputError, match="at least one sample"):
        error_by_step(torch.zeros(0, 3))


def test_numbers_are_written_as_people_write_them():
    assert [style.number(x) for x in (8192, 999.7, 256, 0.05, 2e-5)] == [
        "8,192",
        "1,000",
        "256",
        "0.05",
        "2e-05",
    ]
    assert style.percent(0.01234) == "1.23%"


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_ending_of_the_name_chooses_the_format(tmp_path, name, start):
    style.save_figure(tmp_path / name, loss_curves(journal()))
    assert (tmp_path / name).read_bytes().startswith(start)


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"\.png, \.svg or \.pdf"):
        style.save_figure(tmp_path / "a.jpeg", loss_curves([]))
    assert not list(tmp_path.iterdir())


def test_error_over_time_draws_each_operator_from_the_first_step():
    errors = {"ns1": [0.01, 0.02, 0.08], "ns2": [0.1, 0.3]}
    (axis,) = error_over_time(errors).axes
    for name, steps in errors.items():
        drawn = line(axis, name)
        assert drawn.get_xdata() == pytest.approx(range(1, len(steps) + 1))
        assert drawn.get_ydata() == pytest.approx(steps)
    assert axis.get_yscale() == "log"  # they differ thirty times
    assert all(float(tick).is_integer() for tick in axis.get_xticks())
    with pytest.raises(InputError, match="at least one curve"):
        error_over_time({})


def test_error_by_share_is_sorted_and_told_apart():
    errors = {"ours": {1.0: 0.06, 0.25: 0.13, 0.5: 0.09}, "paper": {0.25: 0.38, 1.0: 0.065}}
    figure = error_by_share(errors)
    (axis,) = figure.axes
    assert line(axis, "ours").get_xdata() == pytest.approx([0.25, 0.5, 1.0])
    assert line(axis, "ours").get_ydata() == pytest.approx([0.13, 0.09, 0.06])
    looks = {(item.get_color(), item.get_marker(), item.get_linestyle()) for item in axis.get_lines()}
    assert len(looks) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ours", "paper"]
    with pytest.raises(InputError, match=r"shares above 0 and at most 1, got 1\.2"):
        error_by_share({"ours": {1.2: 0.1}})


def test_the_name_of_an_axis_may_have_two_lines():
    figure = error_by_share({"ours": {1.0: 0.1}}, axis="share of the points\n(and all)")
    assert figure.axes[0].get_xlabel() == "share of the points\n(and all)"


def test_published_errors_by_share_are_gray_and_told_apart_from_ours():
    errors = {f"ours {i}": {1.0: 0.06, 0.25: 0.13} for i in range(7)}
    others = {"paper": {1.0: 0.065, 0.25: 0.38}, "another": {0.25: 0.3, 1.0: 0.06}}
    figure = error_by_share(errors, others)
    (axis,) = figure.axes
    assert line(axis, "paper").get_xdata() == pytest.approx([0.25, 1.0])
    assert line(axis, "paper").get_ydata() == pytest.approx([0.38, 0.065])
    looks = [(item.get_color(), item.get_marker(), item.get_linestyle()) for item in axis.get_lines()]
    assert len(set(looks)) == len(errors) + len(others)
    assert [look[::2] for look in looks[7:]] == [(style.MUTED, ":")] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*errors, *others]
    low, high = axis.get_ylim()
    assert low < 0.06
    assert high > 0.38
    with pytest.raises(InputError, match=r"shares above 0 and at most 1, got 0"):
        error_by_share({}, {"paper": {0.0: 0.1}})
