"""Formulas become MathML when the site is built: showing them needs no script and no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page, in which `arithmatex` has marked formulas."""

    def inline(found: re.Match[str]) -> str:
        return convert(_plain(found[1]))

    def display(found: re.Match[str]) -> str:
        return convert(_plain(found[1]), display="block")

    content = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>', inline, content, flags=re.DOTALL
    )
    return re.sub(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', display, content, flags=re.DOTALL)


def _plain(formula: str) -> str:
    return html.unescape(formula).strip()
