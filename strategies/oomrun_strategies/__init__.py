"""Strategies: how one job is laid over devices. One file each, found by entry point."""
