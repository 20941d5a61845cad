"""Hooks of the site: links out of this folder become plain text; what scrolls can be reached by the keyboard."""

import re


def on_page_markdown(markdown, **_):
    """Replace links that lead out of this folder by their text."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html, **_):
    """Make code blocks and tables focusable, because wide ones scroll."""
    html = re.sub(r"(<pre[^>]*>(?:<span></span>)?)<code>", r'\1<code tabindex="0">', html)
    return html.replace("<table>", '<table tabindex="0">')
