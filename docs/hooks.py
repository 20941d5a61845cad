"""For the site: links to files of the repository that are no pages become their words."""

import re


def on_page_markdown(markdown, **_):
    """Links that lead out of this folder."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
