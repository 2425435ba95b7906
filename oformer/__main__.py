"""python -m oformer."""

import sys

from oformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
