"""Files that are either the old one or the new one, never half of one.

Everything the package writes goes through here: a write lands under a temporary name, is flushed to the disk, and
is renamed into place. A crash, Ctrl-C or a full disk leaves what was there before.
"""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from oformer.errors import InputError

# The types that both numpy and safetensors know; a file with another one is foreign to us.
_NUMPY_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip

# Errors of a file system that knows no locks, such as Lustre mounted without them.
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
CONFIG, CARD, MODEL_CARD = "config.json", "README.md", "card.json"  # of a checkpoint, and of one in the zoo
LOCK = ".lock"  # in a folder that one process at a time may write to: the process that does


@contextlib.contextmanager
def said_plainly(path: Path) -> Iterator[None]:
    """Raise an `InputError` with one sentence where writing `path` meets a full disk, a forbidden or a vanished place.

    Whatever was complete before has not been touched.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"space on the disk to write {path}",
                "none left",
                "Nothing there was changed. Free some space, then run it again",
            ) from error
        refused = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
        if error.errno in refused:
            raise InputError(
                f"a place that can be written at {path}", str(error.strerror), "Choose another folder"
            ) from error
        if error.errno in (errno.ENOENT, errno.ESTALE):
            raise InputError(
                f"{error.filename or path} to stay while {path} is written",
                "nothing there",
                "It was deleted, moved or unmounted. Put it back or choose another folder, then run it again",
            ) from error
        raise


def _temporary(path: Path) -> Path:
    """A hidden name beside `path` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _flush(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut; Windows cannot open folders and needs no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, *chunks: bytes) -> None:
    """Write a file whole or not at all."""
    with said_plainly(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(path)
        try:
            # Mode x lets the system choose the permissions: asking for the umask instead would change it for a
            # moment in every thread.
            with temporary.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write JSON that a person can read and `git diff`."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def finite_json(content: Any) -> Any:
    """The content with null in place of NaN and infinity, which are not JSON."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: finite_json(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite_json(value) for value in content]
    return content


def check_regular(path: Path) -> None:
    """Refuse a device or a pipe, from which a read may never return."""
    with contextlib.suppress(OSError):  # absent or forbidden: whoever opens it says so
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InputError(f"a file at {path}", "a device or a pipe", "Check the path")


@contextlib.contextmanager
def readable(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, with a sentence where it is absent, forbidden, a device or a pipe."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"a file at {path}", "nothing there", "Check the path") from None
    except OSError as error:
        raise InputError(f"a readable file at {path}", str(error.strerror), "Check the path") from error


def spare_memory() -> float:
    """Bytes that reading one file may take: half of the free memory, since an array passes on to where it is used."""
    return 0.5 * free_memory()


def free_memory() -> float:
    """Bytes of memory that are free, within the limit of a container.

    Where the system does not tell them, half of all memory; where it does not tell that either, infinity.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
        with contextlib.suppress(OSError, ValueError):  # only a container has a limit, else it is absent or `max`
            free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        return free
    except (OSError, StopIteration):  # only Linux has it
        pass
    try:
        return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return math.inf


def read_json(path: Path) -> Any:
    """Read JSON, with a sentence instead of a stack trace where it is missing or broken."""
    with readable(path) as file:
        try:
            # NaN is no JSON, and nothing of ours writes it.
            return json.loads(file.read().decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"JSON in {path}", f"something unreadable ({error})", "The file is damaged or foreign"
            ) from error


def read_versioned(path: Path, format: str, version: int) -> dict[str, Any]:
    """Read a JSON object of one of our formats, refused where it is foreign or of a newer version.

    Args:
        path: the file.
        format: what it must say under `format`.
        version: the newest that is known.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != format:
        raise InputError(f"`format: {format}` in {path}", "something foreign", "Check the path")
    found = content.get("version")
    if type(found) is not int or found < 1:
        raise InputError(f"a version from 1 to {version} in {path}", repr(found)[:80], "The file is damaged or foreign")
    if found > version:
        writer = f", written by {content['written_by']}" if "written_by" in content else ""
        advice = "It was written by a newer oformer; upgrade this one: `pip install --upgrade oformer`"
        raise InputError(f"version {version} or older of `{format}` in {path}", f"version {found}{writer}", advice)
    return content


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def listed(folder: Path) -> list[Path]:
    """The content of a folder, in any order; empty where there is no folder."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            f"a folder that can be listed at {folder}", str(error.strerror), "Check its permissions: ls -ld shows them"
        ) from error


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; a second process is refused. The system unlocks it when the process dies.

    Where the file system knows no locks, a warning says so and nothing is locked.
    """
    path = folder / LOCK
    with contextlib.ExitStack() as stack:
        with said_plainly(path):
            folder.mkdir(parents=True, exist_ok=True)
            # Without a buffer: a disk that is full is met once, and not again when the file is closed.
            file = stack.enter_context(path.open("a+b", buffering=0))
            try:
                _lock(file)
            except BlockingIOError:
                file.seek(0)
                raise InputError(
                    f"{folder} to be written by no other process",
                    f"a lock of {file.read().decode() or 'another process'}",
                    "Wait until that process has ended, or choose another folder",
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _lock(file: IO[bytes]) -> None:
    """Lock an open file; raises BlockingIOError where another process, or this one, has locked it."""
    missing = "this system"
    if os.name != "nt":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            missing = "its file system"
    warnings.warn(
        f"{file.name} cannot be locked: {missing} has no file locks. Take care that no second process writes there.",
        stacklevel=2,
    )


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder under a temporary name; it appears at `path`, complete, when the block ends without error.

    A folder already at `path` stays whole until the new one has its name.
    """
    with said_plainly(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for old, name in _exchanged(path.parent):
            if name == path.name:
                _put_back(old, path)
        temporary = _temporary(path)
        try:
            temporary.mkdir()
            yield temporary
            if path.exists() and not path.is_dir():
                raise InputError(f"a folder or nothing at {path}", "a file", "Choose another name")
            _exchange(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _exchange(temporary: Path, path: Path) -> None:
    """Rename a finished folder to `path`; what was there is deleted only after that."""
    if not path.exists():
        os.replace(temporary, path)
        _flush(path.parent)
        return
    # Not `.tmp`: killed between the two renames, the old folder is all there is, and `remove_leftovers` puts it back.
    old = temporary.with_suffix(".old")
    os.replace(path, old)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.replace(old, path)
        raise
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchanged(folder: Path) -> list[tuple[Path, str]]:
    """Old folders that a process killed while it exchanged them left in `folder`, and the names they had."""
    found = ((path, re.fullmatch(r"\.(.+)\.[0-9a-f]{12}\.old", path.name)) for path in listed(folder))
    return [(path, match[1]) for path, match in found if match is not None]


def _put_back(old: Path, path: Path) -> None:
    """Give an old folder its name again, or delete it where the new one has it."""
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(old, path)
        _flush(path.parent)


def remove_leftovers(folder: Path, older_than: float = 0.0) -> None:
    """Delete the temporary files and folders that a killed process left in `folder`.

    A folder that was to be replaced, and whose process was killed between the two renames, gets its name back.

    Args:
        folder: where to look; not in folders inside it.
        older_than: spare what was changed in the last so many seconds: another process may be writing it.
    """

    def abandoned(path: Path) -> bool:
        return time.time() - path.stat().st_mtime >= older_than

    # Another process may delete the same one, or finish it, while we look.
    with said_plainly(folder):
        for old, name in _exchanged(folder):
            with contextlib.suppress(FileNotFoundError):
                if abandoned(old):
                    _put_back(old, folder / name)
        for leftover in listed(folder):
            if leftover.name.startswith(".") and leftover.suffix == ".tmp":
                with contextlib.suppress(FileNotFoundError):
                    if abandoned(leftover):
                        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as one safetensors file, the same bytes for the same arrays."""
    names = {np.dtype(code): name for name, code in _NUMPY_TYPES.items()}
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    position = 0
    # Widest types first keeps every array aligned, so that a memory map can be used in place.
    for name in sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name)):
        data = np.ascontiguousarray(arrays[name]).tobytes()
        header[name] = {
            "dtype": names[arrays[name].dtype],
            "shape": list(arrays[name].shape),
            "data_offsets": [position, position + len(data)],
        }
        chunks.append(data)
        position += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(path, struct.pack("<Q", len(text)), text, *chunks)


def save_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write named arrays as numpy's .npz, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # pyright: ignore[reportArgumentType]
    write_bytes(path, buffer.getvalue())


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Read a .npz, or a .npy as the one array `coords`; pickled objects are refused."""
    with readable(path) as file:
        try:
            size = path.stat().st_size
            if file.read(4) == b"PK\x03\x04":
                # A member never gives more bytes than the archive's list says, and numpy fills no more of an array.
                size = sum(member.file_size for member in zipfile.ZipFile(file).infolist())
            if size > spare_memory():
                raise MemoryError(f"{size / 2**30:.3g} GiB")
            file.seek(0)
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                return {"coords": content}
            with content:
                return {name: content[name] for name in content.files}
        except MemoryError as error:
            raise InputError(
                f"arrays at {path} of at most half of the memory that is free",
                f"more ({error})",
                "Save them in several files, or in HDF5; if they should be small, the file is damaged",
            ) from error
        except Exception as error:  # foreign bytes make zipfile, its decompressors and numpy fail in every way
            reason = " ".join(str(error).split())[:160]
            raise InputError(
                f"a .npz or .npy file of plain arrays at {path}", f"another ({reason})", "Save it with numpy.savez"
            ) from error


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Open a safetensors file as memory-mapped arrays: nothing is read until it is used.

    The arrays are read-only views of one map, so a file costs one map however many arrays it holds.
    """
    with readable(path) as file:
        try:
            with safe_open(path, "numpy"):  # which checks the header and the length of the file
                length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            kinds = {entry["dtype"] for entry in header.values()}
            if foreign := kinds - _NUMPY_TYPES.keys():
                known = ", ".join(_NUMPY_TYPES)
                raise InputError(f"array types among {known} in {path}", ", ".join(sorted(foreign)), "Convert the file")
            data, arrays = np.asarray(np.memmap(path, np.uint8, mode="r"))[8 + length :], {}
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                arrays[name] = data[first:last].view(_NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
            return arrays
        except InputError:
            raise
        except (SafetensorError, ValueError) as error:  # numpy knows fewer axes and shorter ones
            found = f"{path.stat().st_size} bytes that are none ({error})"
            damaged = "The file is truncated or foreign; make or copy it again"
            raise InputError(f"a safetensors file at {path}", found, damaged) from error


def zoo_folder() -> Path:
    """The folder of trained operators: inside an installed package, `zoo/` beside it in a checkout.

    The environment variable OFORMER_ZOO names another one.
    """
    chosen, inside = os.environ.get("OFORMER_ZOO"), Path(__file__).parent / "weights"
    if chosen:
        return Path(chosen)
    return inside if inside.is_dir() else Path(__file__).parent.parent / "zoo"


def zoo_names() -> list[str]:
    """The names of the trained operators in that folder."""
    return sorted(path.parent.name for path in zoo_folder().glob(f"*/{CONFIG}"))
