"""What ties a process to the one that started it."""

import os
import signal
import threading
import time

LOOK_EVERY = 1.0  # seconds
GRACE = 300.0  # seconds to save in, after which an orphan is ended: it may wait for another that is gone


def stop_with_parent(parent: int | None = None) -> None:
    """Send this process SIGTERM when its parent has died, which training takes as a wish to save and stop.

    A parent that is killed cannot stop its children itself. They are adopted by another process then, which is how
    they notice on any POSIX system; Windows has no adoption, and they go on there.

    Args:
        parent: the process that started this one; by default the one that it has now.
    """
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="oformer-parent", daemon=True).start()
