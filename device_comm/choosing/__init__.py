"""Chooses, by measured times, which of several backends carries out an operation."""
