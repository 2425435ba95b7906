"""The command line, one command per file.

The commands are dataclasses whose fields are their options. torch, numpy and all that imports them are imported inside
`run`, so that help and errors are printed at once.
"""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import tyro

from oformer.cli.analyze import Analyze
from oformer.cli.demo import Demo
from oformer.cli.evaluate import Evaluate
from oformer.cli.export import Export
from oformer.cli.generate import Generate
from oformer.cli.import_file import Import
from oformer.cli.inspect import Inspect
from oformer.cli.list_recipes import List
from oformer.cli.new import New
from oformer.cli.options import (
    check_arguments,
    check_numbers,
    is_first_rank,
    normalize_flags,
    refuse_unknown,
    silent_on_other_ranks,
    subcommands,
)
from oformer.cli.plot import Plot
from oformer.cli.predict import Predict
from oformer.cli.reproduce import Reproduce
from oformer.cli.serve import Serve
from oformer.cli.train import Train
from oformer.cli.zoo import ZOO, Zoo
from oformer.errors import InputError, OutOfMemory, SolverDiverged, TrainingDiverged, unknown_name
from oformer.terminal import say

# Seconds that other ranks wait before they exit with an error: torchrun stops all ranks when one exits, and the first
# rank must have printed the error by then.
OTHER_RANKS_WAIT = 10.0
# Parts of the errors that torch and numpy raise for arrays too large for memory, or for a 64-bit size.
NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed", "Maximum allowed dimension exceeded")
HELP = frozenset({"-h", "--help"})
GROUPS = {
    "data": {"generate": Generate, "import": Import, "inspect": Inspect},
    "train": {"demo": Demo, "list": List, "new": New, "train": Train, "evaluate": Evaluate, "reproduce": Reproduce},
    "use": {"predict": Predict, "plot": Plot, "analyze": Analyze, "serve": Serve},
    "share": {"export": Export, "zoo": Zoo},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
TAKE_SETTINGS = (
    Train,
    Generate,
    List,
    Demo,
    Reproduce,
)  # of a recipe or problem, which are parsed once these are known


def program() -> NoReturn:
    """Run the command line as a program, and exit without the interpreter's shutdown.

    All files are written and closed by then. During shutdown, threads of torch, or a solver that cannot be interrupted,
    may use objects that are already freed: now and then the process would abort after its command had succeeded.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whose encoding may lack letters of mathematics, on Windows
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")
    code = main()
    with contextlib.suppress(BrokenPipeError):  # the reader has seen enough
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    A mistake of the user is printed as one sentence, and the status is 2, on all ranks of torchrun.

    Args:
        arguments: the command and its options; by default those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in arguments
    arguments = [a for a in arguments if a != "--traceback"]
    if "--version" in arguments:
        from oformer import __version__

        print(f"oformer {__version__}")
        return 0
    if not arguments or arguments[0] in (*HELP, "help"):
        with silent_on_other_ranks():
            _print_commands()
        return 0 if arguments else 2
    try:
        if arguments[:1] == ["train"] and not HELP.isdisjoint(arguments):
            command, rest = parse([a for a in arguments if a not in HELP])
            if command.name or command.data is not None:
                command.recipe([*rest, "--help"])  # prints the settings of this recipe and exits
        command, rest = parse(arguments)
        return command.run(rest)
    # Mistakes of the user and limits of the machine: one sentence, and status 2.
    except (InputError, SolverDiverged, TrainingDiverged, OutOfMemory, ImportError) as error:
        if traceback or (isinstance(error, ImportError) and not _is_missing_package(error)):
            raise
        if is_first_rank() or not _is_met_by_all_ranks(error):
            say(f"oformer: {error}")
        else:
            time.sleep(OTHER_RANKS_WAIT)
        return 2
    except SystemExit as refused:  # by tyro, which has printed why
        if refused.code and not is_first_rank():
            time.sleep(OTHER_RANKS_WAIT)
        raise
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # the system's own words: disk full, permission denied, no such file
        if traceback or error.errno is None:
            raise
        where = f"{os.fsdecode(error.filename)[:200]}: " if error.filename else ""
        say(
            f"oformer: {where}{error.strerror}. What was complete is not lost. Mend this and run the same command "
            "again; --traceback shows where it was met."
        )
        return 2
    # Ctrl-C, and everything unexpected.
    except KeyboardInterrupt:
        say("oformer: interrupted; nothing that was complete is lost. Run the same command again.")
        return 130
    except Exception as error:
        refused = _refused_by_system(error)
        if refused is not None and not traceback:
            say(f"oformer: {refused}")
            return 2
        if _is_kernel_failure(error):
            error.add_note(
                "oformer: what was saved stays. Perhaps a fused kernel does not suit this GPU, torch or Triton: "
                "OFORMER_FUSED=0 before the same command uses plain code. If that helps, please report it."
            )
        raise


@silent_on_other_ranks()
def parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Parse a command line into a command and the arguments left over, which may be settings of a recipe."""
    check_arguments(arguments)
    verb = _command_named("command", arguments, COMMANDS)
    if verb is Zoo:
        verb = _command_named("command of zoo", arguments[1:], ZOO)
    if verb is not None:
        arguments = normalize_flags(arguments, verb)
    command, rest = tyro.cli(
        subcommands(COMMANDS),
        prog="oformer",
        description="Learn the solution operator of a PDE from samples at points, and query it anywhere.\n\n"
        "Start with: oformer demo",
        args=arguments,
        return_unknown_args=True,
    )
    taken = command.action if isinstance(command, Zoo) else command
    check_numbers(taken)
    if not isinstance(command, TAKE_SETTINGS):
        refuse_unknown(rest, " ".join(arguments[: 2 if isinstance(command, Zoo) else 1]), taken)
    return command, rest


def _print_commands() -> None:
    """One line for each command, by what it is for."""
    print("usage: oformer COMMAND [OPTIONS]\n")
    print("Learn the solution operator of a PDE from samples at points, and query it anywhere.")
    print("Start with: oformer demo. What a command takes: oformer COMMAND --help")
    for group, commands in GROUPS.items():
        print(f"\n{group}")
        for name, command in commands.items():
            line = re.split(r"(?<=[.:;])\s|\s\(", command.__doc__ or "")[0].rstrip(".:;")
            print(f"  {name:9} {line}")


def _command_named(kind: str, arguments: Sequence[str], commands: dict[str, type]) -> type | None:
    """The class of the command that the first argument names; None if the first argument is an option or missing."""
    if not arguments or arguments[0].startswith("-"):
        return None
    if arguments[0] not in commands:
        raise unknown_name(kind, arguments[0], commands)
    return commands[arguments[0]]


def _refused_by_system(error: Exception) -> InputError | None:
    """An `InputError` for an array too large for memory or a name that is not UTF-8; None for other errors."""
    if isinstance(error, UnicodeEncodeError):
        return InputError("names that can be written as UTF-8", ascii(error.object)[:200], "Choose another name")
    said = str(error)
    if isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY):
        return InputError("sizes that memory holds", said[:200], "Ask for fewer points, samples or channels")
    return None


def _is_kernel_failure(error: Exception) -> bool:
    """Whether a GPU kernel failed to compile or to run."""
    said = str(error)
    return type(error).__module__.startswith("triton") or "CUDA error" in said or "Triton Error" in said


def _is_met_by_all_ranks(error: Exception) -> bool:
    """Whether all ranks raise this error: they share arguments and losses, but each has its own disk and solver."""
    return isinstance(error, (InputError, TrainingDiverged)) and not isinstance(error.__cause__, OSError)


def _is_missing_package(error: ImportError) -> bool:
    """Whether a package is missing that the user can install, rather than a module of this one."""
    return error.name is not None and not error.name.startswith("oformer")
