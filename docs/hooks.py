"""A hook of the documentation site: links to files of the repository that are not pages become plain text."""

import re


def on_page_markdown(markdown, **_):
    """Replace links that lead out of this folder by their text."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
