"""Draw the pictures of docs/serving.md anew: python -m tests.playground.pictures RUN..."""

import sys
import tempfile
import threading
from pathlib import Path

from oformer.playground.api import Service, named
from oformer.playground.server import Server
from oformer.predict import Predictor
from tests.playground.chromium import Page

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
SIZE = (1280, 700)


def draw(sources: list[str], folder: Path = IMAGES) -> None:
    """One picture for each operator with the solver beside it, and one on a phone in the dark."""
    service = Service(named([Predictor(source, "cpu") for source in sources]))
    server = Server(service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        page = Page(Path(profile))
        page.size(*SIZE)
        page.open(server.address)
        page.until("globalThis.playground?.answer && playground.settled()", 300)
        page.js("document.getElementById('compare').click()")
        for name, served in service.models.items():
            if served.scene is None or served.scene.slow:
                continue
            show(page, name)
            page.picture(folder / f"playground-{served.scene.problem.name}.png")
        page.size(390, 844, dark=True, mobile=True)
        show(page, next(iter(service.models)))
        page.picture(folder / "playground-phone.png", full=False)
        page.close()
    server.shutdown()
    server.stop()


def show(page: Page, name: str) -> None:
    """An operator with its second example, and what the solver says of it."""
    page.js(f"(() => {{ const s = document.getElementById('model'); s.value = '{name}'; "
            "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    page.until(f"playground.model?.name === '{name}' && playground.answer && playground.settled()", 300)
    page.js(
        "[...document.querySelectorAll('#state-tools button')].find((b) => b.innerText.startsWith('Random')).click()"
    )
    page.until("playground.index === 1 && playground.settled() && playground.solution", 300)


if __name__ == "__main__":
    draw(sys.argv[1:])
