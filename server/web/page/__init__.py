"""The service's page, and the events that keep it up to date."""
