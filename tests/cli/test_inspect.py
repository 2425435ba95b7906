"""`oformer inspect`."""

import numpy as np

from oformer.cli import main


def test_inspect_says_what_things_are(trained, capsys, tmp_path):
    run = trained / "outputs/burgers-demo"
    (dataset,) = (trained / "datasets").iterdir()
    np.savez(tmp_path / "a.npz", thing=np.array([1.0, np.nan]))
    for path, words in (
        (dataset, ["Burgers", "12 (train 0..7, test 8..11)", "64", "checksums all as written"]),
        (run, ["Run: burgers-demo", "step 6", "finished"]),
        (sorted((run / "checkpoints").iterdir())[-1], ["Checkpoint", "parameters", "independent"]),
        (tmp_path / "a.npz", ["thing", "float64 (2,)", "1 not finite"]),
    ):
        assert main(["inspect", str(path), "--verify"]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words), shown


def test_inspect_knows_a_published_npy_from_other_arrays(tmp_path, capsys):
    np.save(tmp_path / "flow.npy", np.zeros((12, 4, 4, 15), np.float32))
    np.save(tmp_path / "points.npy", np.zeros((5, 2)))
    for name, words in (("flow", "(time, x, y, sample) = (12, 4, 4, 15)"), ("points", "coords  float64 (5, 2)")):
        assert main(["inspect", str(tmp_path / f"{name}.npy")]) == 0
        assert words in capsys.readouterr().out
