"""Hooks of the site: links out of this folder become plain text; what scrolls can be reached by the keyboard.

The dialog of the search gets a name, which the theme does not give it. The API reference shows public names.
"""

import re

import podscale


def on_page_markdown(markdown, **_):
    """Replace links that lead out of this folder by their text."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html, page, **_):
    """Make code blocks and tables focusable, because wide ones scroll; show public names in the API reference."""
    if page.file.src_uri == "api.md":
        html = show_public_names(html, page.toc)
    return html.replace("<pre>", '<pre tabindex="0">').replace("<table>", '<table tabindex="0">')


def show_public_names(html, toc):
    """Replace the names in headings and in the table of contents by those that `import podscale` offers."""
    entries = {entry.id: entry for parent in toc for entry in (parent, *parent.children)}
    for name, location in podscale._MODULES.items():
        module, _, original = location.partition(":")
        anchor = f"{module}.{original or name}"
        heading = re.compile(rf'(<h2 id="{re.escape(anchor)}"(?:(?!</h2>).)*?>){original or name}<', re.DOTALL)
        html = heading.sub(rf"\1podscale.{name}<", html, count=1)
        entries[anchor].title = name
    return html


def on_post_page(output, **_):
    """Name the dialog of the search for screen readers."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')
