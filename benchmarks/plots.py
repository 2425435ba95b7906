"""Tables and plots of docs/performance.md from a CSV file of `run.py`, its profiles, and one of `accuracy.py`.

    python benchmarks/plots.py benchmarks/reference.csv

Each part of the page between `<!-- NAME -->` and `<!-- end NAME -->` is written anew if the file has rows for it, and
stays as it is otherwise. The part `scaling` is a model and needs rows only for the times that it starts from.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accuracy import HEADS, RESULTS, WORDS, Result, lines, places
from run import FITTED, HERE, Kernel, Row, exponent, read_rows

from oformer.errors import InputError
from oformer.experiments.recipes import recipe_named
from oformer.files import write_text
from oformer.models import OFormerConfig
from oformer.plots.style import (
    MUTED,
    PREDICTION,
    SPARSE,
    TEST,
    legend_above,
    log_scale,
    new_figure,
    save_figure,
    styled,
)
from oformer.training.recipe import Recipe

PAGE = HERE.parent / "docs" / "performance.md"
UNKNOWN = "(to be measured)"
ACCURACY = "accuracy"  # the part that `accuracy.py` fills
PROFILE, PROFILES = "profile", HERE / "profiles"  # the part that files of `run.py --profile` fill, and where they lie
# What kernels are for, by their names; the first that fits.
PURPOSES = {
    "products of the vendor's library": r"nvjet|cutlass|gemv|gemm|splitK",
    "rollout, forward": r"^_march_kernel",
    "rollout, backward: activations and their slopes": r"^_bend_kernel",
    "rollout, backward: norms": r"^_through_norm_kernel",
    "self-attention: sums over points": r"^_sum(_back)?$",
    "self-attention: what points read from the sums": r"^_turn_between",
    "self-attention: norms before it": r"^_normalize",
    "cross-attention: projections, norms, turns": r"^_arrange",
    "feed-forward networks": r"^_(for|back)ward$",
    "what torch.compile makes": r"^triton_",
    "sums of programs' rows": r"^_add_up",
    "everything else": "",
}
SERIES = {  # of growth and horizon: name, color
    "growth-bounded": ("prediction in 2 GiB", PREDICTION),
    "growth-predict": ("prediction", SPARSE),
    "growth-train": ("training step", TEST),
    "growth-train-chunks": ("training step in chunks", MUTED),
    "horizon-predict": ("prediction", SPARSE),
    "horizon-train": ("training step", TEST),
}
MACHINE = 8  # GPUs that share fast links
RANKS = (8, 64, 512, 4096)
SCALED = "ns2-full"


@dataclass(frozen=True)
class Network:
    """What the model of an all-reduce assumes of each GPU's connection."""

    bytes_per_second: float
    latency: float  # seconds for one hop


# One direction of NVLink on an H200, and of a 400 Gbit/s adapter for each GPU.
INSIDE, BETWEEN = Network(450e9, 5e-6), Network(50e9, 10e-6)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page; the exit status is 2 where there is nothing to read or to write to."""
    parser = argparse.ArgumentParser(description="Tables and plots of the performance page.")
    parser.add_argument("rows", type=Path, nargs="?", help="a CSV file of run.py --out; without, the model alone")
    known = RESULTS if RESULTS.exists() else None
    parser.add_argument("--accuracy", type=Path, default=known, help="a CSV file of accuracy.py --out")
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="a folder of run.py --profile")
    parser.add_argument("--page", type=Path, default=PAGE, help="to be rewritten (default: docs/performance.md)")
    options = parser.parse_args(arguments)
    try:
        rows = read_rows(options.rows) if options.rows else []
        results = read_rows(options.accuracy, Result) if options.accuracy else []
        profiles = [read_rows(path, Kernel) for path in sorted(options.profiles.glob("*.csv"))]
        rewrite(options.page, [row for row in rows if not row.failure], results, profiles)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def rewrite(
    page: Path, rows: Sequence[Row], results: Sequence[Result] = (), profiles: Sequence[Sequence[Kernel]] = ()
) -> None:
    """Put tables and pictures of what was measured into the page; pictures lie in `images` beside it."""
    if not page.is_file():
        raise InputError(f"a page at {page}", "none", "Give another with --page")
    text = page.read_text(encoding="utf-8")
    for name, part in PARTS.items():
        content = part(rows, page.parent / "images")
        if content is not None:
            text = replaced(text, name, content)
    if results:
        where = "; ".join(places(results))
        text = replaced(text, ACCURACY, f"{where}.\n\n" + _markdown(HEADS, lines(results), words=WORDS))
    if profiles:
        text = replaced(text, PROFILE, "\n\n".join(map(by_purpose, profiles)))
    write_text(page, text)


def by_purpose(kernels: Sequence[Kernel]) -> str:
    """A table of what the time of a step goes into."""
    taken = dict.fromkeys(PURPOSES, (0.0, 0.0))
    for kernel in kernels:
        purpose = next(name for name, pattern in PURPOSES.items() if re.search(pattern, kernel.kernel))
        calls, microseconds = taken[purpose]
        taken[purpose] = calls + kernel.calls, microseconds + kernel.microseconds
    whole = sum(microseconds for _, microseconds in taken.values())
    shown = sorted(((*numbers, name) for name, numbers in taken.items() if numbers[1]), key=lambda row: -row[1])
    lines = [(name, f"{calls:.0f}", f"{us / 1000:.2f}", f"{us / whole:.0%}") for calls, us, name in shown]
    k = kernels[0]
    where = f"`{k.recipe}`, batch {k.batch}, {k.precision}, mode `{k.mode}`; {k.machine}, torch {k.torch}"
    return f"{where}: {whole / 1000:.1f} ms of kernels.\n\n" + _markdown(
        ("kernels", "in a step", "ms", "share"), lines, words=1
    )


def replaced(text: str, name: str, content: str) -> str:
    """The page with other content between the marks of a part."""
    marks = re.compile(rf"(<!-- {name} -->\n).*?(\n?<!-- end {name} -->)", re.DOTALL)
    if not marks.search(text):
        raise InputError(f"a part `<!-- {name} -->` ... `<!-- end {name} -->` in the page", "none")
    return marks.sub(lambda found: f"{found[1]}{content}\n<!-- end {name} -->", text, count=1)


def _train(rows: Sequence[Row], images: Path) -> str | None:
    chosen = [row for row in rows if row.what == "train"]
    if not chosen:
        return None
    heads = (
        "recipe", "batch", "mode", "precision", "ms", "steps/s", "GB reserved", "TFLOP/s", "of peak", "first step, s",
        "speed",
    )  # fmt: skip
    lines = [
        (
            r.recipe, str(r.batch), r.mode, r.precision, f"{r.milliseconds:.3g}", f"{r.per_second:,.4g}",
            _gb(r.reserved_mib), f"{r.tflops:.3g}", _percent(r.of_peak), f"{r.startup_seconds:.0f}", f"{r.ratio:.1f}x",
        )
        for r in chosen
    ]  # fmt: skip
    return _places(chosen) + _markdown(heads, lines, words=4)


def _infer(rows: Sequence[Row], images: Path) -> str | None:
    where = {"infer": "on the device", "infer-host": "from host memory and back"}
    chosen = [row for row in rows if row.what in where]
    if not chosen:
        return None
    heads = ("sequences", "data", "mode", "precision", "seconds", "sequences/s", "GB reserved", "TFLOP/s", "of peak")
    lines = [
        (
            str(r.batch), where[r.what], r.mode, r.precision, _seconds(r), f"{r.batch * r.per_second:,.0f}",
            _gb(r.reserved_mib), f"{r.tflops:.3g}", _percent(r.of_peak),
        )
        for r in chosen
    ]  # fmt: skip
    return _places(chosen) + _markdown(heads, lines, words=4)


def _growth(rows: Sequence[Row], images: Path) -> str | None:
    chosen = [row for row in rows if row.what.startswith("growth")]
    if not chosen:
        return None
    _draw(chosen, lambda r: int(r.points), "input points, and as many queries", images / "performance-growth.png")
    lines = [[SERIES[r.what][0], f"{int(r.points):,}", _seconds(r), _gb(r.allocated_mib), _gb(r.reserved_mib)]
             for r in chosen]  # fmt: skip
    powers = []
    for what in dict.fromkeys(r.what for r in chosen):
        fitted = exponent(chosen, what)
        shown = [f"{n:.3f}" for n in fitted[2:]] if fitted else [UNKNOWN] * 2
        reach = f"{fitted[0]:,} to {fitted[1]:,}" if fitted else f"{FITTED[0]:,.0f} to {FITTED[1]:,.0f}"
        powers.append([SERIES[what][0], reach, *shown])
    return "\n\n".join(
        [
            "![Time and memory against the points](images/performance-growth.png)",
            _places(chosen) + _markdown(["what", "points", "seconds", "GB", "GB reserved"], lines, words=1),
            _markdown(["what", "points", "power of time", "power of memory"], powers, words=2),
        ]
    )


def _horizon(rows: Sequence[Row], images: Path) -> str | None:
    chosen = [row for row in rows if row.what.startswith("horizon")]
    if not chosen:
        return None
    _draw(chosen, lambda r: r.times, "steps in time", images / "performance-horizon.png")
    lines = [[SERIES[r.what][0], str(r.times), _seconds(r), _gb(r.allocated_mib), _gb(r.reserved_mib)] for r in chosen]
    return "\n\n".join(
        [
            "![Time and memory against the steps in time](images/performance-horizon.png)",
            _places(chosen) + _markdown(["what", "steps", "seconds", "GB", "GB reserved"], lines, words=1),
        ]
    )


def _scaling(rows: Sequence[Row], images: Path) -> str:
    """The model of docs/performance.md, with the times of one GPU where they are measured."""
    recipe = recipe_named(SCALED)
    alone = [r for r in rows if r.what == "train" and r.recipe == SCALED and r.mode == "recipe"]
    step = alone[0].milliseconds / 1000 if alone else None
    gradients, sums, asked = gradient_bytes(recipe), split_bytes(recipe), split_messages(recipe)
    lines = []
    for ranks in RANKS:
        by_samples = all_reduce(gradients, ranks)
        by_points = by_samples + asked * all_reduce(sums / asked, ranks)
        shown = [UNKNOWN] * 2
        if step is not None:
            shown = [f"{step / (step + by_samples):.0%}", f"{step / (step / ranks + by_points):,.1f}x"]
        lines.append([f"{ranks:,}", f"{1e3 * by_samples:.2f}", shown[0], f"{1e3 * by_points:.2f}", shown[1]])
    heads = ["GPUs", "samples split: ms of messages", "efficiency, batch grows with the GPUs",
             "points split: ms of messages", "speed-up, the same batch"]  # fmt: skip
    sizes = (
        f"`{SCALED}`, batch {recipe.training.batch}: gradients {gradients / 1e6:.1f} MB in one message a step; with "
        f"points split {sums / 1e6:.1f} MB more in {asked} messages, however many points there are."
    )
    return sizes + "\n\n" + _markdown(heads, lines, words=0)


PARTS: dict[str, Callable[[Sequence[Row], Path], str | None]] = {
    "train": _train, "infer": _infer, "growth": _growth, "horizon": _horizon, "scaling": _scaling,
}  # fmt: skip


def all_reduce(size: float, ranks: int) -> float:
    """Seconds in which all ranks get the sum of as many bytes of each: bandwidth of a ring, latency of a tree."""
    network = INSIDE if ranks <= MACHINE else BETWEEN  # the slowest link decides
    hops = 2 * math.ceil(math.log2(ranks))
    return 2 * (ranks - 1) / ranks * size / network.bytes_per_second + hops * network.latency


def gradient_bytes(recipe: Recipe) -> float:
    """Bytes of all gradients, in float32."""
    return 4.0 * sum(p.numel() for p in recipe.model.build(recipe.data_spec()).parameters() if p.requires_grad)


def split_bytes(recipe: Recipe) -> float:
    """Bytes of the matrices KᵀWV of a step, forward and backward, for norms that need no statistics over points."""
    assert isinstance(recipe.model, OFormerConfig)
    e, q = recipe.model.encoder, recipe.model.query
    numbers = e.depth * e.heads * e.width**2 + q.heads * q.width**2 + q.mixing * q.width**2
    return 2 * 4.0 * recipe.training.batch * numbers


def split_messages(recipe: Recipe) -> int:
    """How many of them there are: one for each attention layer, there and back."""
    assert isinstance(recipe.model, OFormerConfig)
    return 2 * (recipe.model.encoder.depth + 1 + recipe.model.query.mixing)


def _draw(rows: Sequence[Row], x: Callable[[Row], float], label: str, path: Path) -> None:
    """Time and memory beside each other, on logarithmic axes."""
    with styled():
        figure = new_figure(3.0)
        left, right = figure.subplots(1, 2)
        handles = {}
        for what in dict.fromkeys(r.what for r in rows):
            name, color = SERIES[what]
            chosen = [r for r in rows if r.what == what]
            at = [x(r) for r in chosen]
            (handles[name],) = left.plot(at, [r.milliseconds / 1000 for r in chosen], "o-", color=color, ms=3.5)
            right.plot(at, [r.reserved_mib / 1024 for r in chosen], "o-", color=color, ms=3.5)
        # At most one tick for each power of ten: points span many of them, steps few.
        places = sorted({float(x(r)) for r in rows})
        ticks = places if len(places) < 7 and places[-1] < 1000 else None
        for axes, title in ((left, "seconds"), (right, "GiB reserved")):
            log_scale(axes, "x", ticks or [10.0**k for k in range(int(math.log10(places[0])), 8, 2)])
            log_scale(axes, "y")
            axes.set_title(title)
            axes.set_xlabel(label)
        legend_above(figure, handles)
        save_figure(path, figure)


def _places(rows: Sequence[Row]) -> str:
    """Where and how it was measured, above a table."""
    shared = dict.fromkeys(f"{r.machine}, torch {r.torch}" for r in rows)
    recipes = dict.fromkeys(f"`{r.recipe}`" for r in rows)
    return f"{'; '.join(shared)}; {', '.join(recipes)}; medians of up to {rows[0].steps}.\n\n"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first columns are words and the others numbers."""
    rule = ["---" if i < words else "---:" for i in range(len(heads))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines)).replace("nan", "-")


def _gb(mib: float) -> str:
    return f"{mib * 2**20 / 1e9:.2f}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _seconds(r: Row) -> str:
    return f"{r.milliseconds / 1000:.3g}"


if __name__ == "__main__":
    sys.exit(main())
