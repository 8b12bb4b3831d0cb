"""Serve a pool over HTTP: applications, services, metrics and logs."""
