"""``python -m specjax``: the command line where its script is not on the path."""

from specjax.cli import program

if __name__ == "__main__":
    program()
