"""Backends that wrap another backend and change how it starts operations."""
