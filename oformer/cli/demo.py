"""`oformer demo`: generate, train, evaluate and draw a small operator."""

from dataclasses import dataclass
from pathlib import Path

from oformer.cli.options import override, program_name


@dataclass
class Demo:
    """Generate, train, evaluate and draw a small operator: a few minutes on two cores."""

    out: Path = Path("outputs/demo")
    """Where data, run and report go."""
    minutes: float = 4.0
    """A time budget for training: a slow machine goes through the whole schedule in fewer steps."""
    fresh: bool = False
    """Begin again instead of going on with what is there."""

    def run(self, rest: list[str]) -> int:
        """Run the demo in one thread of torch."""
        import torch

        from oformer.demo import demo
        from oformer.experiments.recipes import recipe_named

        # Its small model is as fast in one thread as in two, and many times faster where others use the same cores.
        torch.set_num_threads(1)
        recipe = override(recipe_named("burgers-demo"), rest)
        return demo(recipe, self.out, minutes=self.minutes, fresh=self.fresh, program=program_name())
