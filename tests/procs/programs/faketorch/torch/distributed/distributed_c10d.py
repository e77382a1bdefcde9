"""Process groups that end late: a thread of torch holds a reference for a while."""

import ctypes
import hashlib
import threading


def destroy_process_group(group=None):
    """Destroy a group."""
    begun = threading.Event()

    def late():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000)  # without Python's global lock
        print("let go of", group, flush=True)

    threading.Thread(target=late, daemon=True).start()
    begun.wait()
