"""Looks at the boards of other processes from outside, and stops, changes or locks nothing."""
