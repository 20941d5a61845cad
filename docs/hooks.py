"""Hooks of the site: links out of this folder become plain text; what scrolls can be reached by the keyboard.

The dialog of the search gets a name, which the theme does not give it.
"""

import re


def on_page_markdown(markdown, **_):
    """Replace links that lead out of this folder by their text."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html, **_):
    """Make code blocks and tables focusable, because wide ones scroll."""
    return html.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')


def on_post_page(output, **_):
    """Name the dialog of the search for screen readers."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
