"""`oformer serve`: trained operators over HTTP."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from oformer.cli.options import Device, Within, import_recipe_file, torch_device
from oformer.errors import optional_module


@dataclass
class Serve:
    """Answer over HTTP, and show a page in which to play with trained operators (docs/serving.md). Ctrl-C stops it."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")] = ()
    """Run folders, checkpoints, or names of trained operators; by default all that come with the package."""
    host: str = "127.0.0.1"
    """The address to listen at; the default is reached from this machine alone."""
    port: Annotated[int, Within(0, 65535)] = 8760
    """0 takes a free one."""
    name: str | None = None
    """A host name besides localhost under which people reach it."""
    open: bool = False
    """Open the page in a browser."""
    device: Device = "auto"
    recipe: str | None = None
    """The Python file that was trained, where the model is your own."""

    def run(self, rest: list[str]) -> int:
        """Serve until interrupted."""
        for module in ("starlette", "uvicorn"):
            optional_module(module, "serving over HTTP", "pip install 'oformer[serve]'")
        from oformer.playground.server import serve

        import_recipe_file(self.recipe)
        names, device = filter(None, [self.name]), torch_device(self.device)
        if not serve(
            self.models, host=self.host, port=self.port, names=tuple(names), device=device, browse=self.open
        ):  # fmt: skip
            sys.stderr.flush()
            os._exit(0)  # the interpreter's own end would abort in the thread of a solver that is still at work
        return 0
