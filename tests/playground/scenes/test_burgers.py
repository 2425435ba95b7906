"""The scene of Burgers: curves unlike those of training."""


def test_a_lifted_curve_is_told_from_those_of_training(service):
    scene = service.models["burgers"].scene
    state = scene.example(0)
    assert not scene.unseen(state)
    assert "a mean of 0.2" in scene.unseen({"values": [value + 0.2 for value in state["values"]]})
