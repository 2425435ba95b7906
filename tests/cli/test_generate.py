"""`oformer generate`, in shares."""

import json

from oformer.cli import main


def test_generate_in_two_shares_equals_one(tmp_path, capsys):
    small = ["--points", "64", "--solver-points", "64", "--modes", "6", "--steps", "20", "--device", "cpu"]
    command = ["generate", "burgers", "--count", "130", *small, "--out"]
    for shard in ("0/2", "1/2"):
        assert main([*command, str(tmp_path / "two"), "--shard", shard]) == 0
    assert main([*command, str(tmp_path / "one")]) == 0
    one, two = (json.loads((tmp_path / n / "dataset.json").read_text()) for n in ("one", "two"))
    assert [p["sha256"] for p in one["parts"]] == [p["sha256"] for p in two["parts"]]
    assert one["complete"]


def test_ranks_that_generate_say_what_is_their_own(capsys, tmp_path, monkeypatch):
    small = ["--points", "64", "--solver-points", "64", "--modes", "6", "--steps", "4", "--count", "4"]
    said = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["generate", "burgers", *small, "--out", str(tmp_path / "data")]) == 0
        said.append(capsys.readouterr().err)
    assert "4 samples" not in said[0]
    assert "This share" in said[0] + said[1]
    assert "4 samples" in said[1]
    assert "is complete" in said[1]
