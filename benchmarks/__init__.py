"""Measurements. Each prints JSON; compare ratios of one run, not seconds of two."""
