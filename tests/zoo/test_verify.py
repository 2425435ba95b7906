"""Verifying the zoo: test samples come back by their seed, and damage is noticed."""

import dataclasses

import numpy as np
import pytest

from oformer.checkpoint import WEIGHTS, load_checkpoint, zoo_folder, zoo_names
from oformer.cli import main
from oformer.errors import InputError
from oformer.files import map_arrays, save_arrays, sha256
from oformer.zoo import verify
from oformer.zoo.card import read_card
from tests.zoo.cards import rewrite


def test_verify_reproduces_the_card_from_the_seed_alone(here, capsys):
    """In a folder without any dataset: the test samples are made again."""
    found = verify.compare("tiny")
    assert found.samples == 4
    assert abs(found.difference) < 1e-5
    part = verify.compare("tiny", samples=2)
    card = read_card(here / "tiny")
    assert part.card == pytest.approx(sum(card.by_sample[:2]) / 2)
    assert abs(part.difference) < 1e-5
    assert main(["zoo", "verify", "--device", "cpu"]) == 0
    assert "4 samples" in capsys.readouterr().out
    rewrite(here / "tiny", scores={**dataclasses.asdict(card.scores), "error": 1.02 * card.scores.error})
    assert main(["zoo", "verify", "tiny", "--device", "cpu"]) == 1
    assert "-1.961%" in capsys.readouterr().out
    assert main(["zoo", "verify", "tiny", "--tolerance", "0.05", "--device", "cpu"]) == 0


@pytest.mark.parametrize("file", [WEIGHTS, "journal.jsonl", "config.json"])
def test_a_changed_or_missing_file_is_noticed_at_once(here, file, capsys):
    assert main(["zoo", "verify", "--quick"]) == 0
    assert "it predicts" in capsys.readouterr().out
    content = (here / "tiny" / file).read_bytes()
    (here / "tiny" / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if file == "config.json":
        (here / "tiny" / file).write_bytes(content + b"\n")
    assert main(["zoo", "verify", "--quick"]) == 1
    assert f"{file} was changed" in capsys.readouterr().out
    if file != "config.json":  # without which there is no operator of that name
        (here / "tiny" / file).unlink()
        assert verify.damage("tiny") == [f"{file} is missing"]


def test_weights_that_are_not_finite_are_noticed(here):
    path = here / "tiny" / WEIGHTS
    arrays = {name: array.copy() for name, array in map_arrays(path).items()}
    next(array for name, array in arrays.items() if name.startswith("model.")).fill(np.nan)
    save_arrays(path, arrays)
    card = read_card(here / "tiny")
    rewrite(here / "tiny", files={**card.files, WEIGHTS: sha256(path)})
    (wrong,) = verify.damage("tiny")
    assert "NaN or infinity in `model." in wrong


def test_damage_of_a_shipped_operator_is_refused_before_it_answers(here):
    path = here / "tiny" / WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=r"model\.safetensors as it was written, with the SHA-256 in card\.json"):
        load_checkpoint(here / "tiny")
    assert load_checkpoint(here / "tiny", verify=False).name == "tiny"


def test_the_zoo_is_small_and_whole(monkeypatch):
    monkeypatch.delenv("OFORMER_ZOO", raising=False)
    assert sum(path.stat().st_size for path in zoo_folder().rglob("*")) < 60e6
    for name in zoo_names():
        assert verify.damage(name) == [], name
        assert read_card(zoo_folder() / name).name == name


@pytest.mark.slow
def test_shipped_burgers_operators_reproduce_their_cards(tmp_path):
    names = [name for name in zoo_names() if name.startswith("burgers")]
    if not names:
        pytest.skip("none is shipped yet")
    for name in names:
        assert abs(verify.compare(name, datasets=tmp_path).difference) < verify.TOLERANCE, name


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_shipped_navier_stokes_operator_reproduces_its_card(tmp_path):
    """One sample, which takes a CPU about a minute."""
    name = next((name for name in ("ns3", "ns2-part", "ns2-full", "ns1") if name in zoo_names()), None)
    if name is None:
        pytest.skip("none is shipped yet")
    assert abs(verify.compare(name, samples=1, datasets=tmp_path).difference) < verify.TOLERANCE
