"""``headrace`` and ``python -m headrace``: the command line."""

import signal

__all__ = ["run"]


def run() -> None:
    """Run the command line and end the process."""
    usual_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual_handler:  # Ctrl-C while modules are imported ends the process without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace import cli

    if usual_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.run()


if __name__ == "__main__":
    run()
