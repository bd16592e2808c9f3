"""Confinement of a program: run by ``code_sandbox`` as a script, in an interpreter of its own.

    python -I -S -B sandbox_guard.py PROGRAM FD PARENT SECONDS MEGABYTES   (standard input: a nonce)

What seccomp does not allow is answered by "operation not permitted"; Landlock opens to read what
the interpreter, the standard library and the program are made of. The program then runs here, as
``__main__``; the nonce on FD says that it came to its end, a line with the exception's name that it
did not. Nothing but the standard library is imported: no site-packages, no package of ours.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import runpy
import signal
import struct
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Final, NoReturn

# x86-64 numbers of what an interpreter needs to read modules, compute, print and end.
_ALLOWED: Final = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
    "rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20, "access": 21, "select": 23,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "nanosleep": 35, "getitimer": 36,
    "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "uname": 63, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
    "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270,
    "ppoll": 271, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
_OPENING: Final = {2: 1, 257: 2}  # open and openat: number and the place of their flags
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0x400000
_FCNTL: Final = 72  # others of its commands have signals sent to any process, or lock files
_FCNTL_COMMANDS: Final = (  # copy a descriptor, read its flags, close it on exec
    fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD_CLOEXEC,
)  # fmt: skip
_ARCHITECTURE: Final = 0xC000003E  # AUDIT_ARCH_X86_64
_KILL, _ALLOW, _REFUSE = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # operations of the kernel's filter
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2  # of prctl
_MAKE_RULES, _ADD_RULE, _RESTRICT = 444, 445, 446  # system calls of Landlock
_BENEATH_PATH: Final = 1  # kind of a rule
_FILE_RIGHTS: Final = (1 << 13) - 1  # all that the first version of Landlock knows
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
# Beside the library's own folders: what its extension modules are linked with, and time zones.
_SYSTEM_PATHS: Final = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache",
    "/usr/share/zoneinfo", "/etc/localtime",
)  # fmt: skip
_PARENT_DEATH_SIGNAL: Final = 1  # of prctl


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def limit(seconds: int, megabytes: int) -> None:
    """Bound the process's CPU time, memory, files, processes and core dumps."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a signal, then the end
    for kind, most in (
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def end_with(parent: int) -> None:
    """Have the kernel end this process as soon as its parent has ended, killed or not."""
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel sends no signal at the parent's end")
    if os.getppid() != parent:
        raise OSError(errno.ESRCH, "the parent has ended")


def read_only_beneath(paths: Iterable[str]) -> None:
    """Give up every file that is none of these, nor beneath one; for good."""
    kernel = ctypes.CDLL(None, use_errno=True)
    rights = ctypes.c_uint64(_FILE_RIGHTS)
    rules = kernel.syscall(_MAKE_RULES, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    done = rules >= 0 and not kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for path in filter(os.path.exists, paths) if done else ():
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | (_READ_FOLDER if os.path.isdir(path) else 0)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, place), 12)
        done = done and not kernel.syscall(_ADD_RULE, rules, _BENEATH_PATH, rule, 0)
        os.close(place)
    if not done or kernel.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "the kernel has no Landlock (Linux 5.13 or later)")
    os.close(rules)


def confine() -> None:
    """Give up every system call but the allowed ones, for good."""
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, 0)]
    for number, place in _OPENING.items():  # a file may be opened to read
        steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * place)]
        steps += [(_ANY_BIT, 0, 1, _WRITING), (_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 2 + 2 * len(_FCNTL_COMMANDS), _FCNTL), (_LOAD, 0, 0, 16 + 8 * 1)]
    for command in _FCNTL_COMMANDS:
        steps += [(_EQUAL, 0, 1, command), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_RETURN, 0, 0, _REFUSE)]
    for number in _ALLOWED.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_RETURN, 0, 0, _REFUSE)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Filter(len(steps), ctypes.addressof(buffer))
    kernel = ctypes.CDLL(None, use_errno=True)
    if kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or kernel.prctl(
        _SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def end(report: int, word: str) -> NoReturn:
    """Report a word and end: the program's own handlers of the end have nothing to say any more."""
    os.write(report, word.encode()[:100])
    os._exit(0)


def main() -> None:
    """Confine this process, then run the program."""
    program, report, parent, seconds, megabytes = sys.argv[1], *map(int, sys.argv[2:])
    nonce = sys.stdin.readline().strip()
    sys.argv = [program]
    try:
        end_with(parent)
        limit(seconds, megabytes)
        library = (*sys.path, os.path.join(sys.base_prefix, "lib"))
        read_only_beneath([os.path.dirname(program), *library, *_SYSTEM_PATHS])
        confine()
    except (OSError, ValueError) as error:
        os.write(report, f"unconfined {error}".encode())
        return
    os.write(report, b"confined ")
    with ExitStack() as ending:  # it meets whatever the program raises, its exit too
        ending.push(lambda kind, *_: end(report, nonce if kind is None else kind.__name__))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
