"""Small trajectories around an airfoil, in the layouts of the published files."""

import json
import struct

import numpy as np


def trajectory(times=101, seed=0, points=7):
    """A fan of triangles around a point, with a flow on it; "velocity" is the momentum, as published."""
    rng = np.random.default_rng(seed)
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)[: points - 1]
    ring = np.stack([20 * np.cos(angle), 19.96 * np.sin(angle)], -1)
    pos = np.concatenate([[[0.5, 0.0]], ring]).astype(np.float32)
    n = points - 1
    cells = np.stack([np.zeros(n), 1 + np.arange(n), 1 + (np.arange(n) + 1) % n], -1).astype(np.int32)
    types = np.full((points, 1), 4, np.int32)
    types[0], types[1] = 2, 0
    return {
        "cells": cells[None],
        "mesh_pos": pos[None],
        "node_type": types[None],
        "velocity": rng.uniform(50, 200, (times, points, 2)).astype(np.float32),
        "density": rng.uniform(0.9, 1.3, (times, points, 1)).astype(np.float32),
        "pressure": rng.uniform(9e4, 1.1e5, (times, points, 1)).astype(np.float32),
    }


def varint(number):
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def member(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(arrays):
    """A tf.Example of one string of bytes per name."""
    pairs = [
        member(1, member(1, name.encode()) + member(2, member(1, member(1, array.tobytes()))))
        for name, array in arrays.items()
    ]
    return member(1, b"".join(pairs))


def record(payload):
    """A record whose two checksums, which are not read, are zero."""
    return struct.pack("<QI", len(payload), 0) + payload + bytes(4)


def meta(arrays):
    static = ("cells", "mesh_pos", "node_type")
    features = {
        name: {
            "type": "static" if name in static else "dynamic", "shape": list(a.shape), "dtype": str(a.dtype),
        }
        for name, a in arrays.items()
    }  # fmt: skip
    return {
        "simulator": "su2", "dt": 0.0002, "trajectory_length": len(arrays["density"]),
        "field_names": list(features), "features": features,
    }  # fmt: skip


def write_tfrecord(folder, trajectories, name="train"):
    folder.mkdir(exist_ok=True)
    (folder / "meta.json").write_text(json.dumps(meta(trajectories[0])))
    path = folder / f"{name}.tfrecord"
    path.write_bytes(b"".join(record(example(arrays)) for arrays in trajectories))
    return path


def write_npz(folder, trajectories):
    """As OFormer's folders: everything repeated for each frame, names shortened."""
    folder.mkdir(exist_ok=True)
    names = {"node_type": "node_type", "mesh_pos": "pos", "cells": "cells", "density": "dns", "pressure": "prs"}
    for i, arrays in enumerate(trajectories):
        times = len(arrays["density"])
        tiled = {new: np.broadcast_to(arrays[old], (times, *arrays[old].shape[1:])) for old, new in names.items()}
        np.savez(folder / f"{i:03d}.npz", vel=arrays["velocity"], **tiled)
    return folder
