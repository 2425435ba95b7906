"""What can go wrong and how we say it: every message names what was expected, what came, and what to do."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class InputError(ValueError):
    """A mistake in what the user gave. The command line prints its sentence and exits with code 2."""

    def __init__(self, expected: str, got: str = "", do: str = ""):
        parts = [f"Expected {expected}" + (f", got {got}." if got else ".")]
        if do:
            parts.append(do if do.endswith((".", "?", "!", "`")) else do + ".")
        super().__init__(" ".join(parts))
        self._parts = expected, got, do

    def __reduce__(self) -> tuple[type["InputError"], tuple[str, str, str]]:
        return type(self), self._parts  # so that it passes whole from one process to another


class SolverDiverged(RuntimeError):
    """The mathematics failed: a solver left the finite numbers."""

    def __init__(self, solver: str, step: int, time: float, norm: float):
        super().__init__(f"{solver} diverged at step {step} (time {time:g}): norm {norm:g}.")
        self.solver, self.step, self.time, self.norm = solver, step, time, norm

    def __reduce__(self) -> tuple[type["SolverDiverged"], tuple[str, int, float, float]]:
        return type(self), (self.solver, self.step, self.time, self.norm)


class TrainingDiverged(RuntimeError):
    """The loss, the weights or the optimizer's moments left the finite numbers."""

    def __init__(self, step: int, checkpoint: str, what: str = "The loss"):
        super().__init__(
            f"{what} left the finite numbers near step {step}. The last good state is {checkpoint}. "
            "Lower the rate (--training.optimizer.rate), clip gradients, or look for outliers in the data."
        )
        self._parts = step, checkpoint, what

    def __reduce__(self) -> tuple[type["TrainingDiverged"], tuple[int, str, str]]:
        return type(self), self._parts


class OutsideTraining(UserWarning):
    """An operator is asked about what training has not shown it."""


class DamagedCheckpoint(UserWarning):
    """The newest checkpoint of a run cannot be read, and training goes on from an older one."""


class OutOfMemory(RuntimeError):
    """A device has no room for what was asked of it."""

    def __init__(self, what: str, device: str, do: str):
        super().__init__(f"Memory for {what} is not there on {device}. {do}")
        self._parts = what, device, do

    def __reduce__(self) -> tuple[type["OutOfMemory"], tuple[str, str, str]]:
        return type(self), self._parts


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """The error for a name that does not exist: lists the choices and the nearest one."""
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.4)
    hint = f"Did you mean `{near[0]}`? " if near else ""
    return InputError(f"the name of a {kind}", f"`{name}`", f"{hint}Choices: {', '.join(choices)}.")


def optional_module(name: str, purpose: str, install: str) -> ModuleType:
    """A module of a package that not everybody installs, or an error that says what it is for and how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"the package {name} for {purpose}", "none installed", f"Install it: {install}") from error
