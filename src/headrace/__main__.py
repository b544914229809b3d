"""``python -m headrace`` is the command line."""

from headrace.cli import run

if __name__ == "__main__":
    run()
