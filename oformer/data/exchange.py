"""A dataset in the formats of others: HDF5 by names, and xarray."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from oformer.errors import optional_module
from oformer.fields import collate

if TYPE_CHECKING:
    import xarray

    from oformer.data.dataset import PointDataset

_INPUT, _QUERY = ("coords", "inputs", "weights"), ("query_coords", "query_features", "query_weights")


def write_hdf5(dataset: "PointDataset", path: Path) -> None:
    """A group for each sample, with the names of `OperatorRegressor.fit`; an array that is there twice is a link."""
    import h5py

    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with h5py.File(unfinished, "w") as file:
            file.attrs["title"] = dataset.card.title
            for role in ("inputs", "queries", "targets"):
                file.attrs[role] = list(getattr(dataset.card, role))
            written: dict[str, tuple[Tensor, Any]] = {}  # the last tensor of a name, and its place in the file
            for number, sample in enumerate(dataset):
                group = file.create_group(f"{number:08d}")
                tensors = zip((*_INPUT, *_QUERY, "targets"), sample.tensors, strict=False)
                for name, tensor in tensors:
                    if tensor.shape[-1]:  # not query features where there are none
                        places = [place for before, place in written.values() if before is tensor]
                        group[name] = places[0] if places else tensor.numpy()
                        written[name] = tensor, group[name]
                group.attrs.update({name: float(value) for name, value in sample.parameters.items()})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def as_xarray(dataset: "PointDataset") -> "xarray.Dataset":
    """All samples in memory as one Dataset, padded to the most points: a point of padding has weight zero."""
    library = optional_module("xarray", "PointDataset.to_xarray", "pip install 'oformer[io]'")
    batch, card = collate(list(dataset)), dataset.card
    data: dict[str, Any] = {name: ("sample", value.numpy()) for name, value in batch.parameters.items()}
    for role, field in (("input", batch.input), ("query", batch.query)):
        data[f"{role}_coords"] = (("sample", f"{role}_point", "axis"), field.coords.numpy())
        data[f"{role}_weights"] = (("sample", f"{role}_point"), field.weights.numpy())
    for role, values, place, names in (
        ("input", batch.input.values, "input", card.inputs),
        ("query", batch.query.values, "query", card.queries),
        ("target", batch.target, "query", card.targets),
    ):
        if values.shape[-1]:
            data[role] = (("sample", f"{role}_time", f"{place}_point", f"{role}_channel"), values.numpy())
            data |= {f"{role}_channel": np.array(names)} if names else {}
    return library.Dataset(data, {"axis": list("xyz"[: dataset.spec.dim])}, {"title": card.title})
