"""Stores for the rendezvous, also authenticated ones, and the launcher's secret."""
