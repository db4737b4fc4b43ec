"""The pure core: decisions as functions over frozen values; no I/O, no clock."""
