"""Completions and chats as a service."""
