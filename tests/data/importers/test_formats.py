"""The table of formats: a row and a function add a format; the command line and the page of formats follow it."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

from oformer.cli import main, parse
from oformer.data.importers import KINDS, SUFFIXES, formats, import_file, load_file, recognize, run
from oformer.data.importers.common import Named, Rows
from oformer.data.importers.equations import by_names
from oformer.data.importers.formats import FORMATS, Format
from oformer.errors import InputError
from oformer.fields import Spec

ROOT = Path(__file__).parents[3]


# A text file with a sample of Burgers in each row: the initial and the final state.
@contextlib.contextmanager
def open_text(path, choices):
    table = np.loadtxt(path, ndmin=2)
    half = table.shape[1] // 2
    parts = {"a": table[:, :half], "u": table[:, half:]}
    arrays = {name: Rows(part.shape, lambda i, j, part=part: part[i:j], part.dtype) for name, part in parts.items()}
    yield by_names(Named(path, "text", arrays, {}), choices)


TEXT = Format("text file", ("burgers",), (".txt",), open_text)


@pytest.fixture
def with_text(monkeypatch):
    monkeypatch.setattr(run, "FORMATS", (*FORMATS, TEXT))


@pytest.mark.usefixtures("with_text")
def test_a_row_of_the_table_adds_a_format(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = np.random.default_rng(0).standard_normal((6, 32))
    np.savetxt("waves.txt", table)
    assert recognize("waves.txt").spec == Spec(1, 1, 1, 1, 1, grid=(16,), periods=(1.0,))
    store = import_file("waves.txt", "out", n_test=2)
    np.testing.assert_allclose(store[4].target[0, :, 0], table[4, 16:], rtol=1e-6)
    assert len(load_file("waves.txt")) == 6
    assert main(["import", "waves.txt", "--kind", "burgers", "--train", "4"]) == 0
    assert "Layout: burgers, text" in capsys.readouterr().out
    for request, words in (
        ({"stride": 2}, "`stride` only where"),
        ({"kind": "darcy"}, "burgers in the text file waves.txt, got `darcy`, which is never written so"),
    ):
        with pytest.raises(InputError, match=words):
            recognize("waves.txt", **request)


def test_one_row_claims_a_folder_of_named_arrays_and_none_a_note(tmp_path):
    np.savez(tmp_path / "a.npz", coords=np.zeros((3, 1)), inputs=np.zeros((2, 3)), targets=np.zeros((2, 3)))
    (tmp_path / "a.txt").write_text("a note")
    claims = {format.name for format in FORMATS if format.claims(tmp_path, b"", formats.Choices())}
    assert claims == {"file of named arrays"}
    with pytest.raises(InputError, match=r"a file of a known format \(.*\.npz, \.mat.*begins with b'a note'"):
        recognize(tmp_path / "a.txt")


def test_a_folder_of_files_that_are_imported_alone_names_them(tmp_path):
    for name in ("b.npy", "a.pkl", "c.txt"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=r"a folder; name one of its files: a\.pkl, b\.npy\."):
        recognize(tmp_path)


def test_the_command_line_takes_the_kinds_of_the_table(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.zeros((12, 4, 4, 3)))
    for kind in KINDS:
        command, rest = parse(["import", "a.npy", "--kind", kind])
        assert (command.kind, rest) == (kind, [])
    assert main(["import", str(tmp_path / "a.npy"), "--kind", "navierstokes"]) == 2
    said = capsys.readouterr().err
    assert f"Did you mean `navier-stokes`? Choices: {', '.join(sorted(KINDS))}." in said


def test_the_page_of_formats_lists_the_kinds_and_suffixes_of_the_table():
    page = (ROOT / "docs" / "data-formats.md").read_text()
    (row,) = re.findall(r"^\| `--kind KIND` \|(.*)", page, re.M)
    assert re.findall(r"`([\w-]+)`", row) == list(KINDS)
    assert set(SUFFIXES) <= set(re.findall(r"`(\.\w+)`", page))
