"""A field as a file for other programs: numpy, NetCDF, a table, or ParaView."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oformer.errors import InputError, optional_module
from oformer.files import save_npz, write_bytes, write_text
from oformer.vtk import write

if TYPE_CHECKING:
    from oformer.fields import Field

ENDINGS = (".npz", ".csv", ".nc", ".vtu", ".pvd", ".vtk")


def check_ending(path: Path, endings: Sequence[str] = ENDINGS) -> None:
    """Refuse a file name whose ending names no format of `save_field`."""
    if path.suffix.lower() not in endings:
        said = f"`{path.name}`" + ("" if path.suffix else ", which has no ending")
        raise InputError(f"a file name that ends in {', '.join(endings)}", said, f"Write {path.stem}{endings[0]}")
    if path.suffix.lower() == ".nc":
        optional_module("xarray", "a NetCDF file", "pip install 'oformer[io]'")


def save_field(path: Path, field: "Field", cells: Any = None, names: Sequence[str] | None = None) -> list[Path]:
    """Write a field without a batch axis in the format that the file name ends in.

    Args:
        path: ends in one of `ENDINGS`. Of several frames, `.vtu` and `.pvd` give a `.pvd` and a `.vtu` for each frame,
            `.vtk` a numbered file for each frame.
        field: on any device.
        cells: what `oformer.vtk.write.as_blocks` takes; `.vtu` and `.vtk` keep them.
        names: of the channels.

    Returns:
        The files that were written, the one to open first.
    """
    check_ending(path)
    coords, values, _ = field.numpy()
    if coords.ndim != 2:
        raise InputError("a field without a batch axis", f"coords of shape {coords.shape}", "Write `field.single(0)`")
    channels, kind = channel_names(names, values.shape[-1]), path.suffix.lower()
    if kind == ".npz":
        save_npz(path, coords=coords, values=values)
    elif kind == ".csv":
        write_text(path, _table(coords, values, channels))
    elif kind == ".nc":
        data = field.to_xarray([name.replace("/", " per ") for name in channels])  # NetCDF has no names with a slash
        write_bytes(path, bytes(data.to_netcdf(engine="scipy", format="NETCDF3_64BIT")))
    else:
        return _for_paraview(path, coords, values, channels, cells)
    return [path]


def channel_names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """The names of channels; without any, `value`, or `value_0`, `value_1`..."""
    if not names:
        return ("value",) if count == 1 else tuple(f"value_{k}" for k in range(count))
    if len(names) != count or len(set(names)) != count:
        raise InputError(f"{count} different names for the channels in `names`", ", ".join(names))
    return tuple(names)


def _table(coords: np.ndarray, values: np.ndarray, channels: tuple[str, ...]) -> str:
    """A row for each point; of several frames one below the other, with a column `time`, which counts them."""
    times = len(values)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(["time"] * (times > 1) + [*"xyz"[: coords.shape[1]], *channels])
    for number, frame in enumerate(values):
        columns = np.concatenate([np.full((len(coords), int(times > 1)), number), coords, frame], -1)
        np.savetxt(text, columns, fmt="%.9g", delimiter=",")
    return text.getvalue()


def _for_paraview(path: Path, coords: np.ndarray, values: np.ndarray, names: Sequence[str], cells: Any) -> list[Path]:
    points = np.pad(coords.astype(np.float32), ((0, 0), (0, 3 - coords.shape[1])))
    blocks, kind = write.as_blocks(cells, len(points), coords.shape[1]), path.suffix.lower()
    encode, suffix = (write.legacy, ".vtk") if kind == ".vtk" else (write.vtu, ".vtu")
    alone = len(values) == 1 and kind != ".pvd"
    frames = [path if alone else path.with_name(f"{path.stem}_{k:04d}{suffix}") for k in range(len(values))]
    for place, frame in zip(frames, values, strict=True):
        write_bytes(place, encode(points, blocks, write.with_vectors(dict(zip(names, frame.T.copy(), strict=True)))))
    if alone or kind == ".vtk":
        return frames
    index = path.with_suffix(".pvd")
    write_text(index, write.series({place.name: float(k) for k, place in enumerate(frames)}))
    return [index, *frames]
