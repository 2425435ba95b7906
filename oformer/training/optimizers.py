"""The optimizers, their rates, clipping, and the running average of the weights.

The numbers that change from step to step, rates and their corrections, lie in tensors beside the weights. So a step may
be recorded (`oformer/gpu.py`): `fill` writes the numbers, `move` is the same work each time.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oformer.errors import InputError, unknown_name
from oformer.gpu import Record, Work, kernels_on
from oformer.models.operator import Operator

BETA2, EPSILON = 0.999, 1e-8  # of Adam, torch's defaults


@dataclass(frozen=True)
class Optimizer:
    """Which optimizer, and its settings."""

    kind: Literal["adamw", "adam", "muon"] = "adamw"  # adam: weight decay coupled into the gradient, as released
    rate: float = 1e-3  # peak, of everything that Muon does not take
    matrix_rate: float = 2e-3  # peak, of the hidden matrices under Muon
    weight_decay: float = 1e-4
    amsgrad: bool = False
    rates: tuple[tuple[str, float], ...] = ()  # (part of the model, factor of both rates); 0 freezes it
    clip: tuple[tuple[str, float], ...] = ()  # (part of the model, largest gradient norm); part "all" for the whole


class Adam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019) with AMSGrad (Reddi et al., 2018) if asked for.

    Equal to torch's own, whose fused form takes a tensor for the rate but not for beta1, which a one-cycle schedule
    changes at every step. The moments of all parameters lie side by side, so that a model of many small tensors costs
    few kernel launches, or one (`adam_kernels.py`). The saved state has torch's names; all parameters share one count
    of steps.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        lr: float,
        beta1: float = 0.9,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        amsgrad: bool = False,
        steady: bool = False,
    ):
        """Take parameters.

        Args:
            parameters: to be moved.
            lr: the rate.
            beta1: the first decay.
            weight_decay: of all parameters.
            decoupled: whether it is AdamW's.
            amsgrad: whether to divide by the largest squares so far.
            steady: whether gradients mostly lie where they lay before, so that one kernel may know where.
        """
        settings = {"lr": lr, "beta1": beta1, "weight_decay": weight_decay, "decoupled": decoupled, "amsgrad": amsgrad}
        super().__init__(parameters, settings)
        device, single = parameters[0].device, all(p.dtype == torch.float32 for p in parameters)
        self._kernels = kernels_on(device, "adam") if steady and single else None
        self._table: tuple[list[int], Tensor] | None = None  # addresses, and what the kernel makes of them
        self.count = torch.zeros(())
        self.numbers = torch.zeros(5, dtype=parameters[0].dtype, device=parameters[0].device)
        self._moments: dict[str, Tensor] = {}
        self._owners: list[Tensor] = []  # of the moments, in their order

    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter once."""
        self.fill()
        self.move()

    def fill(self) -> None:
        """Count the step and write its numbers."""
        self.count += 1
        group, count = self.param_groups[0], int(self.count)
        rate, beta1 = group["lr"], group["beta1"]
        step_size = -rate / (1 - beta1**count)
        _write(
            self.numbers,
            [beta1, 1 - beta1, step_size, 1 / math.sqrt(1 - BETA2**count), -rate * group["weight_decay"]],
        )

    @torch.no_grad()
    def move(self) -> None:
        """Move every parameter that has a gradient."""
        group = self.param_groups[0]
        beta1, rest, step_size, unbias, decay = self.numbers.unbind()
        moved = [p for p in group["params"] if p.grad is not None]
        if not moved:
            return
        moments = self._side_by_side(moved, group["amsgrad"])
        gradients = [p.grad for p in moved if p.grad is not None]
        if self._kernels is not None and all(t.is_contiguous() for t in (*moved, *gradients)):
            table = self._blocks(self._kernels, moved, gradients)
            self._kernels.move(table, moments, self.numbers, group["weight_decay"], group["decoupled"], BETA2, EPSILON)
            return
        mean, square, *largest = moments
        gradient, weights = _joined(gradients), _joined(moved) if group["weight_decay"] else None
        if weights is not None and not group["decoupled"]:
            gradient = gradient.add(weights, alpha=group["weight_decay"])
        mean.mul_(beta1).add_(gradient * rest)
        square.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        if largest:
            square = torch.maximum(largest[0], square, out=largest[0])
        change = mean / square.sqrt().mul_(unbias).add_(EPSILON)
        change.mul_(step_size)
        if weights is not None and group["decoupled"]:
            # Added to the change: in float32 a factor 1 - rate * decay would mostly be one.
            change.add_(weights.mul_(decay))
        torch._foreach_add_(moved, _apart(change, moved))

    def _side_by_side(self, moved: list[nn.Parameter], amsgrad: bool) -> list[Tensor]:
        """The moments of these parameters, each kind in one piece; the state of a parameter shows its part."""
        names = ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * amsgrad)
        if [id(p) for p in moved] != [id(p) for p in self._owners]:
            for p in moved:
                if not self.state[p]:
                    self.state[p].update({"step": self.count, **{name: torch.zeros_like(p) for name in names}})
            self._moments = {name: _joined([self.state[p][name] for p in moved]) for name in names}
            self._owners = list(moved)
            for name, moments in self._moments.items():
                for p, part in zip(moved, _apart(moments, moved), strict=True):
                    self.state[p][name] = part
        return [self._moments[name] for name in names]

    def _blocks(self, kernels: ModuleType, moved: list[nn.Parameter], gradients: list[Tensor]) -> Tensor:
        """The kernel's table, made anew where something lies elsewhere than before."""
        addresses = [tensor.data_ptr() for tensor in (*moved, *gradients)]
        if self._table is None or self._table[0] != addresses:
            self._table = addresses, kernels.blocks(moved, gradients)
        return self._table[1]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take moments and count back."""
        super().load_state_dict(state_dict)
        self._moments, self._owners = {}, []
        self.count = torch.tensor(max((float(entry["step"]) for entry in self.state.values()), default=0.0))
        for entry in self.state.values():
            entry["step"] = self.count


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal (Jordan et al., 2024): each matrix moves by the nearest orthogonal direction.

    All matrices of one shape are treated at once, as a stack, so that a model of many small matrices costs few kernel
    launches. The step is scaled by 0.2 sqrt(longer side) (Liu et al., 2025), the typical size of an AdamW step.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        """Take two-dimensional parameters only."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.numbers = torch.zeros(2, dtype=matrices[0].dtype, device=matrices[0].device)

    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every matrix once."""
        self.fill()
        self.move()

    def fill(self) -> None:
        """Write the numbers of a step."""
        group = self.param_groups[0]
        _write(self.numbers, [-group["lr"], -group["lr"] * group["weight_decay"]])

    @torch.no_grad()
    def move(self) -> None:
        """Move every matrix that has a gradient."""
        group = self.param_groups[0]
        step_size, decay = self.numbers.unbind()
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                by_shape.setdefault(tuple(p.shape), []).append(p)
        for (rows, columns), matrices in by_shape.items():
            gradients = [p.grad for p in matrices if p.grad is not None]
            moments = [self._moment(p) for p in matrices]
            torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
            looked_ahead = torch._foreach_lerp(gradients, moments, group["momentum"])
            directions = orthogonalize(torch.stack(list(looked_ahead)))
            changes = list((directions * (step_size * (0.2 * math.sqrt(max(rows, columns))))).unbind())
            if group["weight_decay"]:
                torch._foreach_add_(changes, torch._foreach_mul(matrices, decay))
            torch._foreach_add_(matrices, changes)

    def _moment(self, p: Tensor) -> Tensor:
        entry = self.state[p]
        if not entry:
            entry["momentum"] = torch.zeros_like(p)
        return entry["momentum"]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All their numbers in one piece."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _apart(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What is joined, in the shapes of the tensors."""
    parts = numbers.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _write(numbers: Tensor, values: list[float]) -> None:
    """Put numbers into a tensor without waiting for its device."""
    # A new tensor each time: a GPU may read it only after the next ones are written.
    fresh = torch.tensor(values, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
    numbers.copy_(fresh, non_blocking=True)


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values land between about 0.7 and 1.2.

    A fifth-order Newton-Schulz iteration; the coefficients are Muon's, chosen to lift small singular values fast.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()  # the iteration corrects itself, and bfloat16 is many times faster there
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.to(matrices.dtype)
    return x.mT if tall else x


class Descent:
    """One or two optimizers that are stepped as one."""

    def __init__(self, operator: Operator, settings: Optimizer, record: Record | None = None):
        """Share the parameters out: hidden matrices to Muon where it is asked for, the rest to Adam.

        Args:
            operator: whose model moves.
            settings: how.
            record: how to record a step, once gradients lie where they lay before; None: never.
        """
        self.settings = settings
        self.parts = {"all": list(operator.model.parameters()), **operator.model.parts()}
        for part, _ in (*settings.clip, *settings.rates):
            if part not in self.parts:
                raise unknown_name("part of the model to clip, or to give a rate of its own", part, self.parts)
        if wrong := [rate for rate in settings.rates if not rate[1] >= 0]:
            raise InputError("factors of zero or more in `optimizer.rates`", repr(wrong[0]), "Zero freezes a part")
        factors = {id(p): factor for part, factor in settings.rates for p in self.parts[part]}
        for p in self.parts["all"]:
            p.requires_grad_(factors.get(id(p), 1.0) != 0)
        matrices = {id(p) for p in operator.model.hidden_matrices()} if settings.kind == "muon" else set()
        self.optimizers: list[Adam | Muon] = []
        self._peaks: list[float] = []  # the rate of each
        for factor in sorted({1.0, *factors.values()} - {0.0}, reverse=True):
            ours = [p for p in self.parts["all"] if factors.get(id(p), 1.0) == factor]
            rest = [p for p in ours if id(p) not in matrices]
            hidden = [p for p in ours if id(p) in matrices]
            if rest:
                adam = Adam(
                    rest, settings.rate * factor, weight_decay=settings.weight_decay,
                    decoupled=settings.kind != "adam", amsgrad=settings.amsgrad, steady=record is not None,
                )  # fmt: skip
                self.optimizers.append(adam)
                self._peaks.append(settings.rate * factor)
            if hidden:
                self.optimizers.append(Muon(hidden, settings.matrix_rate * factor, settings.weight_decay))
                self._peaks.append(settings.matrix_rate * factor)
        if not self.optimizers:
            raise InputError(
                "a part of the model that moves", "all of them frozen by `optimizer.rates`", "Leave one out"
            )
        self._record = record
        self._replay: Work | None = None
        self._gradients: list[Tensor | None] = []  # those of the step before

    def step(self, factor: float, beta1: float) -> None:
        """Clip, move, and forget the gradients.

        Args:
            factor: of the peak rates.
            beta1: Adam's first decay; Muon keeps its own.
        """
        for optimizer, peak in zip(self.optimizers, self._peaks, strict=True):
            optimizer.param_groups[0].update(
                lr=peak * factor, **({"beta1": beta1} if isinstance(optimizer, Adam) else {})
            )
            optimizer.fill()
        parameters = self.parts["all"]
        gradients = [p.grad for p in parameters]
        if self._record is None or list(map(id, gradients)) != list(map(id, self._gradients)):
            self._gradients, self._replay = gradients if self._record else [], None
            self._move()
        else:
            self._replay = self._replay or self._record(self._move, 0)
            self._replay()
        for p in parameters:
            p.grad = None

    def _move(self) -> None:
        """The part of a step that is the same work each time."""
        for part, norm in self.settings.clip:
            nn.utils.clip_grad_norm_(self.parts[part], norm)
        for optimizer in self.optimizers:
            optimizer.move()

    def state(self) -> dict[str, Tensor]:
        """All moments as named tensors."""
        return {
            # Copies: parameters share one count of steps, and Adam's moments one piece of memory.
            f"{n}.{index}.{name}": value.clone()
            for n, optimizer in enumerate(self.optimizers)
            for index, entry in optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the moments back."""
        for n, optimizer in enumerate(self.optimizers):
            entries: dict[int, dict[str, Tensor]] = {}
            for key, value in state.items():
                owner, index, name = key.split(".")
                if int(owner) == n:
                    entries.setdefault(int(index), {})[name] = value
            optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})
        self._gradients, self._replay = [], None  # what was recorded moved other tensors


class Average:
    """An exponential moving average of the weights, which often predicts better than the weights themselves."""

    def __init__(self, operator: Operator, decay: float):
        """Start from the weights as they are."""
        self.decay = decay
        self.parameters: list[Tensor] = list(operator.model.parameters())
        self.shadow = [p.detach().clone() for p in self.parameters]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Follow the weights; the first updates follow faster, so that the start is forgotten."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters], 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in place of the weights for a while."""
        kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, kept)
