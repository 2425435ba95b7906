"""Parsing the command line: types of options, checks of arguments, overrides of a recipe, ranks of torchrun."""

import contextlib
import copy
import dataclasses
import difflib
import functools
import io
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_type_hints

import tyro

from oformer.errors import InputError
from oformer.terminal import say

if TYPE_CHECKING:
    from oformer.training.recipe import Recipe

BOOLEANS = ("true", "false")


@dataclass(frozen=True)
class Within:
    """The range of a number option, as an annotation of its type. Numbers are finite; integers fit into 64 bits."""

    low: float = -math.inf
    high: float = math.inf


DEVICES = "Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps, or any other device of torch."
Device = Annotated[str, tyro.conf.arg(metavar="DEVICE", help=DEVICES)]
Count = Annotated[int, Within(1)]
CountOrNone = Annotated[int, Within(0)]
Positive = Annotated[float, Within(sys.float_info.min)]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


def subcommands(commands: dict[str, type]) -> Any:
    """The type of a command line that begins with one of these commands, for tyro."""
    members = [Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items()]
    return Union[tuple(members)]  # noqa: UP007 - a union of a computed list has no other spelling


def is_first_rank() -> bool:
    """Whether this process prints messages: rank 0 of torchrun, or a process without torchrun."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def silent_on_other_ranks() -> Iterator[None]:
    """Discard the output of all ranks but the first. tyro's own option for that lets some errors through."""
    with contextlib.ExitStack() as stack:
        if not is_first_rank():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def program_name() -> str:
    """The name under which a shell finds this program, so that printed commands can be copied and run."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m oformer"
    if called.stem != "oformer":
        return "oformer"  # a script of somebody who imports us
    found = shutil.which("oformer")
    return "oformer" if found and Path(found).resolve() == called.resolve() else os.path.relpath(called)


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse empty arguments, such as an unset variable of the shell leaves, and those with the character NUL."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
        if (equals or not option) and not value:
            before = option or (arguments[place - 1] if place else "the command")
            raise InputError(f"something after `{before}`", "an empty argument", "Give it a value or leave it out")
        if "\0" in argument:
            raise InputError("arguments without the character NUL", repr(argument), "Leave it out")


def check_numbers(settings: Any, prefix: str = "--") -> None:
    """Refuse numbers outside the range of their option, in a dataclass and in the dataclasses nested in it."""
    kinds = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name.replace("_", "-"), getattr(settings, field.name)
        limits = _limits(kinds[field.name])
        for number in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(number):
                check_numbers(number, f"{name}.")
            elif isinstance(number, (int, float)):
                beyond = 2**63 if isinstance(number, int) else math.inf
                if not (abs(number) < beyond and limits.low <= number <= limits.high):
                    raise InputError(f"{_expected(limits)} for `{name}`", str(number))


def _limits(kind: Any) -> Within:
    """The range of an annotated type, or of the first type with a range inside a union or tuple."""
    inside = (_limits(part) for part in get_args(kind))
    return kind if isinstance(kind, Within) else next((found for found in inside if found != Within()), Within())


def _expected(limits: Within) -> str:
    """The range in words, for an error message."""
    if limits.low == -math.inf:
        return "a finite number of at most 64 bits"
    if limits.high < math.inf:
        return f"a number from {limits.low} to {limits.high}"
    return f"a number of at least {limits.low}" if isinstance(limits.low, int) else "a finite number above zero"


def _options(settings: Any, prefix: str = "--") -> dict[str, bool]:
    """The options of a dataclass and of those nested in it, as they are typed, and which of them are true or false."""
    options: dict[str, bool] = {}
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name.replace("_", "-"), getattr(settings, field.name, None)
        if dataclasses.is_dataclass(value):
            options |= _options(value, f"{name}.")
        else:
            options[name] = field.type in (bool, "bool")  # a string in a user's file with postponed annotations
    return options


def normalize_flags(arguments: Sequence[str], settings: Any) -> list[str]:
    """Rewrite `--flag true` and `--flag=false`, as other programs take them, to `--flag` and `--no-flag` for tyro.

    Args:
        arguments: the command line.
        settings: a dataclass. Only its true/false options are rewritten; after any other option, `true` may be a name.
    """
    flags = {name for name, is_flag in _options(settings).items() if is_flag}
    plain, left = [], list(arguments)
    while left:
        argument = left.pop(0)
        option, equals, value = argument.partition("=")
        option = option.replace("_", "-")
        if option not in flags:
            plain.append(argument)
            continue
        if not equals and left and left[0].lower() in BOOLEANS:
            equals, value = "=", left.pop(0)
        last = max(option.rfind("."), 1) + 1
        negated = f"{option[:last]}no-{option[last:]}"
        if equals and value.lower() not in BOOLEANS:
            raise InputError(
                f"`{option}` alone, or with true or false", f"`{argument}`", f"Write {option} or {negated}"
            )
        plain.append(negated if value.lower() == "false" else option)
    return plain


@silent_on_other_ranks()
def override(recipe: "Recipe", rest: list[str], called: str | None = None, verb: Any = None) -> "Recipe":
    """Replace settings of a recipe by those given on the command line.

    Args:
        recipe: the defaults.
        rest: options such as `--model.encoder.width 128`; `--help` prints all settings and exits.
        called: the arguments by which `oformer train` finds the recipe, for its usage line; by default its name.
        verb: the command, whose own options may have been meant.
    """
    from oformer.training.recipe import Recipe

    if not rest:
        return recipe
    recipe, rest, off = _with_parts(recipe, rest)
    paper = f"{recipe.paper}\n\n" if recipe.paper else ""
    changed, unknown = tyro.cli(
        Recipe,
        default=recipe,
        args=normalize_flags(rest, recipe),
        prog=f"oformer train {called or recipe.name}",
        return_unknown_args=True,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.SuppressFixed),
        description=f"{paper}Every setting of this recipe, with its value. What `train` itself takes "
        f"(--out, --data, --device, --max-minutes...) is in: oformer train --help\n\n{off}",
    )
    refuse_unknown(unknown, f"train {called or recipe.name}", recipe, *[verb] * (verb is not None))
    check_numbers(changed)
    return changed


def _with_parts(recipe: "Recipe", rest: Sequence[str]) -> tuple["Recipe", list[str], str]:
    """Switch the parts that a recipe may lack on and off, as the command line asks: tyro knows those alone that it has.

    Returns:
        The recipe, unchecked, with a missing setting where a part has no default for it, which tyro asks for; the
        arguments that are left; and a sentence on the parts that are off.
    """
    from oformer.training.losses import Region
    from oformer.training.schedules import Drop, Horizon

    left, off = list(rest), []
    for name, kind in {"training.drop": Drop, "training.horizon": Horizon, "training.loss.region": Region}.items():
        option = f"--{name}"
        for spelled in ([option, "none"], [f"{option}=none"]):
            for place in reversed(range(len(left))):
                if left[place : place + len(spelled)] == spelled:
                    del left[place : place + len(spelled)]
                    recipe = _placed(recipe, name, None)
        if functools.reduce(getattr, name.split("."), recipe) is not None:
            continue
        if any(argument.startswith(f"{option}.") for argument in left):
            part = object.__new__(kind)
            for field in dataclasses.fields(kind):
                missing = field.default is dataclasses.MISSING
                object.__setattr__(part, field.name, tyro.MISSING if missing else field.default)
            recipe = _placed(recipe, name, part)
        else:
            off.append(option)
    switch = "Any setting of a part switches it on (--training.drop.probability 0.2); none switches it off."
    return recipe, left, f"Off in this recipe: {', '.join(off)}. {switch}" if off else ""


def _placed(whole: Any, name: str, value: Any) -> Any:
    """A copy of nested dataclasses with a value at a place such as `training.drop`, without the checks of a new one."""
    field, _, inner = name.partition(".")
    changed = copy.copy(whole)
    object.__setattr__(changed, field, _placed(getattr(whole, field), inner, value) if inner else value)
    return changed


def refuse_unknown(rest: Sequence[str], verb: str, *settings: Any) -> None:
    """Refuse arguments that are left over when all options are parsed, and name the option that comes nearest.

    Args:
        rest: the arguments.
        verb: the command that they were given to.
        *settings: the dataclasses whose options it takes.
    """
    if rest:
        unknown = next((argument for argument in rest if argument.startswith("-")), rest[0])
        asked, known = unknown.partition("=")[0].lower(), [name for group in settings for name in _options(group)]
        near = difflib.get_close_matches(asked, known, 1) or [o for o in known if o.endswith(asked.lstrip("-"))]
        hint = f"Did you mean `{near[0]}`? " if near else ""
        raise InputError(f"options of `oformer {verb}`", f"`{unknown}`", f"{hint}All of them: oformer {verb} --help")


def torch_device(choice: str) -> str:
    """The torch device that `--device` stands for; under torchrun, the GPU of this process."""
    from oformer.gpu import compute_device

    device = compute_device(None if choice == "auto" else choice)
    # torchrun starts a process per GPU and puts the number of that GPU into LOCAL_RANK.
    if device.type != "cpu" and device.index is None and "LOCAL_RANK" in os.environ:
        return f"{device.type}:{os.environ['LOCAL_RANK']}"
    return str(device)


def import_recipe_file(file: str | None) -> None:
    """Import the Python file given as `--recipe`, which makes its problems and models known by name."""
    from oformer.experiments.recipes import recipe_named

    if file is not None:
        recipe_named(file)


def remembered_data(run: Path) -> Path | None:
    """Look up and print the path of the user's own data that a run was trained on; None for data of a recipe."""
    from oformer.training.find_data import remembered_own

    own = remembered_own(run)
    if own is not None and is_first_rank():
        say(f"On the data that {run} was trained on: {own}")
    return own
