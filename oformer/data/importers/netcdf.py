"""NetCDF files, through xarray: arrays whose axes have names, which tell points, frames and samples apart."""

import re
from pathlib import Path

import numpy as np

from oformer.data.importers.apart import ask
from oformer.errors import optional_module

SUFFIXES = (".nc", ".nc4")
_COORDINATE = re.compile(r"x|y|z|lat(itude)?|lon(gitude)?|lev(el)?|depth|height", re.I)
_TIME = ("t", "time")


def netcdf_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name, as `named_arrays` wants them.

    Variables called x, y, lat, lon... are coordinates, and the axes they lie on are those of points. Where each has an
    axis of its own, the points are those of the grid between them. A function of them becomes (samples, points), or
    (samples, times, points, 1) where it has an axis `time`; the axis of samples is the one that is left, if any.
    """
    optional_module("xarray", f"the NetCDF file {path.name}", "pip install 'oformer[io]'")
    found = ask(path, "netcdf", str(path), what="arrays")
    axes = {name: dims for name, (dims, values) in found.items() if _COORDINATE.fullmatch(name) and dims}
    space = list(dict.fromkeys(dims[-1] for dims in axes.values()))
    grid = len(space) > 1 and all(len(dims) == 1 for dims in axes.values())
    arrays = {}
    if grid:
        planes = np.meshgrid(*(found[name][1] for name in axes), indexing="ij")
        arrays = {name: plane.reshape(-1) for name, plane in zip(axes, planes, strict=True)}
    for name, (dims, values) in found.items():
        others = [dim for dim in dims if dim not in space]
        if name in arrays:
            continue
        if name in axes or not space or not set(space) <= set(dims) or len(set(others) - set(_TIME)) > 1:
            arrays[name] = values
            continue
        times = [dim for dim in others if dim in _TIME]
        order = [*(dim for dim in others if dim not in times), *times, *space]
        values = values.transpose([dims.index(dim) for dim in order])
        shape = [1] * (len(others) == len(times)) + list(values.shape[: len(others)]) + [-1]
        arrays[name] = values.reshape(shape + [1] * len(times))
    return arrays
