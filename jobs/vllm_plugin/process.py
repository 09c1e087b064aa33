"""Lives of vLLM's processes."""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Let this engine process end when the one that started it has, however that came: vLLM's own goes on for ever
    when its front end is killed.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith("EngineCore"):
        return  # the engine runs in the process of whoever uses it

    def wait() -> None:
        parent.join()
        os._exit(1)  # its workers end with it

    threading.Thread(target=wait, name="parent", daemon=True).start()
