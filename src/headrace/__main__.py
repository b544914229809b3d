"""``headrace`` and ``python -m headrace``: the command line."""

import signal

__all__ = ["run"]


def run() -> None:
    """Run the command line and end the process."""
    at_home = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if at_home:  # Ctrl-C while modules are read: end, without a traceback of whatever was read
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace import cli

    if at_home:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.run()


if __name__ == "__main__":
    run()
