"""``python -m specjax``: the command line where its script is not on the path."""

from specjax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
