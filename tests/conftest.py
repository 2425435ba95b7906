"""What every test gets: shape checks, one thread per worker, fixed seeds."""

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Thread pools that fight over the cores are a hundred times slower than one thread each, and our tensors are small.
# Set before torch and numpy read them, and inherited by every process a test starts.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["MPLBACKEND"] = "Agg"
if importlib.util.find_spec("triton") and not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU, fused kernels run as Python: slow, and the same arithmetic

ROOT = Path(__file__).resolve().parent.parent

# Importing everything makes a million objects that stay: to look for garbage among them again and again takes a sixth
# of the CPU time of collection.
gc.disable()

SHAPES_CHECKED = all(importlib.util.find_spec(name) for name in ("beartype", "jaxtyping"))
if SHAPES_CHECKED:
    import tests.typecheck

    # The hook rewrites modules as they are imported; one that is already there would go unchecked.
    if "oformer" in sys.modules:
        raise RuntimeError("Expected tests/conftest.py before oformer, got it after. Import oformer later.")
    # Kernels are left out: Triton reads their source, and finds no tensors in it.
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(ROOT.glob("oformer/**/*.py"))]
    checked = [name for name in names if not name.endswith(("_kernels", ".__init__"))]
    tests.typecheck.install(checked)

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

# A time limit for one example measures how busy the machine is. On CI the examples are the same every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def interpret_quickly() -> None:
    """Have Triton's interpreter adapt the language once, where it does so at each call of a function on the device."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_LangPatchScope"):
        return
    adapt, adapted = interpreter._patch_lang, set()

    def adapt_once(fn):
        if fn.__module__ not in adapted:  # by module: each is searched for the names it gives the language
            adapted.add(fn.__module__)
            adapt(fn)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = adapt_once


def group_by_fixture(item: pytest.Item) -> None:
    """Have tests that share a fixture of their file or folder run in one process, where each would make it again."""
    for found in item._fixtureinfo.name2fixturedefs.values():
        if found[-1].scope in ("module", "package"):
            item.add_marker(pytest.mark.xdist_group(found[-1].baseid))
            return


def pytest_report_header() -> str:
    shapes = "on" if SHAPES_CHECKED else "off, beartype is not installed"
    return f"torch {torch.__version__}; shape checks: {shapes}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.config.pluginmanager.hasplugin("xdist"):
            group_by_fixture(item)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    interpret_quickly()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers in each test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for code that draws from numpy's global state
    torch.default_generator.manual_seed(0)  # torch.manual_seed keeps the stack of each call for devices not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def float64() -> Iterator[None]:
    """Make float64 the default dtype of torch for one test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder shared/data beside the checkout: files to compare with that are not in the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the folder ../shared/data beside the checkout is absent")
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory):
    """The dataset of the tiny recipe, made once for the session."""
    from oformer.training.find_data import open_data
    from tests.tiny import tiny_recipe

    return open_data(tiny_recipe(), tmp_path_factory.mktemp("datasets"))
