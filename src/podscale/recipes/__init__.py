"""The recipes that come with the package, one TOML file each; the comment that opens a file is its documentation."""
