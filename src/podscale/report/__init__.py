"""What a run was, for people: words on a terminal (`words`) and a page to look at (`page`)."""
