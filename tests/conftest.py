"""For all tests."""

import signal


def _heed(number: signal.Signals, handler: object) -> None:
    """A shell starts what is to run in the background with some signals ignored, and all that tests start
    would inherit that."""
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)  # type: ignore[arg-type]


_heed(signal.SIGINT, signal.default_int_handler)
_heed(signal.SIGQUIT, signal.SIG_DFL)
