"""The commands of the console script, one file each; `options` has what the larger ones take."""
