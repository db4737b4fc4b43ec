"""What ``drive`` calls on another host in the place of oomrun's own agent."""

from __future__ import annotations

from drive import agent as main

__all__ = ["main"]
