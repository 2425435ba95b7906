"""Electro- and magnetostatics on meshes (Lötzsch et al. 2022), in the pickles that OFormer was trained on.

A file is a list of dictionaries: `data_x` (points, 11) and `data_y` (points, 3) in float32. A pickle is a program, so
it is not run: every name in it stands for a piece of ours that can build an array of numbers from the bytes in the file
and nothing else, and that happens in the child process (`child.py: pickled_arrays`).

Differs: the boundary flag is `> 0.5`, where the released code asks for 1 to ten digits.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oformer.data.importers.apart import ask
from oformer.data.importers.common import (
    Choices,
    Layout,
    Opened,
    refuse_in_times,
    single_floats,
)
from oformer.errors import InputError
from oformer.fields import Card, Field, Sample
from oformer.problems.electrostatics import Electrostatics
from oformer.problems.magnetostatics import Magnetostatics
from oformer.problems.poisson import PoissonProblem

_KINDS = {"es": "electrostatics", "ms": "magnetostatics"}
PROBLEMS: dict[str, type[PoissonProblem]] = {"electrostatics": Electrostatics, "magnetostatics": Magnetostatics}
_NAMES = ("data_x", "data_y")
_FLAG = 3  # the channel of the boundary


@contextmanager
def open_pickle(path: Path, choices: Choices) -> Iterator[Opened]:
    """A list of samples on scattered points, read whole."""
    kind = _kind(path, choices.kind)
    refuse_in_times(choices.in_times, kind)
    content = ask(
        path, "pickled_arrays", str(path), list(_NAMES), what="a list of samples", expected=path.stat().st_size
    )
    if isinstance(content, str):
        raise InputError(f"a list of samples in {path}", content)
    problem = PROBLEMS[kind]()  # has the same channels, whose names are one
    inputs, queries, targets = problem.card.inputs, problem.card.queries, problem.card.targets
    samples = [_arrays(path, i, entry, (len(inputs), len(targets))) for i, entry in enumerate(content)]
    extra = sorted({key for entry in content for key in entry} - {*_NAMES})
    layout = Layout(
        kind=kind,
        format="pickled arrays",
        arrays={
            "data_x": f"(point, channel) = (n, {len(inputs)}): the input",
            "data_y": f"(point, channel) = (n, {len(targets)}): the target",
            **{name: "not used" for name in extra},
        },
        samples=len(samples),
        times=1,
        card=Card(f"{kind.capitalize()}, from {path.name}", inputs=inputs, queries=queries, targets=targets),
        spec=problem.spec,
        assumptions=(
            "Values stay as in the file: in the published ones each channel, coordinates too, was divided by its "
            "largest size in the training sets.",
            f"A query's feature is 1 where the {inputs[_FLAG]} is above 0.5, otherwise 0.",
        ),
        sizes=tuple(len(x) for x, _ in samples),
    )
    yield Opened(path, layout, lambda first, end: [_sample(*pair) for pair in samples[first:end]])


def _kind(path: Path, kind: str | None) -> str:
    """Electro- or magnetostatics: said by the caller or by the file's name."""
    found = kind or _KINDS.get(re.split(r"[^a-z]", path.stem.lower())[0])
    if found is None:
        raise InputError(
            f"a name that begins with es_ or ms_ for the pickle {path}",
            f"`{path.name}`",
            "Say which it is with `kind`: electrostatics or magnetostatics",
        )
    return found


def _arrays(path: Path, index: int, entry: Any, channels: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    where = f"sample {index} of {path}"
    if not isinstance(entry, dict):
        raise InputError(f"a dictionary with `data_x` and `data_y` as {where}", entry)
    for name, count in zip(_NAMES, channels, strict=True):
        array = entry.get(name)
        if array is None:
            have = ", ".join(f"`{key}`" for key in list(entry)[:8]) or "nothing"
            raise InputError(f"an array `{name}` in {where}", f"{have}"[:120])
        if array.ndim != 2 or array.shape[1] != count or len(array) == 0:
            raise InputError(f"`{name}` of shape (points, {count}) in {where}", str(array.shape))
    x, y = (entry[name] for name in _NAMES)
    if len(x) != len(y):
        raise InputError(f"as many points in `data_x` as in `data_y` of {where}", f"{len(x)} and {len(y)}")
    return x, y


def _sample(x: np.ndarray, y: np.ndarray) -> Sample:
    known = single_floats(x[None])
    coords = known[0, :, :2].contiguous()
    flag = (known[:, :, _FLAG : _FLAG + 1] > 0.5).to(torch.float32)
    return Sample(Field.of(coords, known), Field.of(coords, flag), single_floats(y[None]))
