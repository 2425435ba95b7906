"""`oformer plot`."""

from tests.cli.command import cli


def test_plot_draws_each_figure(trained, tmp_path):
    done = cli("plot", "outputs/burgers-demo", "--out", tmp_path, "--device", "cpu", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert {p.stem for p in tmp_path.glob("*.png")} == {"training", "predictions", "by-resolution"}
    one = cli("plot", "outputs/burgers-demo", "--only", "training", "--out", tmp_path / "one", cwd=trained)
    assert one.returncode == 0, one.stderr
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["training.png"]
    none = cli("plot", "outputs/burgers-demo", "--only", "prediction", "--out", tmp_path / "none", cwd=trained)
    assert none.returncode == 2
    assert "Did you mean `predictions`" in none.stderr
