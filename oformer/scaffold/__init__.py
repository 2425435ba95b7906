"""A project to begin with: a problem of one's own that runs as it stands, its recipe, and its test.

The files of `template/` are a working project about `MyProblem`; a new one is a copy under another name.
"""

import importlib.util
import keyword
import re
from pathlib import Path

from oformer import files
from oformer.errors import InputError
from oformer.problems import PROBLEMS

TEMPLATE = Path(__file__).parent / "template"


def new_project(folder: Path | str) -> Path:
    """Write a project; it appears complete or not at all.

    Args:
        folder: where, new; its last part, such as `heat-flow`, is the name of the problem.

    Returns:
        The file with the problem and its recipe.
    """
    folder = Path(folder)
    name = folder.name
    module, title = name.replace("-", "_"), "".join(part.capitalize() for part in re.split("[-_]", name))
    _check_name(name, module, title)
    if folder.exists():
        raise InputError(f"no file or folder yet at {folder}", "one", "Choose another name")
    with files.new_folder(folder) as work:
        for source in sorted(path for path in TEMPLATE.iterdir() if path.is_file()):
            text = source.read_text(encoding="utf-8")
            for ours, theirs in (("my-problem", name), ("my_problem", module), ("MyProblem", title)):
                text = text.replace(ours, theirs)
            files.write_text(work / source.name.replace("my_problem", module), text)
    return folder / f"{module}.py"


def _check_name(name: str, module: str, title: str) -> None:
    if not re.fullmatch("[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise InputError(
            "a name of small letters, digits and dashes that begins with a letter, such as `heat-flow`", f"`{name}`"
        )
    ours = {kind.__name__ for kind in PROBLEMS.values()}
    if title in ours or importlib.util.find_spec(module) is not None:
        raise InputError("a name that is still free", f"`{name}`, which Python or oformer has", "Choose another")
