"""Models of different kinds, each with data, a global batch and memory limits."""

from benchmarks.zoo import images, sequences, tables
from benchmarks.zoo.entry import OPTIMIZERS, Entry

__all__ = ["OPTIMIZERS", "ZOO", "Entry"]

#: All entries by name.
ZOO: dict[str, Entry] = {
    entry.name: entry
    for family in (images, sequences, tables)
    for entry in family.ENTRIES
}
