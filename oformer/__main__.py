"""python -m oformer."""

import sys

from oformer.cli import program

if __name__ == "__main__":
    sys.exit(program())
