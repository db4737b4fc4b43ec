"""``python -m oomrun`` is the ``oomrun`` command."""

import sys

from oomrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
