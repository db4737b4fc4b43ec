"""``python -m oomrun.worker``: one worker, started by the supervisor."""

import sys

from oomrun.worker.bootstrap import main

if __name__ == "__main__":
    sys.exit(main())
