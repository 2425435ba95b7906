"""Make the development environment: a virtual environment, the right torch, and this package with an extra.

    python3 tools/bootstrap.py [--venv .venv] [--extra dev]

Needs nothing but the standard library. uv does the installing, being several times faster than pip; where uv
cannot be had, pip does the same work. Which torch is installed is decided in `choose_torch`. Old interpreters
must still be able to parse this file, so that it can tell them that they are too old.
"""

import argparse
import ast
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote, urlparse

if sys.version_info < (3, 11):  # noqa: UP036 - this is the place that makes the other checks unnecessary
    sys.exit(
        f"set-up failed: Expected Python 3.11 or newer, got {platform.python_version()} ({sys.executable}). "
        "Name a newer one: make setup PYTHON=python3.12"
    )

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
UV = "uv>=0.9"


def main() -> None:
    """Make the environment that the command line asks for."""
    parser = argparse.ArgumentParser(description="Make the development environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment goes")
    parser.add_argument("--extra", default="dev", help="which extra of the package to install")
    options = parser.parse_args()

    python = make_venv(options.venv)
    settings = pip_settings(python)
    torch, uv_options, pip_options, reason = choose_torch(settings.get("find-links", ""))
    say(f"Python {platform.python_version()}, {torch}: {reason}")

    wanted = [torch, "--editable", f"{ROOT}[{options.extra}]"]
    if install_uv(python):
        # uv leaves compiling to the first import unless told, and where bytecode is not written, to every import.
        with_bytecode = ["--python", python, "--compile-bytecode", *uv_options]
        command = [python, "-m", "uv", "pip", "install", *with_bytecode, *wanted]
        if run(command, env=uv_environment(settings)) == 0:
            return
        stop_without_network(python)
        say("uv failed, see above. Trying the same with pip, which is slower and, on Linux, knows only")
        say("the CUDA build of torch unless a folder of wheels is configured.")
    if run([python, "-m", "pip", "install", *pip_options, *wanted]) != 0:
        stop("Expected uv or pip to install the package, got the error above from both. Mend it: make setup")


def make_venv(folder: Path) -> Path:
    """Return the interpreter of the virtual environment `folder`, which is made anew unless it fits."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python.exists():
        _, answer = ask([python, "-m", "pip", "--version"])
        if f"(python {version})" in answer:
            return python
        say(f"{folder} is broken or belongs to another Python than {version}; making it anew")
    status, answer = ask([sys.executable, "-m", "venv", "--clear", folder])
    if status != 0:
        if "ensurepip is not" in answer or "No module named venv" in answer:
            stop(
                f"Expected a Python with the venv module, got {sys.executable} without it. Install it "
                f"(Debian, Ubuntu: apt install python{version}-venv) or name another: make setup PYTHON=..."
            )
        stop(f"Expected `python -m venv {folder}` to work, got:\n{answer}")
    return python


def pip_settings(python: Path) -> dict[str, str]:
    """Return pip's own configuration as {option: value}, from its files and variables; variables win."""
    settings: dict[str, str] = {}
    _, answer = ask([python, "-m", "pip", "config", "list"])
    for line in answer.splitlines():
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2]
        if value.startswith(("'", '"')) and (key.startswith(":env:") or option not in settings):
            settings[option] = str(ast.literal_eval(value))
    return settings


def choose_torch(find_links: str) -> tuple[str, list[str], list[str], str]:
    """Choose the build of torch: its requirement, options for uv, options for pip, the reason in words."""
    if has_gpu():
        return f"torch=={TORCH}", ["--torch-backend", "auto"], [], "a GPU is here, uv chooses the CUDA build"
    folder = folder_with_cpu_torch(find_links)
    if folder:
        # With the local label in the pin only this file satisfies it: never the CUDA build by accident.
        found = ["--find-links", str(folder)]
        return f"torch=={TORCH}+cpu", found, found, "no GPU, the CPU build is in a folder that pip is told of"
    return f"torch=={TORCH}", ["--torch-backend", "auto"], [], "no GPU, uv chooses the CPU build"


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA or AMD GPU is loaded."""
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists():
        return True
    program = shutil.which("nvidia-smi")
    return program is not None and ask([program, "-L"])[0] == 0


def folder_with_cpu_torch(find_links: str) -> Path | None:
    """Return the first local folder of `find_links` with a CPU wheel of torch for this Python and machine."""
    python_tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    for place in find_links.split():
        folder = Path(unquote(urlparse(place).path) if place.startswith("file:") else place)
        for wheel in folder.glob(f"torch-{TORCH}*.whl"):
            _, label, tags = unquote(wheel.name).partition("+cpu-")
            if label and tags.startswith(python_tag) and platform.machine() in tags:
                return folder
    return None


def install_uv(python: Path) -> bool:
    """Install uv into the environment with pip, and tell whether it is there."""
    if ask([python, "-m", "uv", "--version"])[0] == 0:
        return True
    status, answer = ask([python, "-m", "pip", "install", "--retries", "2", UV])
    if status == 0:
        return True
    stop_without_network(python)
    say(f"uv could not be installed, going on with pip, which is slower. pip said:\n{answer}")
    return False


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    """Return the environment for uv, which does not read pip's configuration: same index and certificates."""
    environment = dict(os.environ)
    for option, variable in (("index-url", "UV_DEFAULT_INDEX"), ("cert", "SSL_CERT_FILE")):
        if option in settings:
            environment.setdefault(variable, settings[option])
    return environment


def stop_without_network(python: Path) -> None:
    """Stop with a sentence where the package index does not answer; return where it does."""
    probe = ["--dry-run", "--ignore-installed", "--no-deps", "--retries", "1", "--timeout", "10", UV]
    status, answer = ask([python, "-m", "pip", "install", *probe])
    # pip says "no matching distribution" in either case; only the retry tells that nobody was there.
    if status != 0 and "connection broken" in answer:
        stop(
            "Expected the package index to answer, got no connection. Check the network, and the proxy "
            "and index that `pip config list` shows; then: make setup"
        )


def run(command: list, env: dict[str, str] | None = None) -> int:
    """Run a command with its output on the screen and return its exit status."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode


def ask(command: list) -> tuple[int, str]:
    """Run a command silently and return its exit status and what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def say(sentence: str) -> None:
    """Print a line at once, to keep its place among the output of the programs started here."""
    print(f"set-up: {sentence}", flush=True)


def stop(sentence: str) -> NoReturn:
    """Leave with a sentence on stderr and status 1."""
    sys.exit(f"set-up failed: {sentence}")


if __name__ == "__main__":
    main()
