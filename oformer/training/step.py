"""The gradients of a training step: by a runner of the operator, or replayed from a CUDA graph.

On a GPU a small model waits for Python, which starts hundreds of kernels a step. So the model is compiled for each
shape it meets, and forward pass, loss and backward pass are recorded once for each shape of batch and horizon. A shape
is computed plainly when it is first met, since that may be the only time, and recorded when it is met again.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from oformer.engine.runners import Chunked, Compiled, Plain
from oformer.errors import InputError
from oformer.fields import Batch
from oformer.gpu import CudaGraphs, Record, Work
from oformer.models.base import Precision
from oformer.models.operator import Operator
from oformer.nn.shared_grids import expanded
from oformer.training.distributed import ALONE, Ranks
from oformer.training.recipe import Training

# From an operator, a batch, and predicted values on unit scale to the loss and its parts.
Measure = Callable[[Operator, Batch, Tensor], tuple[Tensor, dict[str, Tensor]]]
RECORDS = 32  # shapes that are recorded; further ones are computed plainly


def used_precision(settings: Training, device: torch.device) -> Precision:
    """What is really computed in: the settings' precision is a GPU's, a CPU computes in float32."""
    return settings.precision if device.type == "cuda" else "float32"


class Scale:
    """What losses are multiplied by, so that gradients stay in the range of float16, and divided by again.

    It grows, doubling in `PATIENCE` steps, until some gradient leaves the range; that step then has none, and the scale
    is halved. All of it happens on the device, without anybody waiting.
    """

    PATIENCE = 1000

    def __init__(self, device: torch.device):
        """Begin where gradients of means over many points need it to be."""
        self.value, self._nothing = torch.full((), 2.0**16, device=device), torch.zeros((), device=device)

    def settle(self, gradients: list[Tensor]) -> None:
        """Undo the scale in gradients; all are zero where one is not finite."""
        # Of one long tensor the plain norm is several times as fast.
        norms = torch._foreach_norm(gradients) if len(gradients) > 1 else [gradients[0].norm()]
        finite = torch.stack(norms).isfinite().all()
        for gradient in gradients:
            torch.where(finite, gradient / self.value, self._nothing, out=gradient)
        self.value *= torch.where(finite, 2 ** (1 / self.PATIENCE), 0.5)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put back afterwards what it was before."""
        before = self.value.clone()
        yield
        self.value.copy_(before)


class Stepper:
    """Leaves the gradients of the mean loss of a batch in the parameters of an operator, with ranks those of all."""

    def __init__(
        self,
        operator: Operator,
        settings: Training,
        device: torch.device | str,
        ranks: Ranks = ALONE,
        record: Record | None = None,
    ):
        """Compile the model and prepare recording, where settings and device ask for it.

        Args:
            operator: on the device.
            settings: of the loss, of slices, and of compiling and recording.
            device: where batches lie.
            ranks: the processes that train together.
            record: how to record; by default as CUDA graphs, on a GPU.
        """
        device = torch.device(device)
        gpu = device.type == "cuda"
        self.operator, self.settings, self.ranks = operator, settings, ranks
        self.measure: Measure = settings.loss.of
        precision = used_precision(settings, device)
        compile = (gpu and _has_triton()) if settings.compile is None else settings.compile
        if settings.chunk is not None:
            self.runner: Plain = Chunked(operator, settings.chunk, precision)
        elif compile:
            self.runner = Compiled(operator, precision, settings.recompute)
            self.measure = torch.compile(settings.loss.of, dynamic=False)
        else:
            self.runner = Plain(operator, precision, settings.recompute)
        # Sums over split points are messages between processes, which a graph of one process does not know of.
        if settings.capture and (ranks.splits_points or not (gpu or record)):
            raise InputError(
                "a GPU that holds all points of its samples for training.capture",
                "points split over ranks" if ranks.splits_points else str(device),
                "Leave the setting out",
            )
        if settings.capture is False or ranks.splits_points or settings.chunk is not None:
            record = None
        elif gpu and record is None:
            record = CudaGraphs(device)
        self.record = record
        self._parameters = list(operator.parameters())
        # One piece of memory, so that what concerns all gradients is one kernel.
        sizes = [p.numel() for p in self._parameters] if self.record else []
        self._all_gradients = torch.zeros(sum(sizes), dtype=self._parameters[0].dtype, device=device)
        parts = self._all_gradients.split(sizes) if sizes else ()
        self._gradients = [part.view_as(p) for part, p in zip(parts, self._parameters, strict=bool(sizes))]
        self.scale = Scale(device) if precision == "float16" else None
        self._met: set[tuple] = set()
        self._recorded: dict[tuple, tuple[_Gradients, Work]] = {}

    def recorder(self) -> Record | None:
        """Another of the kind that records gradients, for work whose recording outlives theirs; None: nothing is."""
        return self.record.apart() if isinstance(self.record, CudaGraphs) else self.record

    def forget(self) -> None:
        """Let all recordings go, and with them their memory, which is too small for those of a longer horizon."""
        self._recorded.clear()
        self.record = self.recorder()  # graphs give the pool that they share back when the last one is gone

    @property
    def prefers_few_shapes(self) -> bool:
        """Whether each new shape of batch costs time, since it is compiled or recorded."""
        return self.record is not None or self.runner.compiles

    def __call__(self, batch: Batch, times: int) -> dict[str, Tensor]:
        """Put the gradients of a batch in place of the parameters' own; returns this rank's loss and its parts.

        Args:
            batch: on the device.
            times: how many frames to predict.
        """
        if self.prefers_few_shapes:
            batch = batch.map(Tensor.contiguous)  # one layout for each shape
        numbers = self._own(batch, times)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.ranks.average(gradients)
        if self.scale is not None and not self._settles_in_recording:
            self.scale.settle(gradients)
        return numbers

    @property
    def _settles_in_recording(self) -> bool:
        """Whether nothing comes between the gradients and their scale: ranks must all see what one of them found."""
        return self.record is not None and self.ranks.world == 1

    def _own(self, batch: Batch, times: int) -> dict[str, Tensor]:
        """The gradients of this rank's part of the batch."""
        if self.record is None:
            for p in self._parameters:
                p.grad = None
            return add_gradients(self.runner, self.settings, batch, times, self.scale, self._measure(times))
        found, do = self._work(batch, times, self.record)
        do()
        for p, gradient, present in zip(self._parameters, self._gradients, found.present, strict=True):
            p.grad = gradient if present else None
        # A copy: the next replay may write over them before anybody has read them.
        return dict(zip(found.names, found.numbers.clone().unbind(), strict=True))

    def _measure(self, times: int) -> Measure:
        """The compiled loss for whole sequences alone: each horizon of a curriculum would compile it again."""
        return self.measure if times == self.operator.spec.out_times else self.settings.loss.of

    def _work(self, batch: Batch, times: int, record: Record) -> "tuple[_Gradients, Work]":
        """What is to be done for a batch: a replay, with the batch put where it reads, or the plain way."""
        shape = _shape(batch, times)
        if shape in self._recorded:
            found, replay = self._recorded[shape]
            torch._foreach_copy_(_sources(found.batch), _sources(batch))
            return found, replay
        if shape in self._met and len(self._recorded) < RECORDS:
            found = _Gradients(self, batch.map(Tensor.clone), times)
            # All else is written anew by each step; the scale would count the warm-up as one.
            with self.scale.restored() if self.scale else contextlib.nullcontext():
                self._recorded[shape] = found, record(found, 1)
            return self._recorded[shape]
        self._met.add(shape)
        found = _Gradients(self, batch, times)
        return found, found


class _Gradients:
    """Work that leaves gradients in the tensors of a stepper, and loss and parts in one of its own."""

    def __init__(self, stepper: Stepper, batch: Batch, times: int):
        self.stepper, self.batch, self.times = stepper, batch, times
        self.names: tuple[str, ...] = ()
        self.numbers = torch.empty(0)
        self.present: list[bool] = []

    def __call__(self) -> None:
        s = self.stepper
        for p in s._parameters:
            p.grad = None
        found = add_gradients(s.runner, s.settings, self.batch, self.times, s.scale, s._measure(self.times))
        self.names, self.numbers = tuple(found), torch.stack(list(found.values()))
        pairs = [(kept, p.grad) for kept, p in zip(s._gradients, s._parameters, strict=True) if p.grad is not None]
        self.present = [p.grad is not None for p in s._parameters]
        torch._foreach_copy_([kept for kept, _ in pairs], [gradient for _, gradient in pairs])
        if s.scale is not None and s._settles_in_recording:
            s.scale.settle([s._all_gradients])
        for p in s._parameters:  # the memory of a recording must not be held from outside
            p.grad = None


def add_gradients(
    runner: Plain,
    settings: Training,
    batch: Batch,
    times: int,
    scale: Scale | None = None,
    measure: Measure | None = None,
) -> dict[str, Tensor]:
    """Add the gradients of the mean loss of a batch, slice by slice; returns the loss and its parts.

    Args:
        runner: of the operator whose parameters get the gradients.
        settings: of the loss and of slices.
        batch: the samples.
        times: how many frames to predict.
        scale: of the loss, and then of the gradients, where they pass through float16.
        measure: what compares predictions, as `Loss.of` does, which it is by default.
    """
    turns, measure = settings.accumulate, measure or settings.loss.of
    size = batch.size // turns
    found = []
    for start in range(0, batch.size, size):
        some = batch.samples(slice(start, start + size))
        value, parts = measure(runner.operator, some, runner.run(some.input, some.query, times))
        (value / turns if scale is None else value * (scale.value / turns)).backward()
        found.append({"loss": value.detach(), **parts})
    if turns == 1:
        return found[0]
    return {name: torch.stack([numbers[name] for numbers in found]).mean() for name in found[0]}


def _has_triton() -> bool:
    """Whether torch can compile for a GPU."""
    return importlib.util.find_spec("triton") is not None


def _sources(batch: Batch) -> list[Tensor]:
    """The memory of a batch: of what repeats one sample, that one."""
    return [tensor[:1] if expanded(tensor) else tensor for tensor in batch.tensors]


def _shape(batch: Batch, times: int) -> tuple:
    """All that a recording takes for given."""
    layout = tuple((tensor.shape, tensor.dtype, expanded(tensor)) for tensor in batch.tensors)
    return times, tuple(batch.parameters), layout, batch.query.coords is batch.input.coords
