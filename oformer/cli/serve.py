"""`oformer serve`: trained operators over HTTP."""

import os
import signal
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from oformer.cli.options import Device, Within, import_recipe_file, program_name, torch_device
from oformer.errors import InputError
from oformer.terminal import say


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
        from oformer.checkpoint import zoo_folder, zoo_names
        from oformer.playground.server import serve

        import_recipe_file(self.recipe)
        sources = self.models or tuple(f"zoo:{name}" for name in zoo_names())
        if not sources:
            raise InputError(
                f"a trained operator to serve, or some in {zoo_folder()}",
                "none",
                f"Train one in minutes with `{program_name()} demo`, then: `{program_name()} serve outputs/demo/run`",
            )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM stops it as Ctrl-C does
        ended = serve(
            sources, host=self.host, port=self.port, name=self.name, device=torch_device(self.device), browse=self.open,
            say=say,
        )  # fmt: skip
        if not ended:
            sys.stderr.flush()
            os._exit(0)  # the interpreter's own end would abort in the thread of a solver that is still at work
        return 0
