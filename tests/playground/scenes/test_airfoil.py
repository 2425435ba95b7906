"""The scene of the airfoil: first frames without a solver."""

from oformer.config import to_json
from oformer.playground.scenes import scene_of
from oformer.problems import Airfoil


def test_first_frames_from_the_package_are_those_of_the_solver():
    """Of one stream, one step after the start: the later frames take the solver a minute."""
    problem = Airfoil()
    scene = scene_of({"problem": to_json(problem)}, problem.spec)
    assert scene is not None
    streams = scene.facts()["ready"]
    assert len(streams) == 28
    mach, angle = streams[20]
    known = scene.known({"mach": mach, "angle": angle})
    solved = scene._march({"mach": mach, "angle": angle}, [0])  # pyright: ignore[reportAttributeAccessIssue]
    first = known.input.values[:1, :, :4]
    change = (solved - solved.mean(1, keepdim=True)).norm(dim=1)
    error = (first - solved).norm(dim=1) / change
    assert float(error.max()) < 2e-3  # half precision, of what differs from the free stream
    assert known.input.values.shape == (4, len(known.usual), 7)
