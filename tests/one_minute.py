"""A small operator trained and asked in every way to run it, in the package that is first on the path.

    python -m tests.one_minute galerkin

prints, for that attention and each way, the loss of a training step, the norm of its gradient and the norm of a
prediction. The ways: as it is, compiled, and with every fused module switched on as on a Hopper GPU, whose kernels
Triton's interpreter runs.
"""

import functools
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

WAYS = ("plain", "compiled", "fused")


def numbers(way: str, attention: str) -> list[float]:
    """Loss, gradient and prediction by one of the ways."""
    from oformer import Field, Predictor
    from oformer.checkpoint import Checkpoint
    from oformer.fields import Sample, Spec, collate
    from oformer.models import Normalization, OFormerConfig, Operator
    from oformer.models.oformer import Decoder, Encoder, Propagator, Query
    from oformer.training import step
    from oformer.training.losses import Loss
    from oformer.training.recipe import Training

    precision = "float16" if way == "fused" else "float32"
    step.used_precision = lambda settings, device: settings.precision  # on a CPU too
    spec = Spec(dim=1, in_times=1, in_channels=1, out_times=3, out_channels=1)
    # Of sizes for which there are kernels: also the rollout's, which needs 256 channels.
    config = OFormerConfig(
        attention=attention,  # pyright: ignore[reportArgumentType]
        encoder=Encoder(width=32, depth=1, multipliers=(4.0,)),
        query=Query(width=32, fourier_features=8, hidden=(32,), heads=2, multiplier=4.0),
        propagator=Propagator(width=256, layernorm=True, context=("coords",)),
        decoder=Decoder(hidden=(192, 192), layernorm=True),
    )
    torch.manual_seed(0)
    points, samples = torch.linspace(0, 1, 20)[:, None], []
    for _ in range(2):
        u = torch.sin(6 * points + 6 * torch.rand(1))
        samples.append(Sample(Field.of(points, u[None]), Field.of(points), torch.stack([u, 1 - u, 0.5 * u])))
    operator = Operator(config.build(spec), Normalization()).fit(samples)
    with torch.no_grad():
        for p in operator.parameters():
            p.add_(0.05 * torch.randn_like(p))  # so that no layer begins as zero
    batch = collate(samples)

    settings = Training(steps=1, loss=Loss(), precision=precision, compile=way == "compiled", capture=False)
    stepper = step.Stepper(operator.train(), settings, "cpu")
    loss = float(stepper(batch, 3)["loss"])
    gradient = torch.cat([p.grad.flatten() for p in operator.parameters() if p.grad is not None]).norm()
    predict = Predictor(Checkpoint(operator, "x"), "cpu", precision=precision, compile=way == "compiled", warn=False)
    answer = predict(batch.input, times=3).values
    return [loss, float(gradient), float(answer.norm())]


def as_on_a_hopper_gpu() -> None:
    """Switch every fused module on, whatever the device; time is marched by the plain twin of its kernel."""
    from oformer import gpu
    from oformer.engine import attention, blocks, rollout, runners, swap
    from oformer.engine.kernels import rollout_kernels

    gpu.fused_kernels = lambda device, row: True
    attention.fused_sums = lambda device: True
    blocks.fused_feedforward = lambda device, width, dtype: True
    runners.accelerate = lambda model, device: swap.accelerate(model, "cuda")
    rollout.FusedOFormer._marches_on_chip = lambda self, z: self._is_known()
    rollout_kernels.march = lambda *equations: rollout_kernels.march_plainly(*equations[:-2])
    # Autocast of this device instead of a GPU's.
    torch.get_autocast_dtype = lambda kind: torch.float16


def used() -> list[str]:
    """The fused modules that this package's own model gets, by name of their class."""
    from oformer.engine.swap import accelerate
    from oformer.fields import Spec
    from oformer.models import OFormerConfig

    model = accelerate(
        OFormerConfig().build(Spec(dim=1, in_times=1, in_channels=1, out_times=2, out_channels=1)), "cuda"
    )
    return sorted({type(module).__name__ for module in model.modules() if "Fused" in type(module).__name__})


def main(attention: str) -> None:
    torch.compile = functools.partial(torch.compile, backend="eager")  # what is compiled, not to what
    found = {way: numbers(way, attention) for way in WAYS[:2]}
    as_on_a_hopper_gpu()
    found["fused"] = numbers("fused", attention)
    print(json.dumps({"numbers": found, "used": used()}))


if __name__ == "__main__":
    main(sys.argv[1])
