"""`oformer analyze`."""

import json

import numpy as np

from oformer.cli import main
from tests.cli.command import SMALL


def test_latents_of_a_run_on_data_of_ones_own_with_a_parameter(tmp_path, monkeypatch, capsys):
    """Amplitudes of waves: the linear lift of an untrained encoder holds their mean already."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    x, level = np.linspace(0, 1, 16, endpoint=False), random.uniform(0.5, 4, 70)
    waves = np.sin(2 * np.pi * x) + level[:, None]
    from oformer.data.dataset import PointDataset

    data = PointDataset.from_arrays(x, waves, waves, parameters={"level": level})
    data.save("waves", splits={"train": (0, 50), "test": (50, 70)})
    settings = ["--model.encoder.width", "8", "--model.encoder.depth", "1", "--model.query.width", "8"]
    steps = ["--training.steps", "2", "--data.train", "50", "--data.test", "20", "--out", "run", "--device", "cpu"]
    assert main(["train", "--data", "waves", *settings, *steps]) == 0
    capsys.readouterr()
    assert main(["analyze", "run", "--latents", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "level: R² " in said.out
    found = json.loads((tmp_path / "run/plots/latents.json").read_text())
    assert found["r2"] > 0.9
    assert (len(found["trained"]), len(found["true"])) == (50, 20)
    assert np.allclose(found["true"], level[50:], rtol=1e-6)
    assert (tmp_path / "run/plots/latents.png").is_file()
    assert main(["analyze", "run", "--device", "cpu"]) == 2
    assert "There is one: --latents" in capsys.readouterr().err


def test_an_ablation_trains_in_a_folder_of_its_name_and_is_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "burgers-demo", "--ablation", "attention=softmax,norm=none", "--device", "cpu", *SMALL]) == 0
    run = "outputs/burgers-demo+attention=softmax,norm=none"
    recipe = json.loads((tmp_path / run / "recipe.json").read_text())
    assert (recipe["model"]["attention"], recipe["model"]["norm"]) == ("softmax", "none")
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    assert "test split, 4 samples" in capsys.readouterr().out
    assert main(["list", "--ablations"]) == 0
    listed = capsys.readouterr().out
    assert "attention=softmax" in listed
    assert "Figure 7" in listed
