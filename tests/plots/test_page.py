"""A page is one well-formed file that needs nothing else and runs nothing that a name or a caption holds."""

import base64
import struct
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from oformer.plots.page import code, heading, page_html, paragraph, picture, table

ALONE = {"meta", "img", "br", "hr", "link", "input"}
EVIL = "</title><script>alert(\"1\" & '2')</script><img src=x onerror=alert(3)>"


class Tree(HTMLParser):
    """Refuses tags that do not close in order, and keeps what the tests ask for."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[tuple[str, ...], str]] = []  # where, what
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.text.append((tuple(self.open), data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def texts(self, tag: str) -> list[str]:
        return [data for place, data in self.text if place[-1] == tag]


def full_page(word: str = "words") -> str:
    figure = Figure(figsize=(4, 2))
    figure.subplots().plot([0, 1])
    blocks = [
        heading(f"heading {word}"),
        paragraph(f"first {word}"),
        paragraph(f"second {word}"),
        picture(f"a rising line {word}", figure),
        table(
            f"numbers {word}", ("", "error", f"note {word}"), [(f"row {word}", "0.01235", "-"), ("b", "1,024", word)]
        ),
        code(f"to copy {word}", f"a < b\n{word}\n"),
    ]
    return page_html(f"title {word}", f"subtitle {word}", blocks)


def test_the_page_is_well_formed_and_accessible():
    tree = Tree(full_page())
    assert tree.all("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in tree.all("meta")
    assert {"charset": "utf-8"} in tree.all("meta")
    assert tree.texts("title") == tree.texts("h1") == ["title words"]
    assert tree.texts("h2") == ["heading words"]
    assert tree.texts("p") == ["subtitle words", "first words", "second words"]
    assert len(tree.all("main")) == 1
    assert all(image["alt"] for image in tree.all("img"))
    assert "prefers-color-scheme: dark" in tree.texts("style")[0]


def test_a_table_says_which_cells_head_which():
    tree = Tree(full_page())
    assert tree.texts("caption") == ["numbers words"]
    assert tree.texts("th") == ["error", "note words", "row words", "b"]  # a nameless column has no header cell
    assert [head["scope"] for head in tree.all("th")] == ["col", "col", "row", "row"]
    assert tree.texts("td") == ["0.01235", "-", "1,024", "words"]
    # Numbers line up at the right, header included; words do not.
    assert [cell.get("class") for cell in tree.all("td")[1:]] == ["number", None, "number", None]
    assert [head.get("class") for head in tree.all("th")] == ["number", None, None, None]


def test_nothing_comes_from_elsewhere():
    html = full_page()
    tree = Tree(html)
    for tag, attributes in tree.tags:
        assert tag not in ("script", "link", "iframe", "object", "base")
        assert not set(attributes) & {"href", "srcset", "data", "action", "background"}
        assert (attributes.get("src") or "data:image/").startswith("data:image/")
    style = tree.texts("style")[0]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [m["content"] for m in tree.all("meta") if m.get("http-equiv")]
    assert policy is not None
    assert "default-src 'none'" in policy


def test_pictures_are_inside_the_file_and_keep_their_shape():
    (image,) = Tree(full_page()).all("img")
    assert image["alt"] == "a rising line words"
    source = image["src"] or ""
    data = base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width / height == pytest.approx(int(image["width"] or 0) / int(image["height"] or 1)) == 2


def test_names_and_captions_are_text_whatever_they_hold():
    clean, evil = Tree(full_page()), Tree(full_page(EVIL))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in clean.tags]
    assert all(not name.startswith("on") for _, attributes in evil.tags for name in attributes)
    # And the reader sees every character of it.
    for (_, wanted), (_, seen) in zip(clean.text, evil.text, strict=True):
        if "prefers-color-scheme" not in wanted:
            assert seen == wanted.replace("words", EVIL)
    assert evil.all("img")[0]["alt"] == f"a rising line {EVIL}"


def test_code_keeps_its_lines():
    assert Tree(full_page()).texts("code") == ["a < b\nwords"]


def test_a_table_may_be_empty():
    tree = Tree(page_html("t", "s", [table("nothing yet", ("a", "b"), [])]))
    assert (tree.texts("th"), tree.texts("td")) == (["a", "b"], [])
