"""`oformer import`, and what it says of files that are no data."""

from pathlib import Path

import numpy as np
import pytest

from oformer.cli import main


def test_import_says_what_a_file_is_and_writes_what_inspect_said(tmp_path, monkeypatch, capsys):
    import scipy.io

    monkeypatch.chdir(tmp_path)
    a = np.random.default_rng(0).standard_normal((10, 16))
    scipy.io.savemat("waves.mat", {"a": a, "u": 2 * a})
    assert main(["inspect", "waves.mat"]) == 0
    understood = capsys.readouterr().out
    assert all(w in understood for w in ("Layout: burgers", "(sample, x) = (10, 16)", "periodic", "assumed"))
    assert not (tmp_path / "datasets").exists()
    assert main(["import", "waves.mat", "--train", "6", "--test", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == understood
    assert "Imported 8 of 8 samples" in shown.err
    assert main(["inspect", "datasets/waves", "--verify"]) == 0
    assert "8 (train 0..5, test 6..7)" in capsys.readouterr().out
    assert main(["import", "waves.mat"]) == 2  # it is there already
    assert "no file or folder yet" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["import", "inspect"])
def test_a_foreign_file_that_is_not_understood_is_one_sentence(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.mat").write_text("no matrix " * 30)
    Path("code.pt").write_bytes(b"cos\nsystem\n(S'echo bad'\ntR.")
    for name in ("text.mat", "code.pt"):
        assert main([verb, name]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("oformer: Expected")
        assert shown.err.count("\n") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"text.mat", "code.pt"}
