"""The record of a run while it trains: JSON lines, a progress bar, and TensorBoard where it is installed."""

import contextlib
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from oformer.errors import InputError
from oformer.files import finite_json, said_plainly, write_text
from oformer.terminal import ProgressBar, say

JOURNAL = "journal.jsonl"


class Journal:
    """The file journal.jsonl, one JSON object a line, from which the curves of a run are drawn."""

    def __init__(self, folder: Path, step: int, tensorboard: bool = True):
        """Open the journal to go on from a step; records of later steps are deleted, since the steps are done again."""
        self.path = folder / JOURNAL
        self.board = None
        with said_plainly(self.path):
            records = [r for r in read_journal(folder) if r["step"] <= step and r["kind"] != "stop"]
            write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))
            self.file = self.path.open("a")
            # Silence about its own start-up is all that we ask of TensorBoard.
            if tensorboard and importlib.util.find_spec("tensorboard"):
                os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
                from torch.utils.tensorboard.writer import SummaryWriter

                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, kind: str, step: int, **content: Any) -> None:
        """Append a record and flush it to the operating system; refused where the file was deleted or replaced."""
        with said_plainly(self.path):
            # An open file can be written when its folder is deleted, and nobody would ever read it.
            if not os.path.samestat(os.fstat(self.file.fileno()), self.path.stat()):
                raise InputError(
                    f"{self.path} to stay the file that this run began",
                    "another file of that name",
                    "Let no other program write there; what was saved last stays, and the same command goes on",
                )
            self.file.write(json.dumps({"kind": kind, "step": step, **finite_json(content)}) + "\n")
            self.file.flush()
            if self.board is not None and kind in ("train", "evaluate"):
                for name, value in content.items():
                    if isinstance(value, (int, float)):
                        self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the file and the TensorBoard events."""
        with said_plainly(self.path), contextlib.ExitStack() as stack:
            stack.callback(self.file.close)
            if self.board is not None:
                stack.callback(self.board.close)


def hardware(device: torch.device, processes: int = 1) -> str:
    """The name of the GPU, or processor and threads, as journals and checkpoints state it."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return name if processes == 1 else f"{processes} x {name}"


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line cut short by a crash is left out."""
    path = folder / JOURNAL
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


class Console:
    """A progress bar on a terminal, a line now and then elsewhere, nothing when told to be quiet."""

    def __init__(self, name: str, steps: int, done: int, quiet: bool = False):
        """Start showing a run of `steps` steps of which `done` are behind it."""
        self.quiet, self.steps = quiet, steps
        self.bar = ProgressBar(name, steps, done) if not quiet and sys.stderr.isatty() else None

    def show(self, step: int, **numbers: float) -> None:
        """Update the bar, or print a line, with the step and numbers such as the loss."""
        text = _numbers(numbers)
        if self.bar is not None:
            self.bar.show(step, text)
        elif not self.quiet:
            left = numbers.get("steps_per_second", 0)
            time_left = f", {_duration((self.steps - step) / left)} left" if left else ""
            print(f"step {step}/{self.steps}  {text}{time_left}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar."""
        if self.bar is not None:
            self.bar.say(text)
        elif not self.quiet:
            say(text)

    def close(self) -> None:
        """Stop the progress bar."""
        if self.bar is not None:
            self.bar.close()


def _numbers(numbers: dict[str, float]) -> str:
    formats = {
        "loss": "loss {:.4g}",
        "rate": "rate {:.2g}",
        "steps_per_second": "{:.1f} steps/s",
    }
    return "  ".join(formats[name].format(value) for name, value in numbers.items() if name in formats)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
