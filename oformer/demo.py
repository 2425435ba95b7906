"""The whole way in a few minutes: generate, train, evaluate, draw, and say what to try next."""

import shutil
from pathlib import Path

from oformer.gpu import compute_device
from oformer.report import write_report
from oformer.terminal import say, table
from oformer.training.evaluate import resolution_sweep
from oformer.training.find_data import open_data, train_and_scored, train_and_test
from oformer.training.loop import train
from oformer.training.recipe import Recipe


def demo(recipe: Recipe, out: Path, *, minutes: float = 4.0, fresh: bool = False, program: str = "oformer") -> int:
    """Run the demo in a folder; a second call goes on where the first one stopped.

    Args:
        recipe: what to train.
        out: where data, run and report go.
        minutes: a time budget for training; a slow machine goes through the whole schedule in fewer steps.
        fresh: begin again.
        program: how the command line is called here.
    """
    run = out / "run"
    if fresh and run.exists():
        shutil.rmtree(run)
    device = compute_device()
    say(f"1. Data: {recipe.data.train} + {recipe.data.test} solutions of a PDE, made or found in {out / 'datasets'}.")
    data = open_data(recipe, out / "datasets", device=device, say=say)
    say(f"2. Training on {device}: {recipe.describe()}. Ctrl-C stops and saves; the same command goes on.")
    test = train_and_test(data, recipe)[1]
    outcome = train(recipe, run, train_and_scored(data, recipe), device=device, max_minutes=minutes)
    if not outcome.finished:
        say(f"Stopped ({outcome.reason}) at step {outcome.step}; everything is saved. The same command goes on.")
        return 130
    if outcome.reason == "finished" and outcome.step < recipe.training.steps:
        say(f"{minutes:g} minutes had room for {outcome.step:,} of {recipe.training.steps:,} steps, with the whole "
            "schedule of the learning rate in them. For more: --fresh --minutes, with a larger number.")  # fmt: skip
    say("3. The same weights on other grids than the one they were trained on:")
    rows = resolution_sweep(outcome.operator, test)
    table(
        ("looked at with", "input points", "test error (relative L2)"),
        [(row.title, str(row.points), f"{row.error:.3%}") for row in rows],
    )
    # What to look at, and what to type next.
    report = write_report(run, test, rows)
    say(f"4. Report with pictures: {report}")
    say("Next:")
    for command, what in (
        (f"inspect {run}", "what was made"),
        (f"plot {run} --datasets {out / 'datasets'}", "the pictures as PNG files"),
        ("list", "all recipes"),
        ("train burgers-512 --max-minutes 30", "one of them, for half an hour"),
    ):
        say(f"  {program} {command}    # {what}")
    return 0
