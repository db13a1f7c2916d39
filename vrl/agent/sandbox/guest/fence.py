"""The inner fence of one interpreter: namespaces, private folders, limits, no capabilities, a system call filter.

bubblewrap has already made the outer one. `separate` and `close_in` run before any code of a cell, in this order:

    zygote --fork--> separate() --fork--> process 1 of its own namespaces: close_in() --> cells

Everything here is one-way: the process cannot take any of it back.
"""

import ctypes
import os
import platform
import resource
import signal
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)

_CLONE = {"NEWNS": 0x20000, "NEWCGROUP": 0x2000000, "NEWUTS": 0x4000000, "NEWIPC": 0x8000000}
_CLONE |= {"NEWUSER": 0x10000000, "NEWPID": 0x20000000, "NEWNET": 0x40000000}
_NEW_NAMESPACES = sum(_CLONE.values())
_CLONE_THREAD = 0x10000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAP_AMBIENT = (
    1,
    4,
    24,
    38,
    22,
    47,
)
_PR_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER, _CAPABILITY_VERSION = 4, 2, 0x20080522
_EPERM, _ENOSYS = 1, 38
_AF_UNIX = 1

# System calls that no program of numpy, PIL and matplotlib needs: (number on x86-64, on arm64), -1 where there is none.
# They reach into other processes, mount, make namespaces, load code into the kernel, set clocks, or hold memory that is
# counted for no process (memfd, System V memory, message queues, keys).
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "modify_ldt": (154, -1),
    "lookup_dcookie": (212, 18),
}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, name in the audit interface
_CLONE_NUMBERS, _CLONE3, _SOCKET_NUMBERS = (56, 220), 435, (41, 198)
_FORKS = ((57, 58), ())  # fork and vfork, where they exist
_X32_BIT = 0x40000000


def become(user: int) -> None:
    """Turn from root into an ordinary user: the kernel counts no processes of root. Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _check(_LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")  # else /proc/self still belongs to root


def separate() -> None:
    """Leave the namespaces of the zygote; the next fork is process 1 of the new ones. Raises OSError."""
    user, group = os.getuid(), os.getgid()
    _check(_LIBC.unshare(_NEW_NAMESPACES), "unshare")
    for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def hide_files(folder_mib: int) -> None:
    """Give this process its own empty /tmp and /dev/shm of `folder_mib` and 16 MiB, and no /proc. Raises OSError."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("/tmp", flags, f"size={folder_mib}m,nr_inodes=8192,mode=700")
    _mount("/dev/shm", flags, "size=16m,nr_inodes=256,mode=700")
    _mount("/proc", flags | _MS_RDONLY, "size=4k,nr_inodes=2,mode=555")


def die_with_parent() -> None:
    """Ask the kernel to end this process with the one that forked it."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent death signal")


def limit(memory_mib: int, file_mib: int, cpu_seconds: int, processes: int | None) -> None:
    """Set the limits of one process and its children. Memory counts from what the process has mapped now.

    `processes` counts processes and threads of the user in this user namespace; outside one of its own there is none.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    values = {
        resource.RLIMIT_AS: mapped + (memory_mib << 20),
        resource.RLIMIT_FSIZE: file_mib << 20,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 128,
    }
    if processes is not None:
        values[resource.RLIMIT_NPROC] = processes
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def drop_privileges() -> None:
    """Give up all capabilities, also those a program could gain by being executed. Raises OSError."""
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    capability = 0
    while _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = struct.pack("=II", _CAPABILITY_VERSION, 0)
    _check(_LIBC.capset(header, struct.pack("=6I", *[0] * 6)), "capset")


def filter_system_calls(allow_processes: bool) -> None:
    """Refuse what no cell needs, with EPERM; without `allow_processes` only threads can be made. Raises OSError."""
    program = _filter_program(allow_processes)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    _check(_LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, head, 0, 0), "seccomp")


def supports_this_machine() -> bool:
    """Return whether the filter knows the processor."""
    return platform.machine() in _MACHINES


def _filter_program(allow_processes: bool) -> bytes:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, low half of the first argument at 16."""
    column, audit_name = _MACHINES[platform.machine()]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, allow, refuse = 0x80000000, 0x7FFF0000, 0x00050000
    code = [(load, 0, 0, 4), (equal, 1, 0, audit_name), (give, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, _X32_BIT), (give, 0, 0, kill)]
    denied = [numbers[column] for numbers in _DENIED.values() if numbers[column] >= 0]
    for number in denied + ([] if allow_processes else list(_FORKS[column])):
        code += [(equal, 0, 1, number), (give, 0, 0, refuse | _EPERM)]
    # Flags of clone3 lie in memory, out of a filter's reach: the C library falls back to clone.
    code += [(equal, 0, 1, _CLONE3), (give, 0, 0, refuse | _ENOSYS)]
    code += [(equal, 0, 4, _CLONE_NUMBERS[column]), (load, 0, 0, 16)]
    if allow_processes:
        code += [(any_bit, 0, 1, _NEW_NAMESPACES), (give, 0, 0, refuse | _EPERM), (give, 0, 0, allow)]
    else:
        code += [(any_bit, 1, 0, _CLONE_THREAD), (give, 0, 0, refuse | _EPERM), (give, 0, 0, allow)]
    code += [(equal, 0, 3, _SOCKET_NUMBERS[column]), (load, 0, 0, 16)]
    code += [(equal, 1, 0, _AF_UNIX), (give, 0, 0, refuse | _EPERM), (give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _mount(folder: str, flags: int, options: str) -> None:
    _check(_LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options.encode()), f"mount {folder}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
