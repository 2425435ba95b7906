"""The published model that judges our data: as large as printed, the layers that its paper describes, and it learns."""

import json
import math

import known_model
import pytest
import torch
from known_model import FNO, KNOWN, MODES, WIDTH, SpectralLayer

from oformer.errors import InputError


def test_as_many_parameters_as_printed():
    assert sum(p.numel() for p in FNO(64).parameters()) == 414_517


def test_a_layer_mixes_the_channels_of_each_low_mode_and_drops_the_others():
    """Against fast Fourier transforms of noise, which has every mode."""
    torch.manual_seed(0)
    n, layer = 32, SpectralLayer(32, last=True).eval()
    with torch.no_grad():
        layer.beside.weight.zero_()
        layer.beside.bias.zero_()
    v = torch.randn(3, n, n, WIDTH)
    spectrum, mixed = torch.fft.rfft2(v, dim=(1, 2)), torch.zeros(3, n, n // 2 + 1, WIDTH, dtype=torch.complex64)
    matrices = torch.view_as_complex(layer.matrices.detach())
    for row in range(-MODES, MODES):
        for column in range(MODES):
            mixed[:, row, column] = spectrum[:, row, column] @ matrices[row, column]
    expected = torch.fft.irfft2(mixed, s=(n, n), dim=(1, 2)) / math.sqrt(1 + layer.norm.eps)
    torch.testing.assert_close(layer(v), expected, rtol=1e-4, atol=1e-5)


def test_it_marches_on_what_it_said():
    torch.manual_seed(0)
    model, frames = FNO(16).eval(), torch.randn(2, KNOWN, 16, 16)
    with torch.no_grad():
        found = model.march(frames, 2)
        first, second = found[:, :1], found[:, 1:]
        torch.testing.assert_close(model.march(torch.cat([frames[:, 1:], first], 1), 1), second)
        changed = frames.clone()
        changed[:, 0] += 1  # seen by the first prediction, and by the second through it alone
        assert not torch.allclose(model.march(changed, 1), first)


def test_it_learns_to_shift_a_field():
    torch.manual_seed(0)
    start = torch.randn(24, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    frames = torch.cat([start.roll(time, 3) for time in range(KNOWN + 2)], 1)
    train, test = ((part[:, :KNOWN], part[:, KNOWN:]) for part in (frames[:20], frames[20:]))
    told = []
    error = known_model.trained(train, test, epochs=40, tell=told.append)
    assert [numbers["epoch"] for numbers in told] == list(range(4, 41, 4))
    assert error == told[-1]["test"]
    assert told[-1]["train"] < 0.5 * told[0]["train"]
    assert error < 0.5


def test_the_command_writes_a_journal_and_names_the_published_error(tmp_path, capsys):
    recipe = tmp_path / "small_flow.py"
    recipe.write_text(
        "import dataclasses\n"
        "from oformer.experiments.recipes import RECIPES\n"
        "row = RECIPES['ns3']\n"
        "problem = dataclasses.replace(row.problem, points=16, solver_points=16, duration=12, time_step=0.05)\n"
        "recipe = dataclasses.replace(row, name='small', problem=problem,\n"
        "                             data=dataclasses.replace(row.data, train=4, test=2))\n"
    )
    journal = tmp_path / "journal.jsonl"
    options = [str(recipe), "--law", "2022", "--epochs", "1", "--device", "cpu"]
    assert known_model.main([*options, "--datasets", str(tmp_path / "data"), "--journal", str(journal)]) == 0
    about, last = (json.loads(line) for line in journal.read_text().splitlines())
    assert (about["data"], about["law"], about["epochs"]) == ("small", "2022", 1)
    said = capsys.readouterr().out
    assert f"first states of 2022: {last['test']:.4f}" in said
    assert known_model.published("ns3") == 0.1556
    assert known_model.published("small") is None


def test_other_problems_are_refused():
    with pytest.raises(InputError, match="a recipe of Navier-Stokes"):
        known_model.main(["burgers-2048", "--device", "cpu"])
