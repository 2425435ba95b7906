"""python -m oformer."""

from oformer.cli import program

if __name__ == "__main__":
    program()
