"""`oformer predict`: from a file to a file, in physical units."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oformer.cli import main
from oformer.field_files import save_field
from oformer.fields import Field
from oformer.vtk.read_xml import read_xml
from tests.cli.command import ENVIRONMENT, cli


def test_a_prediction_does_not_load_the_compiler():
    """Which takes longer than all else together."""
    code = (
        "import sys\n"
        "import oformer.training.loop, oformer.playground.server\n"
        "from oformer import Predictor\n"
        "from oformer.fields import Field\n"
        "import torch\n"
        "x = torch.linspace(0, 1, 65)[:-1, None]\n"
        "Predictor('burgers-demo')(Field.of(x, torch.sin(6.283 * x)[None]), Field.of(x))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_predict_writes_physical_values_where_asked(trained, tmp_path):
    x = np.arange(40) / 40
    np.savez(tmp_path / "in.npz", coords=x[:, None], values=np.sin(2 * np.pi * x)[:, None])
    np.save(tmp_path / "where.npy", np.array([[0.1], [0.5], [0.77]]))
    out, picture = tmp_path / "out.npz", tmp_path / "out.png"
    done = cli(
        "predict", "outputs/burgers-demo", tmp_path / "in.npz", "--queries", tmp_path / "where.npy", "--out", out,
        "--plot", picture, "--memory-gb", "1e-5", cwd=trained,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = np.load(out)
    assert answer["values"].shape == (1, 3, 1)

    import torch

    from oformer.fields import Field
    from oformer.predict import Predictor

    field = Field.of(torch.tensor(x[:, None]).float(), torch.sin(2 * torch.pi * torch.tensor(x)).float()[None, :, None])
    expected = Predictor(trained / "outputs/burgers-demo", "cpu")(field, torch.tensor([[0.1], [0.5], [0.77]]))
    np.testing.assert_allclose(answer["values"], expected.values.numpy(), rtol=1e-5, atol=1e-7)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_predict_warns_in_one_sentence_of_what_training_has_not_shown(tmp_path, capsys):
    x = np.arange(64) / 64
    for change, words in (
        (lambda u: 30 * u, "input channel 0 from -30 to 30, in training from -2.27 to 2.23"),
        (lambda u: u + 0.5, "the mean of input channel 0 from 0.5 to 0.5, in training from -4.89e-09 to 3.83e-09"),
        (lambda u: u, None),
    ):
        np.savez(tmp_path / "in.npz", coords=x, values=change(np.sin(2 * np.pi * x)))
        assert main(["predict", "burgers-demo", str(tmp_path / "in.npz"), "--out", str(tmp_path / "out.npz")]) == 0
        *said, wrote = capsys.readouterr().err.splitlines()
        before = "oformer: Outside of what it was trained on, and so perhaps wrong: "
        assert said == ([] if words is None else [before + words])
        assert wrote.startswith("Wrote 1 frame(s)")


def test_a_mesh_goes_in_by_the_names_of_its_fields_and_comes_out_with_its_cells(trained, tmp_path, monkeypatch, capsys):
    """On a line with two fields; the answer is that of the same values from a .npz."""
    monkeypatch.chdir(trained)
    x = np.arange(40, dtype=np.float32)[:, None] / 40
    u, cells = np.sin(2 * np.pi * x), np.stack([np.arange(39), np.arange(1, 40)], -1)
    np.savez(tmp_path / "in.npz", coords=x, values=u)
    known = Field.of(x, np.concatenate([u, np.cos(u)], -1))
    known.to_vtu(tmp_path / "in.vtu", cells, ["u at time 0", "other"])
    known.to_vtu(tmp_path / "named.vtu", cells, ["velocity", "other"])
    save_field(tmp_path / "in.csv", known, names=["u at time 0", "other"])
    command = ["predict", "outputs/burgers-demo", "--device", "cpu", "--out"]

    def answer(out, *more):
        assert main([*command, str(tmp_path / out), *map(str, more)]) == 0
        return tmp_path / out

    wanted = np.load(answer("out.npz", tmp_path / "in.npz"))["values"][0, :, 0]
    for number, question in enumerate(([tmp_path / "in.vtu"], [tmp_path / "named.vtu", "--inputs", "velocity"])):
        (mesh,) = read_xml(str(answer(f"{number}.vtu", *question)))
        np.testing.assert_allclose(mesh.at_points["u at time 1"], wanted, rtol=1e-5, atol=1e-6)
        assert [block.corners.tolist() for block in mesh.blocks] == [cells.tolist()]
    table = np.genfromtxt(answer("out.csv", tmp_path / "in.csv"), delimiter=",", skip_header=1)
    np.testing.assert_allclose(table, np.stack([x[:, 0], wanted], -1), rtol=1e-4, atol=1e-6)
    (mesh,) = read_xml(str(answer("grid.vtu", tmp_path / "in.npz", "--resolution", 7)))
    assert mesh.blocks[0].corners.tolist() == [[k, k + 1] for k in range(6)]
    there = answer("there.npz", tmp_path / "in.npz", "--queries", tmp_path / "in.vtu")
    np.testing.assert_allclose(np.load(there)["values"][0, :, 0], wanted, rtol=1e-5, atol=1e-6)
    capsys.readouterr()
    for arguments, words in (
        (["out.bmp", tmp_path / "in.npz"], "ends in .npz, .csv, .nc, .vtu, .pvd, .vtk, got `out.bmp`"),
        (["in.vtu", tmp_path / "in.vtu"], "another file for --out than those that are read"),
        (["out.vtu", tmp_path / "named.vtu"], "`u at time 0` among `velocity`, `other`, `x`. Say which fields"),
        (["out.vtu", tmp_path / "in.npz", "--inputs", "u"], "--inputs only for a mesh file or a .csv"),
    ):
        assert main([*command, str(tmp_path / arguments[0]), *map(str, arguments[1:])]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out.bmp").exists()


def _bad_input(folder: Path, name: str) -> list[str]:
    """Arguments that hand over a damaged or wrong file."""
    run, x = "outputs/burgers-demo", np.arange(8.0)[:, None]
    values = np.ones((8, 1))
    if name == "nan":
        values[3] = np.nan
    if name == "infinite":
        values[3] = np.inf
    coords = np.ones((8, 2)) if name == "wrong dimension" else x[:0] if name == "empty" else x
    values = values[:5] if name == "mismatched" else values[:0] if name == "empty" else values
    np.savez(folder / "in.npz", coords=coords, values=values)
    if name == "truncated":
        (folder / "in.npz").write_bytes((folder / "in.npz").read_bytes()[:60])
    if name == "foreign":
        (folder / "in.npz").write_text("this is no array")
    return ["predict", run, str(folder / "in.npz"), "--out", str(folder / "out.npz"), "--device", "cpu"]


BAD_INPUTS = {
    "nan": "1 NaN or infinite values",
    "infinite": "1 NaN or infinite values",
    "wrong dimension": "lives in 1 dimension",
    "empty": "at least one point",
    "mismatched": "as many `values` as points",
    "truncated": "plain arrays",
    "foreign": "plain arrays",
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_file_is_one_sentence_and_leaves_what_was_there(name, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (tmp_path / "out.npz").write_bytes(b"precious")
    assert main(_bad_input(tmp_path, name)) == 2
    said = capsys.readouterr().err
    assert BAD_INPUTS[name] in said
    assert said.count("\n") == 1
    assert (tmp_path / "out.npz").read_bytes() == b"precious"
