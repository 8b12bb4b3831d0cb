"""Workers that ship with the project."""
