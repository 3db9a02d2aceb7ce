"""What the kernels move, use and reach: proofs and measurements that need no GPU, and those that do."""

import sys
from types import TracebackType


def _quiet(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:
    # Ctrl-C while the modules of a command load: `command.command` has not taken over yet
    sys.excepthook = _quiet
