"""Models of protocols, checked by exhaustive search. Not part of the installed packages."""
