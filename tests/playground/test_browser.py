"""The page in a real Chromium: it loads without a complaint, draws, predicts, and says what `Predictor` says."""

from collections.abc import Iterator

import numpy as np
import pytest

from oformer.playground import api
from oformer.playground.scenes.base import Sensors
from oformer.playground.starting_resolution import Start
from tests.playground.chromium import Page, executable

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium here; Debian's package is `chromium`")

INPUT = "document.getElementById('input')"
EMPTY = """(id) => {
  const drawn = document.getElementById(id), other = document.createElement("canvas");
  Object.assign(other, { width: drawn.width, height: drawn.height });
  return drawn.toDataURL() === other.toDataURL();
}"""


@pytest.fixture(scope="module")
def page(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("chromium"))
    page.size(1200, 900)
    page.open(f"http://127.0.0.1:{port}/")
    page.until("globalThis.playground?.answer != null")
    yield page
    page.close()


@pytest.fixture(autouse=True)
def no_complaints(page: Page) -> Iterator[None]:
    """Nothing on the console, and no request to another place, whatever a test does."""
    yield
    page.js("1")  # hear what is still to be heard
    assert not page.complaints, page.complaints
    origin = page.js("location.origin")
    assert all(address.startswith((origin, "data:", "about:")) for address in page.requests)


def choose(page: Page, name: str) -> None:
    page.js(f"(async () => {{ const s = document.getElementById('model'); s.value = '{name}'; "
            "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    settled(page, f"playground.model?.name === '{name}'")


def settled(page: Page, also: str = "true") -> None:
    """Wait until the page shows the answer to what it shows."""
    page.until(f"{also} && playground.answer && playground.settled()")


def box(page: Page) -> tuple[float, float, float, float]:
    """The input picture on the screen: left, top, width, height."""
    page.js(f"{INPUT}.scrollIntoView({{block: 'center'}})")
    return tuple(page.js(f"(({{x, y, width, height}}) => [x, y, width, height])({INPUT}.getBoundingClientRect())"))


def at(page: Page, x: float, y: float) -> tuple[float, float]:
    left, top, width, height = box(page)
    return left + x * width, top + y * height


def shown(page: Page) -> np.ndarray:
    return np.array(page.js("[...playground.answer.prediction.values]"), np.float32)


def predicted(page: Page, predictors, service) -> np.ndarray:
    """What `Predictor` says of the state that the page holds."""
    model, state, channel = page.js("playground.model.name"), page.js("playground.state"), page.js("playground.channel")
    marks = page.js("playground.sensors")
    scene, predictor = service.models[model].scene, predictors[model]
    places = scene.places(state, page.js("playground.resolution"))
    tuples = {name: tuple(map(tuple, marks[name])) for name in ("erased", "added")}
    field = Sensors(marks["share"], marks["seed"], **tuples, stride=marks["stride"]).of(
        scene.known(state), predictor.spec
    )
    return predictor(field, places.query).values[..., channel].numpy().ravel()


@pytest.mark.parametrize("name", ["burgers", "darcy", "navier-stokes", "electrostatics", "magnetostatics", "airfoil"])
def test_each_operator_is_drawn_changed_and_answers_as_the_predictor(name, page, predictors, service):
    choose(page, name)
    assert not page.js(f"({EMPTY})('input')")
    assert not page.js(f"({EMPTY})('prediction')")
    before, state = shown(page), page.js("JSON.stringify(playground.state)")
    if name == "airfoil":
        page.js("(() => { const s = document.querySelector('#state-tools input'); s.value = Number(s.value) + 0.1; "
                "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    else:
        page.drag([at(page, 0.3, 0.3), at(page, 0.5, 0.4), at(page, 0.6, 0.7)])
    settled(page)
    assert page.js("JSON.stringify(playground.state)") != state
    answer = shown(page)
    assert not np.array_equal(answer, before)
    truth = predicted(page, predictors, service)
    np.testing.assert_allclose(answer, truth, atol=1e-5 * np.abs(truth).max(), rtol=0)


def test_sensors_are_erased_and_added_with_the_pointer(page, predictors, service):
    choose(page, "darcy")
    count = "playground.answer.sensors.coords.shape[0]"
    all_of_them = page.js(count)
    page.js("document.querySelector('#pointer input[value=erase]').click()")
    page.drag([at(page, 0.2, 0.5), at(page, 0.8, 0.5)])
    settled(page)
    fewer = page.js(count)
    assert fewer < all_of_them
    page.js("document.querySelector('#pointer input[value=add]').click()")
    page.drag([at(page, 0.5, 0.5)])
    settled(page)
    assert page.js(count) == fewer + 1
    truth = predicted(page, predictors, service)
    np.testing.assert_allclose(shown(page), truth, atol=1e-5 * np.abs(truth).max(), rtol=0)
    page.js("document.getElementById('sensors-reset').click()")
    settled(page)
    assert page.js(count) == all_of_them


def test_the_solver_and_the_error_beside_it(page, service):
    choose(page, "burgers")
    page.js("document.getElementById('compare').click()")
    page.until("playground.solution != null")
    answer = shown(page)
    scene = service.models["burgers"].scene
    truth = scene.solve(page.js("playground.state"), page.js("playground.resolution")).numpy().ravel()
    solved = np.array(page.js("[...playground.solution.values.values]"))
    np.testing.assert_allclose(solved, truth, atol=1e-6)
    error = np.linalg.norm(answer - truth) / np.linalg.norm(truth)
    assert page.js("playground.error") == pytest.approx(error, rel=1e-4)
    assert "%" in page.js("document.getElementById('error-number').textContent")
    page.js("document.getElementById('compare').click()")
    assert page.js("document.getElementById('error-number').closest('tr').hidden")


def test_what_takes_long_begins_with_fewer_points_and_all_are_one_click_away(page, service, predictors, monkeypatch):
    assert not service.describe("darcy")["play"]["start"]["reduced"]
    monkeypatch.setattr(type(service.models["darcy"].scene), "strides", (1, 2))
    monkeypatch.setattr(api, "start_of", lambda *rest: Start(2, 1.0, 7, 1.0, 4.0))
    choose(page, "darcy")
    assert page.js("[playground.sensors.stride, playground.resolution]") == [2, 7]
    assert page.js("[playground.answer.sensors.coords.shape[0], playground.answer.prediction.shape[1]]") == [64, 49]
    assert "8 × 8 of the 15 × 15 sensors of training" in page.js("document.getElementById('quick').innerText")
    truth = predicted(page, predictors, service)
    np.testing.assert_allclose(shown(page), truth, atol=1e-5 * np.abs(truth).max(), rtol=0)
    page.js("document.getElementById('full').click()")
    settled(page)
    assert page.js("[playground.answer.sensors.coords.shape[0], playground.answer.prediction.shape[1]]") == [225, 225]
    truth = predicted(page, predictors, service)
    np.testing.assert_allclose(shown(page), truth, atol=1e-5 * np.abs(truth).max(), rtol=0)
    page.js("document.getElementById('full').click()")
    settled(page)
    assert page.js("playground.answer.prediction.shape[1]") == 49


def test_nothing_moves_while_the_solver_is_at_work(page):
    choose(page, "electrostatics")
    page.js("document.getElementById('compare').click()")
    page.until("playground.solution != null")
    before = box(page)
    page.drag([at(page, 0.1, 0.5)])
    assert box(page) == before
    settled(page)
    nodes = np.array(page.js("[...playground.answer.sensors.coords.values]")).reshape(-1, 2)
    placed = np.array(page.js("playground.state.sources"))
    assert np.abs(placed[:, None] - nodes).max(-1).min(1).max() < 1e-4  # on nodes, where the solver has them
    page.js("document.getElementById('compare').click()")


def test_time_is_scrubbed_and_runs(page):
    choose(page, "navier-stokes")
    texts = set()
    for frame in range(int(page.js("document.getElementById('frame').max")) + 1):
        page.js(f"(() => {{ const f = document.getElementById('frame'); f.value = {frame}; "
                "f.dispatchEvent(new Event('input')); })()")  # fmt: skip
        texts.add(page.js("document.getElementById('frame-text').textContent"))
    assert texts == {f"input {i} of 3" for i in (1, 2, 3)} | {f"answer {i} of 3" for i in (1, 2, 3)}
    page.js("document.getElementById('run').click()")
    first = page.js("playground.frame")
    page.until(f"playground.frame !== {first}")
    page.js("document.getElementById('run').click()")


def test_other_resolutions_and_channels(page):
    choose(page, "electrostatics")
    points = page.js("playground.answer.prediction.shape[1]")
    page.js("(() => { const r = document.getElementById('resolution'); r.value = '2'; "
            "r.dispatchEvent(new Event('change')); })()")  # fmt: skip
    settled(page)
    assert page.js("playground.answer.prediction.shape[1]") > 3 * points
    before = shown(page)
    page.js("(() => { const r = document.getElementById('channel'); r.value = '2'; "
            "r.dispatchEvent(new Event('change')); })()")  # fmt: skip
    settled(page)
    assert not np.array_equal(shown(page), before)
    assert "not in training" in page.js("document.querySelector('#state-tools select').innerText")
    page.js("(() => { const r = document.querySelector('#state-tools select'); r.value = 'annulus'; "
            "r.dispatchEvent(new Event('change')); })()")  # fmt: skip
    settled(page)
    assert page.js("document.querySelectorAll('#state-tools input').length") == 4  # hole, its x and y, turn


def test_the_keyboard_is_enough(page):
    choose(page, "burgers")
    page.js(f"{INPUT}.focus()")
    state = page.js("JSON.stringify(playground.state)")
    page.key("ArrowRight", 39)
    assert page.js("JSON.stringify(playground.state)") == state  # the mark has moved, the curve has not
    page.key("ArrowUp", 38)
    settled(page)
    assert page.js("JSON.stringify(playground.state)") != state
    choose(page, "electrostatics")
    page.js(f"{INPUT}.focus()")
    sources = page.js("playground.state.sources.length")
    page.key("ArrowLeft", 37)
    page.key("Enter", 13)
    settled(page)
    assert page.js("playground.state.sources.length") in (sources - 1, sources + 1)
    unnamed = page.js(
        "[...document.querySelectorAll('input, select, button, canvas:not([aria-hidden])')]"
        ".filter((e) => !e.closest('[hidden]') && !e.ariaLabel && !e.labels?.length && !e.innerText).map((e) => e.id)"
    )
    assert unnamed == []


def test_a_mistake_is_said_on_the_page(page):
    choose(page, "burgers")
    page.js("(() => { playground.sensors.erased = [[0.5, 9]]; "
            "document.getElementById('share').dispatchEvent(new Event('input')); })()")  # fmt: skip
    page.until("document.getElementById('status').textContent.includes('at least one sensor')")
    # The browser itself reports the refusal on its console; that is no complaint of the page.
    page.js("1")
    assert all("422" in complaint for complaint in page.complaints)
    page.complaints.clear()
    page.js("document.getElementById('sensors-reset').click()")
    settled(page)
    assert page.js("document.getElementById('status').textContent") == ""


def test_a_phone_is_wide_enough_and_the_dark_is_dark(page):
    page.size(390, 800, dark=True, mobile=True)
    choose(page, "darcy")
    assert page.js("document.documentElement.scrollWidth") <= 390
    light = page.js(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    )
    assert light < 150
    assert page.js(f"{INPUT}.clientWidth") > 300
    page.size(1200, 900)
    assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
