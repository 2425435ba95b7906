"""Optimizers against torch's own and against their formulas; what is saved is all there is."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from oformer.errors import InputError
from oformer.fields import Spec
from oformer.models import Normalization, OFormerConfig, Operator
from oformer.models.oformer import Decoder, Encoder, Propagator, Query
from oformer.training.optimizers import Adam, Average, Descent, Muon, Optimizer, orthogonalize

exact = pytest.mark.usefixtures("float64")

SHAPES = [(12, 12), (20, 8), (8, 20), (1, 9), (64, 3)]


def operator() -> Operator:
    """Small, with everything that is treated apart: codes, norms, biases, a trunk."""
    spec = Spec(
        dim=2, in_times=1, in_channels=2, out_times=1, out_channels=1, query_channels=1, in_categories=3,
        query_categories=3,
    )  # fmt: skip
    config = OFormerConfig(
        encoder=Encoder(width=8, depth=1, heads=2, layernorm=True, lift_layers=2),
        query=Query(width=8, fourier_features=3, hidden=(8,), heads=2),
        propagator=Propagator(depth=1, width=12),
        decoder=Decoder(trunk=(6,), hidden=(6,)),
    )
    return Operator(config.build(spec), Normalization())


def give_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    """The same gradients for every copy of a model, other ones at each step."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Muon's iteration for one matrix, on its singular values: s -> 3.4445 s - 4.7750 s^3 + 2.0315 s^5."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@exact
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_directions_are_nearly_orthogonal(shape):
    # A spectrum within a factor of thirty: five iterations lift it all.
    u, s, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrix = u @ torch.logspace(0, -1.5, len(s)).diag() @ v
    direction = orthogonalize(matrix[None])[0]
    assert direction.shape == shape
    values = torch.linalg.svdvals(direction)
    assert values.min() > 0.6
    assert values.max() < 1.3
    # It turns no singular direction: it has those of the matrix itself.
    within = u.T @ direction @ v.T
    torch.testing.assert_close(within, within.diag().diag(), rtol=0, atol=1e-9)
    assert (within.diag() > 0).all()


@exact
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_directions_do_not_depend_on_the_size_of_the_gradient(shape):
    matrix = torch.randn(1, *shape)
    for scale in (1e-3, 1e6):
        torch.testing.assert_close(orthogonalize(scale * matrix), orthogonalize(matrix), rtol=1e-3, atol=1e-3)


@exact
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_directions_are_those_of_the_iteration_on_the_singular_values(shape):
    matrices = torch.randn(3, *shape)
    expected = torch.stack([newton_schulz(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalize(matrices), expected, rtol=0, atol=1e-9)


def test_no_gradient_no_direction():
    assert torch.equal(orthogonalize(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


@exact
def test_muon_follows_its_formula():
    """Nesterov momentum, decoupled decay, and a step of 0.2 sqrt(longer side); a stack changes nothing."""
    rate, decay, momentum = 0.02, 0.1, 0.9
    matrices = [nn.Parameter(torch.randn(shape)) for shape in (*SHAPES, *SHAPES)]
    expected = [m.detach().clone() for m in matrices]
    moments = [torch.zeros_like(m) for m in expected]
    muon = Muon(matrices, lr=rate, weight_decay=decay, momentum=momentum)
    for _ in range(4):
        for n, matrix in enumerate(matrices):
            matrix.grad = torch.randn_like(matrix)
            moments[n] = momentum * moments[n] + (1 - momentum) * matrix.grad
            ahead = momentum * moments[n] + (1 - momentum) * matrix.grad
            size = 0.2 * math.sqrt(max(matrix.shape))
            expected[n] = (1 - rate * decay) * expected[n] - rate * size * newton_schulz(ahead)
        muon.step()
    for matrix, wanted in zip(matrices, expected, strict=True):
        torch.testing.assert_close(matrix.detach(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(12, 12), (20, 8), (8, 20)], ids=str)
def test_muon_is_that_of_torch_up_to_its_rounding(shape):
    ours, theirs = (nn.Parameter(p) for p in torch.randn(shape).expand(2, *shape).clone())
    start = ours.detach().clone()
    muon = Muon([ours], lr=0.02, weight_decay=0.1)
    torch_muon = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step()
        torch_muon.step()
    moved = (ours - start).norm()
    assert moved > 0.1
    assert (ours - theirs).norm() < 0.03 * moved  # torch iterates in bfloat16


def test_muon_leaves_matrices_without_a_gradient():
    still, moving = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    before = still.detach().clone()
    muon = Muon([still, moving], lr=0.1, weight_decay=0.5)
    moving.grad = torch.randn(4, 4)
    muon.step()
    assert torch.equal(still, before)
    assert list(muon.state) == [moving]


def test_muon_takes_hidden_matrices_and_adam_the_rest():
    model = operator().model
    adam, muon = Descent(Operator(model, Normalization()), Optimizer(kind="muon")).optimizers
    names = {id(p): name for name, p in model.named_parameters()}
    matrices = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adam.param_groups for p in group["params"]}
    assert isinstance(muon, Muon)
    assert isinstance(adam, Adam)
    assert adam.param_groups[0]["decoupled"]
    assert matrices | rest == set(names.values())
    assert not matrices & rest
    assert {"blocks.0.attention.q.weight", "cross.feedforward.gate.weight", "expand.weight", "trunk.layers.0.weight",
            "join_input_code.weight"} <= matrices  # fmt: skip
    assert {"lift.layers.0.weight", "heads.0.layers.1.weight", "input_code.weight", "query_code.weight",
            "blocks.0.norms.0.weight", "cross.attention.out.0.bias"} <= rest  # fmt: skip


CLASSES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@exact
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_descent_is_that_of_torch_step_by_step(kind, amsgrad):
    """Coupled decay for adam, decoupled for adamw; rate and beta1 as each step says."""
    ours = operator()
    theirs = copy.deepcopy(ours)
    descent = Descent(ours, Optimizer(kind=kind, rate=0.01, weight_decay=0.1, amsgrad=amsgrad))
    reference = CLASSES[kind](theirs.model.parameters(), lr=1.0, weight_decay=0.1, amsgrad=amsgrad)
    for step, (factor, beta1) in enumerate([(0.1, 0.95), (1.0, 0.85), (0.5, 0.9), (0.3, 0.9)]):
        for each in (ours, theirs):
            give_gradients(each.model, step, scale=10.0 ** (-step))
        reference.param_groups[0].update(lr=0.01 * factor, betas=(beta1, 0.999))
        reference.step()
        descent.step(factor, beta1)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@exact
@pytest.mark.parametrize("kind", CLASSES)
def test_the_state_of_torch_s_own_goes_on_here(kind):
    """Checkpoints of earlier versions hold it."""
    ours = operator()
    theirs = copy.deepcopy(ours)
    reference = CLASSES[kind](theirs.model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True)
    for step in range(3):
        give_gradients(theirs.model, step)
        reference.step()
    ours.load_state_dict(theirs.state_dict())
    descent = Descent(ours, Optimizer(kind=kind, rate=0.01, weight_decay=0.1, amsgrad=True))
    entries = reference.state_dict()["state"].items()
    descent.load({f"0.{index}.{name}": value.clone() for index, entry in entries for name, value in entry.items()})
    give_gradients(theirs.model, 3)
    reference.step()
    give_gradients(ours.model, 3)
    descent.step(1.0, 0.9)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    saved, wanted = descent.state(), reference.state_dict()["state"]
    assert saved.keys() == {f"0.{index}.{name}" for index, entry in wanted.items() for name in entry}
    assert all(float(saved[f"0.{index}.step"]) == 4 for index in wanted)


@exact
def test_coupled_and_decoupled_decay_differ():
    results = {}
    for kind in CLASSES:
        torch.manual_seed(0)
        subject = operator()
        descent = Descent(subject, Optimizer(kind=kind, rate=0.01, weight_decay=1.0))
        give_gradients(subject.model, 0)
        descent.step(1.0, 0.9)
        results[kind] = nn.utils.parameters_to_vector(subject.parameters()).detach()
    assert (results["adam"] - results["adamw"]).abs().max() > 1e-3


@exact
@pytest.mark.parametrize(
    "clip", [(), (("encoder", 2.0),), (("encoder", 2.0), ("decoder", 0.5)), (("all", 3.0),)], ids=str
)
def test_each_part_is_clipped_to_its_own_norm(clip):
    """Adam forgets the size of a gradient, but not the ratio of the sizes of two: the second is far larger."""
    ours = operator()
    theirs = copy.deepcopy(ours)
    descent = Descent(ours, Optimizer(rate=0.01, weight_decay=0.0, clip=clip))
    reference = torch.optim.AdamW(theirs.model.parameters(), lr=0.01, weight_decay=0.0)
    limits = dict(clip)
    for step, scale in enumerate((1e-3, 1e2)):
        for each in (ours, theirs):
            give_gradients(each.model, step, scale)
        groups = {"all": list(theirs.model.parameters()), **theirs.model.parts()}
        for part, limit in limits.items():
            norm = math.sqrt(sum(p.grad.square().sum().item() for p in groups[part]))
            assert (norm > limit) == (step == 1)
            for p in groups[part]:
                p.grad *= min(1.0, limit / (norm + 1e-6))
        reference.step()
        descent.step(1.0, 0.9)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradients_are_forgotten_after_a_step():
    subject = operator()
    descent = Descent(subject, Optimizer(kind="muon"))
    give_gradients(subject.model, 0)
    descent.step(1.0, 0.9)
    assert all(p.grad is None for p in subject.parameters())


@exact
def test_each_optimizer_has_its_own_rate():
    before = operator()
    subject = copy.deepcopy(before)
    descent = Descent(subject, Optimizer(kind="muon", rate=1e-3, matrix_rate=0.5, weight_decay=0.0))
    give_gradients(subject.model, 0)
    descent.step(0.1, 0.9)
    moved = {
        name: (after - start).detach()
        for (name, after), start in zip(subject.model.named_parameters(), before.model.parameters(), strict=True)
    }
    # Adam's first step is its rate in each entry; Muon's is its rate times 0.2 sqrt(side) times an orthogonal matrix.
    assert moved["lift.layers.0.weight"].abs().max().item() == pytest.approx(1e-4, rel=1e-3)
    values = torch.linalg.svdvals(moved["embed_query.layers.1.weight"]) / (0.05 * 0.2 * math.sqrt(8))
    assert 0.5 < values.median() < 1.3


@pytest.mark.parametrize(
    "settings",
    [
        Optimizer(kind="adam", rate=0.01),
        Optimizer(kind="adamw", rate=0.01, amsgrad=True, clip=(("encoder", 0.5),)),
        Optimizer(kind="muon", rate=0.01, matrix_rate=0.02, clip=(("all", 1.0),)),
    ],
    ids=lambda settings: settings.kind,
)
def test_state_taken_and_given_back_continues_bit_by_bit(settings):
    straight = operator()
    descent = Descent(straight, settings)
    for step in range(3):
        give_gradients(straight.model, step)
        descent.step(1.0, 0.9)
    resumed = copy.deepcopy(straight)
    state = {name: tensor.clone() for name, tensor in descent.state().items()}
    assert all(isinstance(tensor, Tensor) for tensor in state.values())
    kinds = {name.rsplit(".", 1)[1] for name in state}
    assert {"exp_avg", "exp_avg_sq", "step"} <= kinds
    assert ("max_exp_avg_sq" in kinds) == settings.amsgrad
    assert ("momentum" in kinds) == (settings.kind == "muon")

    fresh, unloaded = Descent(resumed, settings), copy.deepcopy(resumed)
    fresh.load(state)
    without = Descent(unloaded, settings)
    for step in range(3, 6):
        for subject, optimizer in ((straight, descent), (resumed, fresh), (unloaded, without)):
            give_gradients(subject.model, step)
            optimizer.step(0.7, 0.95)
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    # The moments did matter.
    vectors = [nn.utils.parameters_to_vector(subject.parameters()) for subject in (straight, unloaded)]
    assert (vectors[0] - vectors[1]).abs().max() > 1e-4
    for (name, one), other in zip(descent.state().items(), fresh.state().values(), strict=True):
        assert torch.equal(one, other), name


@exact
def test_average_follows_its_formula():
    subject = operator()
    average = Average(subject, decay=0.5)
    expected = [p.detach().clone() for p in subject.model.parameters()]
    for n in range(1, 15):
        with torch.no_grad():
            for p in subject.model.parameters():
                p.add_(torch.randn_like(p))
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))  # the first updates follow faster
        assert (decay < 0.5) == (n < 8)
        expected = [decay * e + (1 - decay) * p for e, p in zip(expected, subject.model.parameters(), strict=True)]
    for shadow, wanted in zip(average.shadow, expected, strict=True):
        torch.testing.assert_close(shadow, wanted.detach(), rtol=1e-12, atol=1e-12)


def test_average_is_in_place_for_a_while_and_then_the_weights_are_back():
    subject = operator()
    average = Average(subject, decay=0.9)
    with torch.no_grad():
        for p in subject.model.parameters():
            p.add_(1.0)
    average.update()
    weights = [p.detach().clone() for p in subject.model.parameters()]
    with average.applied():
        for p, shadow, weight in zip(subject.model.parameters(), average.shadow, weights, strict=True):
            assert torch.equal(p, shadow)
            assert not torch.equal(p, weight)
    assert all(torch.equal(p, w) for p, w in zip(subject.model.parameters(), weights, strict=True))
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    assert all(torch.equal(p, w) for p, w in zip(subject.model.parameters(), weights, strict=True))


def test_average_does_not_follow_on_its_own():
    subject = operator()
    average = Average(subject, decay=0.9)
    before = [shadow.clone() for shadow in average.shadow]
    with torch.no_grad():
        for p in subject.model.parameters():
            p.add_(1.0)
    assert all(torch.equal(shadow, old) for shadow, old in zip(average.shadow, before, strict=True))


def test_a_part_that_does_not_exist_is_refused_before_the_first_step():
    with pytest.raises(InputError, match="encoder"):
        Descent(operator(), Optimizer(clip=(("encodre", 1.0),)))


def test_adam_keeps_the_moments_of_parameters_that_come_and_go():
    """Against the formula for each parameter alone; the count of steps is common."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 2), (4,), (), (2, 2))]
    plain = [p.detach().clone() for p in parameters]
    moments = [[torch.zeros_like(p), torch.zeros_like(p)] for p in plain]
    adam = Adam(parameters, 1e-2, weight_decay=0.1)
    for count, present in enumerate(([0, 1, 3], [0, 1, 2, 3], [2], [], [1, 3], [0, 1, 2, 3]), 1):
        for n, p in enumerate(parameters):
            p.grad = torch.randn_like(p) if n in present else None
        adam.step()
        for n in present:
            mean, square = moments[n]
            gradient = parameters[n].grad
            assert gradient is not None
            mean.mul_(0.9).add_(0.1 * gradient)
            square.mul_(0.999).add_(0.001 * gradient.square())
            size = (square / (1 - 0.999**count)).sqrt() + 1e-8
            plain[n] -= 1e-2 * (mean / (1 - 0.9**count) / size + 0.1 * plain[n])
        torch.testing.assert_close([p.detach() for p in parameters], plain, rtol=1e-12, atol=1e-12)
        for n, p in enumerate(parameters):
            if adam.state[p]:
                torch.testing.assert_close(adam.state[p]["exp_avg"], moments[n][0])
