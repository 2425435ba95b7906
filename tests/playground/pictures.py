"""Draw the pictures of docs/serving.md anew: python -m tests.playground.pictures RUN..."""

import sys
import tempfile
from pathlib import Path

from oformer.playground.api import Service, named
from oformer.playground.asgi import Playground
from oformer.predict import Predictor
from tests.playground.chromium import Page
from tests.playground.conftest import serving

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
SIZE = (1280, 700)
CHARGES = ((0.14, 0.3), (0.4, 0.87), (0.86, 0.55))  # on the U, as shares of the picture's width and height


def draw(sources: list[str], folder: Path = IMAGES) -> None:
    """One picture for each operator with the solver beside it, and one on a phone in the dark."""
    predictors = [Predictor(source, "cpu", warn=False) for source in sources]
    service = Service(dict(zip(named(one.checkpoint.name for one in predictors), predictors, strict=True)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, serving(Playground(service)) as port:
        page = Page(Path(profile))
        page.size(*SIZE)
        page.open(f"http://127.0.0.1:{port}/")
        page.until("globalThis.playground?.answer && playground.settled()", 300)
        page.js("document.getElementById('compare').click()")
        for name, served in service.models.items():
            if served.scene is None or served.scene.slow:
                continue
            show(page, name, served.scene.kind)
            page.picture(folder / f"playground-{served.scene.problem.name}.png")
        page.size(390, 844, dark=True, mobile=True)
        name, served = next(iter(service.models.items()))
        if served.scene is not None:
            show(page, name, served.scene.kind)
        page.picture(folder / "playground-phone.png", full=False)
        page.close()


def show(page: Page, name: str, kind: str) -> None:
    """An operator with charges placed on a shape that training had not, or else its second example; and the solver.

    All points, and of frames a later one.
    """
    page.js(f"(() => {{ const s = document.getElementById('model'); s.value = '{name}'; "
            "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    page.until(f"playground.model?.name === '{name}' && playground.answer && playground.settled()", 300)
    if kind == "sources":
        press(page, "No sources")
        for x, y in CHARGES:
            left, top, width, height = page.js(
                "(({x, y, width, height}) => [x, y, width, height])"
                "(document.getElementById('input').getBoundingClientRect())"
            )
            page.drag([(left + x * width, top + y * height)])
            page.until("playground.settled()", 300)
    else:
        press(page, "Random")
        page.until("playground.index === 1", 300)
    page.js("document.getElementById('quick').hidden || document.getElementById('full').click()")
    page.until("playground.settled() && playground.solution", 300)
    page.js("(() => { const f = document.getElementById('frame'); f.value = 0.75 * f.max; "
            "f.dispatchEvent(new Event('input')); })()")  # fmt: skip
    page.until("playground.settled()", 300)


def press(page: Page, text: str) -> None:
    """A button among the tools of a scene."""
    page.js(
        f"[...document.querySelectorAll('#state-tools button')].find((b) => b.innerText.startsWith('{text}')).click()"
    )


if __name__ == "__main__":
    draw(sys.argv[1:])
