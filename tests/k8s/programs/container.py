"""Starts a container from its description as JSON: process 1 of namespaces of its own. Ends when process 1
ends.

The container's root is this machine's root, under a layer that is thrown away. So the files that the image
would bring are there, and writes are lost. Uses the standard library only, and nothing of elasticd.
"""

import ctypes
import json
import os
import signal
import socket
import sys

RDONLY, NOSUID, REMOUNT, BIND, REC, PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
DEVICES = ("null", "zero", "full", "random", "urandom")
SPACES = 0x20000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000  # mounts, names, IPC, processes, network
DIE_WITH_PARENT = 1
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind="none", flags=0, data=""):
    words = [str(word).encode() for word in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), data.encode()) != 0:
        code = ctypes.get_errno()
        sys.exit(f"cannot mount {source} on {target}: {os.strerror(code)}")


def bind(source, target, readonly=False):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    mount(source, target, flags=BIND)
    if readonly:
        mount("none", target, flags=BIND | REMOUNT | RDONLY)


def make_root(folder, reachable):
    """Make an overlay of / in which every user may walk to these paths."""
    mount("tmpfs", folder, "tmpfs", data="mode=755")
    upper, work, root = (os.path.join(folder, name) for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        os.mkdir(path, 0o755)
    mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={upper},workdir={work}")
    machine = os.stat("/").st_dev
    for path in reachable:
        if os.stat(path).st_dev != machine:  # another file system, which the overlay does not show
            bind(path, root + path)
        for parent in parents(path):
            inside = root + parent
            mode = os.stat(inside).st_mode & 0o7777
            if mode & 0o005 != 0o005 and os.stat(inside).st_dev == os.stat(root).st_dev:
                os.chmod(inside, mode | 0o005)
    return root


def parents(path):
    while path != "/":
        path = os.path.dirname(path)
        yield path


def make_devices(dev, termination_log):
    mount("tmpfs", dev, "tmpfs", NOSUID, "mode=755,size=64k")
    for name in DEVICES:
        bind(f"/dev/{name}", f"{dev}/{name}")
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        os.symlink(f"/proc/self/fd/{number}", f"{dev}/{name}")
    os.symlink("/proc/self/fd", f"{dev}/fd")
    os.mkdir(f"{dev}/shm", 0o1777)
    bind(termination_log, f"{dev}/termination-log")


def main():
    with open(sys.argv[1]) as file:
        told = json.load(file)
    if _libc.unshare(SPACES) != 0:
        sys.exit(f"cannot make namespaces: {os.strerror(ctypes.get_errno())}")
    mount("none", "/", flags=REC | PRIVATE)
    pid = os.fork()
    if pid == 0:
        _libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
        become(told)
    print(pid, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(told):
    sys.stdin.readline()  # the network is connected now
    socket.sethostname(told["hostname"])
    root = make_root(told["folder"], told["reachable"])
    make_devices(root + "/dev", told["termination_log"])
    mount("/sys", root + "/sys", flags=BIND | REC)
    mount("proc", root + "/proc", "proc")
    for source, target, readonly in told["binds"]:
        bind(source, root + target, readonly)
    for target, data in told["memory"]:
        os.makedirs(root + target, exist_ok=True)
        mount("tmpfs", root + target, "tmpfs", NOSUID, data)
    mount("none", root, flags=BIND | REMOUNT | RDONLY)
    os.chroot(root)
    os.chdir("/")
    os.execvpe("setpriv", [*told["setpriv"], "--", *told["argv"]], told["env"])


main()
