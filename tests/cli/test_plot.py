"""`oformer plot`."""


def test_plot_draws_each_figure(trained, tmp_path, here):
    done = here("plot", "outputs/burgers-demo", "--out", tmp_path, "--device", "cpu", cwd=trained)
    assert done.returncode == 0, done.stderr
    assert {p.stem for p in tmp_path.glob("*.png")} == {"training", "predictions", "by-resolution"}
    one = here("plot", "outputs/burgers-demo", "--only", "training", "--out", tmp_path / "one", cwd=trained)
    assert one.returncode == 0, one.stderr
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["training.png"]
    none = here("plot", "outputs/burgers-demo", "--only", "prediction", "--out", tmp_path / "none", cwd=trained)
    assert none.returncode == 2
    assert "Did you mean `predictions`" in none.stderr
