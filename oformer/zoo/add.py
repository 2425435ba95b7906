"""Adding a trained operator to the zoo: its run is measured, and weights, card and journals are written."""

import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oformer.checkpoint import CARD as PAGE
from oformer.checkpoint import (
    CHECKSUMS,
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    parameter_count,
    save_checkpoint,
    zoo_folder,
)
from oformer.config import from_json
from oformer.data.dataset import PointDataset, View
from oformer.engine.runners import runner_of
from oformer.errors import InputError
from oformer.files import new_folder, sha256, write_bytes, write_json, write_text
from oformer.metrics import Resolution
from oformer.models import Operator
from oformer.training.evaluate import errors, evaluate, resolution_sweep, summarize, watched
from oformer.training.find_data import open_fresh_samples, open_test_samples
from oformer.training.journal import JOURNAL, read_journal
from oformer.training.recipe import Recipe
from oformer.training.refusals import WITHOUT_EFFECT
from oformer.zoo.card import (
    CARD,
    SHARES,
    Averaged,
    DataRecord,
    Fresh,
    ModelCard,
    SeedRun,
    card_page,
    read_card,
    training_command,
)
from oformer.zoo.traits import traits

LINES = 500  # of training in a journal that is kept; the evaluations are all kept

Say = Callable[[str], None]


def add(
    run: Path,
    *,
    name: str | None = None,
    seed_runs: Sequence[Path] = (),
    half: bool = False,
    card_only: bool = False,
    finer: bool = False,
    average: int = 1,
    fresh: int = 0,
    datasets: Path = Path("datasets"),
    root: Path | None = None,
    device: torch.device | str = "cpu",
    batch: int | None = None,
    say: Say = lambda text: None,
) -> Path:
    """Measure a finished run and put it into the zoo.

    Args:
        run: whose weights are shipped.
        name: in the zoo; by default that of its recipe.
        seed_runs: other runs of the same recipe, whose errors and journals are recorded beside.
        half: ship the hidden matrices, nearly all of the weights, in float16, and measure what that costs.
        card_only: write the card and the journals without the weights.
        finer: make the test samples at twice their resolution too, where they are not stored so finely.
        average: also measure the mean of predictions under so many exact symmetries.
        fresh: number of samples after the test split to measure too.
        datasets: the folder of generated datasets.
        root: the folder to write into; by default the one that names are looked up in, or `runs` for a card only.
        device: where to compute.
        batch: samples at once; by default as in training.
        say: told what is being done.

    Returns:
        The folder of the model.
    """
    runs = [_finished(folder, device) for folder in (run, *seed_runs)]
    recipes = [_recipe_of(checkpoint) for checkpoint, _ in runs]
    _check_seeds(recipes, (run, *seed_runs))
    recipe, (checkpoint, _) = recipes[0], runs[0]
    batch = batch or recipe.training.batch
    test = open_test_samples(recipe, datasets, device=device, say=say)
    # Every seed, with its weights as they were trained.
    seeds, journals = [], {}
    for place, ((trained, records), settings) in enumerate(zip(runs, recipes, strict=True)):
        say(f"Measuring seed {settings.training.seed} on {len(test)} test samples.")
        journal = JOURNAL if place == 0 else f"journal-seed{settings.training.seed}.jsonl"
        journals[journal] = "".join(json.dumps(record) + "\n" for record in thinned(records)).encode()
        with watched(trained.operator, len(test), say):
            scores = evaluate(runner_of(trained), test, batch, region=settings.training.loss.region)
        seeds.append(
            SeedRun(
                seed=settings.training.seed,
                steps=trained.step,
                minutes=trained.provenance["minutes"],
                hardware=trained.provenance["hardware"],
                journal=journal,
                scores=scores,
            )
        )
    # The first one as it is shipped, and what else is said of it.
    operator = checkpoint.operator
    stored = _round_weights(operator) if half else operator
    say("Measuring the shipped weights, at other resolutions and from sparse input.")
    with watched(operator, None, say):
        found = errors(operator, test, batch, region=recipe.training.loss.region)
        scores = summarize(found)
        twice = finer_recipe(recipe) if finer else None
        views, missing = other_views(
            operator,
            test,
            finer=open_test_samples(twice, datasets, device=device, say=say) if twice else None,
            batch=batch,
            trained_error=scores.error,
        )
        mean = None
        if average != 1:
            mean = Averaged(average, evaluate(operator, test, batch, recipe.problem, average).error)
    found_fresh = None
    if fresh:
        found_fresh = _measure_fresh(operator, recipe, fresh, datasets, device, batch, say)
    # The card, and the folder.
    card = ModelCard(
        name=name or recipe.name,
        command=training_command(recipe),
        paper=recipe.paper,
        parameters=parameter_count(operator),
        storage="float16" if half else "float32",
        precision=recipe.training.precision,
        torch=checkpoint.provenance["torch"],
        data=DataRecord(
            title=test.card.title,
            seed=recipe.data.seed,
            train=recipe.data.trained_on,
            test=recipe.data.test,
            checksum=checkpoint.provenance.get("data checksum"),
            test_checksum=values_checksum(test),
        ),
        scores=scores,
        by_sample=_by_sample(found.relative),
        views=views,
        not_measured=missing,
        averaged=mean,
        fresh=found_fresh,
        seeds=tuple(seeds),
        files={},
    )
    shipped = dataclasses.replace(checkpoint, operator=stored, name=card.name, scores=dataclasses.asdict(scores))
    if card_only:
        return _write((root or Path("runs")) / card.name, card, None, journals)
    return _write((root or zoo_folder()) / card.name, card, shipped, journals)


def _measure_fresh(
    operator: Operator, recipe: Recipe, samples: int, datasets: Path, device: torch.device | str, batch: int, say: Say
) -> Fresh:
    """Measure an operator on samples after the test split: a hundred test samples say little of the largest errors."""
    dataset = open_fresh_samples(recipe, datasets, samples, device=device, say=say)
    say(f"Measuring {samples:,} fresh samples.")
    with watched(operator, samples, say):
        found = errors(operator, dataset, batch).relative
    return Fresh(recipe.data.train + recipe.data.test, _by_sample(found), tuple(traits(dataset, found)))


def finer_recipe(recipe: Recipe) -> Recipe | None:
    """The recipe on the same samples at twice their resolution; None where they are stored so finely or unknown."""
    problem, view = recipe.problem, recipe.data.view
    finer = problem and problem.finer()
    if problem is None or finer is None or view.apply_to_spec(problem.spec).grid != problem.spec.grid:
        return None
    data = dataclasses.replace(recipe.data, view=dataclasses.replace(view, points=None, query_points=None))
    return dataclasses.replace(recipe, problem=finer, data=data)


def other_views(
    operator: Operator,
    test: PointDataset,
    *,
    finer: PointDataset | None = None,
    batch: int = 16,
    trained_error: float | None = None,
) -> tuple[tuple[Resolution, ...], dict[str, str]]:
    """Errors at half and double resolution and from sparse input; and what could not be measured, with the reason.

    Args:
        operator: trained.
        test: the test split, under the view it was trained on.
        finer: the same samples at twice the trained resolution, for data that are not stored so finely.
        batch: samples at once.
        trained_error: the mean error on the test split as it is, where it was measured already.
    """
    rows = resolution_sweep(operator, test, SHARES, batch, trained_error)
    trained, full = test.spec.grid, test.source_spec.grid
    if trained is None or full is None:
        return tuple(rows), dict.fromkeys(("half resolution", "double resolution"), "the points are no regular grid")
    # On grids the sweep lacks what the data do not hold: the nearest grid there, or finer samples, stand in.
    missing: dict[str, str] = {}
    measured = {row.points for row in rows if row.kind == "resolution"}
    for name, factor in (("half resolution", 0.5), ("double resolution", 2.0)):
        wanted = tuple(round(n * factor) for n in trained)
        if math.prod(wanted) in measured:
            continue
        grid = _nearest_grid(full, trained, factor, test.spec.periods is not None)
        if factor > 1 and finer is not None:
            source, grid = finer, finer.spec.grid or wanted
        elif grid is None:
            missing[name] = f"the data have {_words(full)} points"
            continue
        else:
            source = test.with_view(dataclasses.replace(test.view, points=grid))
            if max(abs(m / (n * factor) - 1) for m, n in zip(grid, trained, strict=True)) > 0.05:
                missing[name] = f"the nearest grid in the data has {_words(grid)} points"
        error = evaluate(operator, source, batch).error
        rows.append(Resolution(f"{_words(grid)} points", math.prod(grid), error, "resolution"))
    rows.sort(key=lambda row: (row.kind == "sparse", 0 if row.kind == "sparse" else row.points))
    return tuple(rows), missing


def _nearest_grid(
    full: tuple[int, ...], trained: tuple[int, ...], factor: float, periodic: bool
) -> tuple[int, ...] | None:
    """The grid in the data that is next to `factor` times the trained one, on the same side of it; None without any."""
    found = []
    for n, m in zip(full, trained, strict=True):
        possible = {-(-n // stride) for stride in range(1, n + 1) if not periodic or n % stride == 0}
        beyond = [p for p in possible if (p > m) == (factor > 1) and p != m and p > 1]
        if not beyond:
            return None
        found.append(min(beyond, key=lambda p: abs(p - factor * m)))
    return tuple(found)


def _words(grid: tuple[int, ...]) -> str:
    return " x ".join(map(str, grid))


def values_checksum(test: PointDataset) -> str:
    """SHA-256 over the values of the samples as they are stored, whatever files they came in."""
    digest = hashlib.sha256()
    for sample in test.with_view(View()):
        for values in (sample.input.values, sample.target):
            digest.update(values.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _by_sample(found: Tensor) -> tuple[float, ...]:
    """Errors with six digits: float32 knows no more, and thousands of them are half of a card."""
    return tuple(float(f"{error:.6g}") for error in found.tolist())


def renew(
    name: str,
    samples: int,
    *,
    datasets: Path = Path("datasets"),
    device: torch.device | str = "cpu",
    batch: int = 16,
    say: Say = lambda text: None,
) -> Path:
    """Measure a model of the zoo on fresh samples, write its card again, and return its folder; see `add`."""
    folder = find_checkpoint(f"zoo:{name}")
    card, checkpoint = read_card(folder), load_checkpoint(folder, device)
    found = _measure_fresh(checkpoint.operator, _recipe_of(checkpoint), samples, datasets, device, batch, say)
    write_json(folder / CARD, dataclasses.asdict(dataclasses.replace(card, fresh=found)))
    write_page(folder)
    return folder


def write_page(folder: Path) -> Path:
    """Write the page of a card anew, from its numbers."""
    card = read_card(folder)
    write_text(folder / PAGE, card_page(card, load_checkpoint(folder) if card.with_weights else None))
    return folder / PAGE


def _write(folder: Path, card: ModelCard, checkpoint: Checkpoint | None, journals: dict[str, bytes]) -> Path:
    """Write the folder of a model; it appears complete or not at all."""
    with new_folder(folder) as place:
        if checkpoint is not None:
            save_checkpoint(place, checkpoint)
            (place / CHECKSUMS).unlink()  # the card holds them, and those of the journals
        for name, content in journals.items():
            write_bytes(place / name, content)
        kept = sorted(path for path in place.iterdir() if path.name != PAGE)
        card = dataclasses.replace(card, files={path.name: sha256(path) for path in kept})
        write_json(place / CARD, dataclasses.asdict(card))
        write_text(place / PAGE, card_page(card, checkpoint))
    return folder


def _finished(run: Path, device: torch.device | str) -> tuple[Checkpoint, list[dict[str, Any]]]:
    """The last checkpoint and the journal of a run that has nothing left to do."""
    if not (run / JOURNAL).is_file():
        raise InputError("a run folder with its journal", str(run), "Give the folder that `oformer train` wrote")
    records = read_journal(run)
    checkpoint = load_checkpoint(find_checkpoint(run), device)
    last: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "stop"), {})
    if last.get("reason") not in ("finished", "patience") or last["step"] != checkpoint.step:
        raise InputError(
            f"a finished run in {run}", f"one that stands at step {checkpoint.step:,}", "Train it to its end first"
        )
    return checkpoint, records


def _recipe_of(checkpoint: Checkpoint) -> Recipe:
    return from_json(Recipe, checkpoint.recipe, "recipe")


def _check_seeds(recipes: Sequence[Recipe], runs: Sequence[Path]) -> None:
    """Refuse runs that are not the same experiment from another start."""

    def experiment(recipe: Recipe) -> Recipe:
        """The recipe without the seed, and as the first run has what the weights do not depend on."""
        same = {name: getattr(recipes[0].training, name) for name in ("seed", *WITHOUT_EFFECT)}
        return dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, **same))

    seen: dict[int, Path] = {}
    for recipe, run in zip(recipes, runs, strict=True):
        if experiment(recipe) != experiment(recipes[0]):
            raise InputError(f"runs of one recipe, as in {runs[0]}", f"other settings in {run}")
        if recipe.training.seed in seen:
            raise InputError(
                "runs with different training seeds",
                f"seed {recipe.training.seed} in {seen[recipe.training.seed]} and {run}",
            )
        seen[recipe.training.seed] = run


def thinned(records: Sequence[dict[str, Any]], lines: int = LINES) -> list[dict[str, Any]]:
    """The records of a journal with at most so many of kind `train`, evenly chosen, the last among them."""
    train = [i for i, record in enumerate(records) if record["kind"] == "train"]
    stride = max(1, -(-len(train) // lines))
    dropped = set(train) - set(train[::-1][::stride])
    return [record for i, record in enumerate(records) if i not in dropped]


def _round_weights(operator: Operator) -> Operator:
    """Give the hidden matrices the values they have in float16; return a copy that holds them in float16, to be saved.

    The rest stays, since it is small and needs its digits: statistics, frequencies, and layers that see raw values or
    make final ones, whose rounding nothing averages out.
    """
    stored = copy.deepcopy(operator)
    for parameter, half in zip(operator.model.hidden_matrices(), stored.model.hidden_matrices(), strict=True):
        half.data = parameter.data.half()
        if not torch.isfinite(half).all():
            raise InputError("weights within the range of float16", "larger ones", "Add the run without --half")
        parameter.data.copy_(half)
    return stored
