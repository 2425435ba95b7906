import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oformer.config import from_json, to_json
from oformer.errors import InputError


@dataclass(frozen=True)
class Leaf:
    kind: Literal["a", "b"] = "a"
    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise InputError("a `rate` of zero or more", str(self.rate))


@dataclass(frozen=True)
class Twig:
    length: int = 1


@dataclass(frozen=True)
class Tree:
    name: str
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    part: Leaf | Twig | None = None
    points: tuple[int, ...] | int | None = None
    flags: dict[str, bool] = field(default_factory=dict)
    derived: int = field(init=False, default=3)


LEAVES = st.builds(Leaf, st.sampled_from(["a", "b"]), st.floats(0, 1e9))
TREES = st.builds(
    Tree,
    st.text(),
    st.lists(LEAVES, max_size=3).map(tuple),
    st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    st.one_of(st.none(), LEAVES, st.builds(Twig, st.integers())),
    st.one_of(st.none(), st.integers(), st.lists(st.integers(), max_size=3).map(tuple)),
    st.dictionaries(st.text(), st.booleans(), max_size=3),
)


@given(tree=TREES)
def test_there_and_back(tree):
    assert from_json(Tree, json.loads(json.dumps(to_json(tree)))) == tree


def test_what_is_written():
    assert to_json(Tree("oak", (Leaf(),), part=Twig(2))) == {
        "type": "Tree",
        "name": "oak",
        "leaves": [{"type": "Leaf", "kind": "a", "rate": 0.5}],
        "pair": [1, 2.0],
        "part": {"type": "Twig", "length": 2},
        "points": None,
        "flags": {},
    }


def test_a_whole_number_may_stand_for_a_float():
    leaf = from_json(Leaf, {"kind": "a", "rate": 1})
    assert isinstance(leaf.rate, float)


def changed(**changes):
    content = to_json(Tree("oak", (Leaf(), Leaf())))
    for path, value in changes.items():
        *way, last = path.split("__")
        place = content
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        last = int(last) if last.isdigit() else last
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nmae": "x"}, r"the fields of Tree at `config`, got unknown nmae"),
        ({"name": ...}, "got missing name"),
        ({"name": ..., "nmae": "x"}, "unknown nmae; missing name"),
        ({"derived": 3}, "unknown derived"),
        ({"name": 3}, r"str at `config.name`, got 3"),
        ({"type": "Bush"}, r"Tree at `config.type`, got 'Bush'"),
        ({"leaves": "ab"}, r"a list at `config.leaves`"),
        ({"leaves__1__rate": "fast"}, r"float at `config.leaves\[1\].rate`, got 'fast'"),
        ({"leaves__1__rate": True}, r"float at `config.leaves\[1\].rate`, got True"),
        ({"leaves__0__kind": "c"}, r"one of 'a', 'b' at `config.leaves\[0\].kind`, got 'c'"),
        ({"leaves__0": 7}, r"the fields of Leaf at `config.leaves\[0\]`"),
        ({"leaves__0__rate": -1.0}, r"a `rate` of zero or more, got -1.0"),
        ({"pair": [1, 2.0, 3]}, r"2 values at `config.pair`"),
        ({"pair": [1.0, 2.0]}, r"int at `config.pair\[0\]`"),
        ({"part": {"type": "Root"}}, r"one of Leaf, Twig at `config.part.type`, got 'Root'"),
        ({"part": {"type": "Twig", "length": 0.5}}, r"int at `config.part.length`"),
        ({"part": 5}, r"Leaf or Twig or NoneType at `config.part`"),
        ({"points": "all"}, r"at `config.points`, got 'all'"),
        ({"points": True}, r"at `config.points`, got True"),
        ({"flags": [1]}, r"an object at `config.flags`"),
        ({"flags": {"x": 1}}, r"bool at `config.flags.x`"),
    ],
)
def test_strict(change, message):
    with pytest.raises(InputError, match=message):
        from_json(Tree, changed(**change))


def test_a_file_from_before_a_field_existed_takes_its_default():
    tree = Tree("oak", (Leaf(), Leaf(rate=2.0)))
    content = to_json(tree)
    del content["leaves"][0]["rate"], content["flags"]
    assert from_json(Tree, content) == tree


def test_only_plain_values_are_written():
    for value in (object(), {1, 2}, Tree, 1j):
        with pytest.raises(TypeError, match="plain values and dataclasses"):
            to_json(value)


def test_where_is_part_of_the_message():
    with pytest.raises(InputError, match=r"at `runs/a/config.json.rate`"):
        from_json(Leaf, {"kind": "a", "rate": None}, "runs/a/config.json")
