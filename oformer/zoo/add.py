"""Adding a trained operator to the zoo: its run is measured, and weights, card and journals are written."""

import copy
import dataclasses
import json
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
from oformer.errors import InputError
from oformer.files import new_folder, sha256, write_bytes, write_json, write_text
from oformer.models import Operator
from oformer.problems import Burgers, NavierStokes
from oformer.training.datasets import open_fresh_samples, open_test_samples
from oformer.training.evaluate import errors, evaluate, summarize, watched
from oformer.training.journal import JOURNAL, read_journal
from oformer.training.recipe import Recipe
from oformer.zoo.card import (
    CARD,
    WITHOUT_EFFECT,
    Averaged,
    DataRecord,
    Fresh,
    ModelCard,
    SeedRun,
    card_page,
    other_views,
    read_card,
    training_command,
    values_checksum,
)
from oformer.zoo.traits import traits

LINES = 500  # of training in a journal that is kept; the evaluations are all kept

Say = Callable[[str], None]


def _silent(text: str) -> None:
    pass


def _finer(recipe: Recipe) -> Recipe | None:
    """The recipe that looks at the same samples at twice its resolution, where the functions are known so finely."""
    problem, view = recipe.problem, recipe.data.view
    if not isinstance(problem, Burgers | NavierStokes):
        return None  # of a Darcy medium drawn on another grid nothing is the same
    if view.apply_to_spec(problem.spec).grid != problem.spec.grid:
        return None  # the data have it already
    data = dataclasses.replace(recipe.data, view=dataclasses.replace(view, points=None, query_points=None))
    return dataclasses.replace(recipe, problem=dataclasses.replace(problem, points=2 * problem.points), data=data)


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
    say: Say = _silent,
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
        fresh: number of samples after the test split to measure too; see `measure_fresh`.
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
    seeds, journals = [], {}
    for place, ((trained, records), settings) in enumerate(zip(runs, recipes, strict=True)):
        say(f"Measuring seed {settings.training.seed} on {len(test)} test samples.")
        journal = JOURNAL if place == 0 else f"journal-seed{settings.training.seed}.jsonl"
        journals[journal] = "".join(json.dumps(record) + "\n" for record in thinned(records)).encode()
        with watched(trained.operator, len(test), say):
            scores = evaluate(trained.operator, test, batch, region=settings.training.loss.region)
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
    operator = checkpoint.operator
    if half:
        _round_weights(operator)
    say("Measuring the shipped weights, at other resolutions and from sparse input.")
    with watched(operator, None, say):
        found = errors(operator, test, batch, region=recipe.training.loss.region)
        scores = summarize(found)
        twice = _finer(recipe) if finer else None
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
        found_fresh = measure_fresh(operator, recipe, fresh, datasets=datasets, device=device, batch=batch, say=say)
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
            train=recipe.data.train,
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
    shipped = dataclasses.replace(
        checkpoint,
        operator=_as_stored(operator) if half else operator,
        name=card.name,
        scores=dataclasses.asdict(scores),
    )
    if card_only:
        return _write((root or Path("runs")) / card.name, card, None, journals)
    return _write((root or zoo_folder()) / card.name, card, shipped, journals)


def measure_fresh(
    operator: Operator,
    recipe: Recipe,
    samples: int,
    *,
    datasets: Path = Path("datasets"),
    device: torch.device | str = "cpu",
    batch: int = 16,
    say: Say = _silent,
) -> Fresh:
    """Measure an operator on samples after the test split: a hundred test samples say little of the largest errors.

    Args:
        operator: trained.
        recipe: whose problem.
        samples: their number.
        datasets: the folder of generated datasets.
        device: where to solve them; the operator predicts where it lives.
        batch: samples at once.
        say: told what is being done.
    """
    dataset = open_fresh_samples(recipe, datasets, samples, device=device, say=say)
    say(f"Measuring {samples:,} fresh samples.")
    with watched(operator, samples, say):
        found = errors(operator, dataset, batch).relative
    return Fresh(recipe.data.train + recipe.data.test, _by_sample(found), tuple(traits(dataset, found)))


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
    say: Say = _silent,
) -> Path:
    """Measure a model of the zoo on fresh samples and write its card again; see `measure_fresh`.

    Returns:
        The folder of the model.
    """
    folder = find_checkpoint(f"zoo:{name}")
    card, checkpoint = read_card(folder), load_checkpoint(folder, device)
    found = measure_fresh(
        checkpoint.operator, _recipe_of(checkpoint), samples, datasets=datasets, device=device, batch=batch, say=say
    )
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


def _round_weights(operator: Operator) -> None:
    """Give the hidden matrices the values they have in float16.

    The rest stays, since it is small and needs its digits: statistics, frequencies, and layers that see raw values or
    make final ones, whose rounding nothing averages out.
    """
    with torch.no_grad():
        for parameter in operator.model.hidden_matrices():
            rounded = parameter.half()
            if not torch.isfinite(rounded).all():
                raise InputError("weights within the range of float16", "larger ones", "Add the run without --half")
            parameter.copy_(rounded)


def _as_stored(operator: Operator) -> Operator:
    """The operator with its hidden matrices in float16, to be saved."""
    stored = copy.deepcopy(operator)
    for parameter in stored.model.hidden_matrices():
        parameter.data = parameter.data.half()
    return stored
