"""The site: Sphinx with MyST for Markdown and autodoc for the API. Built by `make docs`, warnings are errors."""

import re
from pathlib import Path

import oformer

HERE = Path(__file__).parent

project = "oformer"
author = "The oformer developers"
version = release = oformer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
myst_url_schemes = ("http", "https")
# GitHub colors `sh` and text drawings too; here a block without a language is just text.
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Shapes are strings such as "batch points dim"; a long signature gets a line for each argument.
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"oformer {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path: list[str] = []
# The live page is asked for by `-t live`, after tools/live.py has made it; Sphinx puts `tags` here.
html_extra_path = ["../build/live"] if tags.has("live") else []
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5f8b", "color-brand-content": "#1f5f8b"},
    "dark_css_variables": {"color-brand-primary": "#8cc4e8", "color-brand-content": "#8cc4e8"},
}


def inside_the_site(text: str, page: Path) -> str:
    """A page whose links to files of the repository that are no pages, right on GitHub, are plain words here."""

    def link(found: re.Match[str]) -> str:
        target = (page.parent / found["file"]).resolve()
        if (target / "index.md").is_file():
            return f"[{found['words']}]({found['file'].rstrip('/')}/index.md{found['place'] or ''})"
        is_page = target.suffix in (".md", ".png", ".svg", ".gif") and target.is_relative_to(HERE)
        return found[0] if is_page else found["words"]

    return re.sub(r"\[(?P<words>[^\]]+)\]\((?!\w+:)(?P<file>[^)#\s]+)(?P<place>#[^)]*)?\)", link, text)


def setup(app):
    """Called by Sphinx."""

    def read(app, name: str, source: list[str]) -> None:
        source[0] = inside_the_site(source[0], HERE / f"{name}.md")

    app.connect("source-read", read)
