"""Programs that try to get out, to stay, or to take everything, each with what has to come of it.

`$PORT`, `$SECRET`, `$PARENT` and `$TRACE` stand for a port somebody listens on, a file of this user, the process that
holds the runner, and a file that must not come into being.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attack:
    """`wanted` is searched in the error and the output of the cell; `lost` says whether the interpreter has to go.

    An attack that is `slow` may also run into the time limit, on a machine with other work to do.
    """

    name: str
    code: str
    wanted: str
    lost: bool = False
    slow: bool = False


GONE = "No such file or directory"
REFUSED = "Operation not permitted"
SYSTEM_CALL = """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
number = %s
libc.syscall.restype = ctypes.c_long
result = libc.syscall(number[platform.machine() == 'aarch64'], *%s)
result, os.strerror(ctypes.get_errno())
"""


def system_call(numbers: tuple[int, int], *arguments: int) -> str:
    return SYSTEM_CALL % (numbers, arguments)


CHANNEL = """
import json, os, socket, stat, struct
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
channel = socket.socket(fileno=next(fd for fd in range(3, 128) if is_socket(fd)))
def frame(header, blobs=b''):
    data = json.dumps(header).encode()
    return struct.pack('<II', len(data), len(blobs)) + data + blobs
"""

OPEN = """
import os, stat
def kind(fd):
    mode = os.fstat(fd).st_mode
    names = ((stat.S_ISSOCK, 'channel'), (stat.S_ISFIFO, 'output'), (stat.S_ISCHR, 'null'))
    return next((name for test, name in names if test(mode)), '?')
found = []
for fd in range(128):
    try:
        found.append(kind(fd))
    except OSError:
        pass
sorted(found)
"""

FILES = (
    Attack("passwords", "open('/etc/passwd').read()", GONE),
    Attack("a file of this user", "open('$SECRET').read()", GONE),
    Attack("climbing", "open('../../../../../../$SECRET').read()", GONE),
    Attack(
        "home",
        "import os\n[p for p in ('/root', '/home', '/work', '/etc', '/usr', '/var') if os.path.exists(p)]",
        r"^\[\]",
    ),
    Attack("environment", "import os\nstr(os.environ).find('hunter2')", "^-1$"),
    Attack("environment of process 1", "open('/proc/1/environ').read()", GONE),
    Attack("own memory map", "open('/proc/self/mem', 'rb').read(1)", GONE),
    Attack("root of a process", "import os\nos.listdir('/proc/self/root/')", GONE),
    Attack("kernel settings", "open('/proc/sys/kernel/core_pattern', 'w')", GONE),
    Attack("link to a secret", "import os\nos.symlink('$SECRET', 'a.png')\nopen('a.png').read()", GONE),
    Attack("hard link", "import os\nos.link('/python/bin/python3', 'x')", "OSError|PermissionError"),
    Attack(
        "devices", "import os\nsorted(os.listdir('/dev'))", r"^\['full', 'null', 'random', 'shm', 'urandom', 'zero'\]"
    ),
    Attack("raw memory", "open('/dev/mem', 'rb')", GONE),
    Attack("terminal", "open('/dev/tty', 'w').write('rm -rf')", "Read-only file system"),
    Attack("new device", "import os\nos.mknod('disk', 0o600 | 0o060000, os.makedev(8, 0))", REFUSED),
    Attack("other packages", "import torch", "No module named 'torch'"),
    Attack("engine", "import vllm", "No module named 'vllm'"),
    Attack("cluster", "import ray", "No module named 'ray'"),
    Attack("our own sources", "import vrl.protocol.errors", "No module named 'vrl'"),
    Attack(
        "writing anywhere else",
        "import os\nfailed = 0\nfor p in ('/x', '/dev/x', '/lib/x', '/packages/x', '/program/x', '/proc/x', \n"
        "          '/python/x', '/packages/numpy/__init__.py', '/python/lib/x',\n"
        "          '/program/vrl/agent/sandbox/guest/cells.py'):\n"
        "    try: open(p, 'a')\n    except OSError: failed += 1\nfailed",
        "^10$",
    ),
    Attack(
        "deleting the packages", "import shutil\nshutil.rmtree('/packages')", "Read-only file system|Permission denied"
    ),
    Attack("changing rights", "import os\nos.chmod('/packages/numpy', 0o777)", f"Read-only file system|{REFUSED}"),
    Attack("disk", "for n in range(64):\n    open(f'f{n}', 'wb').write(bytes(1 << 20))", "No space left", slow=True),
    Attack("one huge file", "open('f', 'wb').write(bytes(64 << 20))", "File too large", slow=True),
    Attack("holes", "open('f', 'wb').truncate(1 << 40)", "File too large"),
    Attack(
        "shared memory",
        "for n in range(64):\n    open(f'/dev/shm/f{n}', 'wb').write(bytes(1 << 20))",
        "No space left",
        slow=True,
    ),
    Attack("many files", "for n in range(10**6):\n    open(str(n), 'w').close()", "No space left", slow=True),
    Attack("memory that is a file", "import os\nos.memfd_create('x')", REFUSED),
    Attack(
        "program on the disk",
        "import os\nopen('x', 'w').write('#!/python/bin/python3')\nos.chmod('x', 0o4755)\nos.execv('/tmp/x', ['x'])",
        "Permission denied",
    ),
    Attack(
        "library on the disk",
        "import ctypes, shutil\nshutil.copy('/lib/libz.so.1', 'x.so')\nctypes.CDLL('/tmp/x.so')",
        "failed to map|not permitted",
    ),
    Attack("what is open", OPEN, r"^\['channel', 'null', 'null', 'output', 'output', 'output'\]$"),
    Attack("descriptors", "f = [open('/dev/null') for _ in range(10**4)]", "Too many open files", slow=True),
)
NETWORK = (
    Attack("port of this machine", "import socket\nsocket.create_connection(('127.0.0.1', $PORT), 0.2)", REFUSED),
    Attack("http", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:$PORT/', timeout=0.2)", REFUSED),
    Attack("names", "import socket\nsocket.getaddrinfo('example.com', 80)", "gaierror|not permitted"),
    Attack("server", "import socket\nsocket.create_server(('', 8265))", REFUSED),
    Attack(
        "datagrams",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('8.8.8.8', 53))",
        REFUSED,
    ),
    Attack("kernel's own", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", REFUSED),
    Attack(
        "socket of the desktop", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0vrl-test-$PORT')", "refused"
    ),
)
PROCESSES = (
    Attack("killing the parent", "import os\nos.kill(os.getppid(), 9)\nos.getppid()", "^0$"),
    Attack("killing the runner", "import os\nos.kill($PARENT, 9)", "No such process"),
    Attack("killing all", "import os\nos.kill(-1, 9)", "No such process|^$"),
    Attack("fork bomb", "import os\nwhile True:\n    os.fork()", "temporarily unavailable", slow=True),
    Attack(
        "children that stay",
        "import os, signal, time\nfor n in range(8):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        for s in range(1, 32):\n            if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
        "        time.sleep(99)\n'left'",
        "^'left'$",
        slow=True,
    ),
    Attack(
        "threads",
        "import threading, time\nfor n in range(999):\n    threading.Thread(target=time.sleep, args=(99,), "
        "daemon=True).start()",
        "can't start new thread",
        slow=True,
    ),
    Attack("shell", "import os\nos.system('cat /etc/passwd')", "^32512$"),
    Attack("trace", system_call((101, 117), 0, 0, 0, 0), f"-1, '{REFUSED}'"),
    Attack("memory of another", system_call((310, 270), 1, 0, 0, 0, 0, 0), f"-1, '{REFUSED}'"),
    Attack("mounting", system_call((165, 40), 0, 0, 0, 0, 0), f"-1, '{REFUSED}'"),
    Attack("unmounting", system_call((166, 39), 0, 0), f"-1, '{REFUSED}'"),
    Attack("new user namespace", system_call((272, 97), 0x10000000), f"-1, '{REFUSED}'"),
    Attack("cloned namespace", system_call((56, 220), 0x10000011, 0, 0, 0, 0), f"-1, '{REFUSED}'"),
    Attack("clone3", system_call((435, 435), 0, 0), "-1, 'Function not implemented'"),
    Attack("another's namespace", system_call((308, 268), 0, 0), f"-1, '{REFUSED}'"),
    Attack("new root", "import os\nos.chroot('/tmp')", REFUSED),
    Attack("kernel program", system_call((321, 280), 0, 0, 0), f"-1, '{REFUSED}'"),
    Attack("ring", system_call((425, 425), 1, 0), f"-1, '{REFUSED}'"),
    Attack("keys", system_call((250, 219), 0, 0, 0, 0, 0), f"-1, '{REFUSED}'"),
    Attack("System V memory", system_call((29, 194), 1, 1 << 30, 0o1600), f"-1, '{REFUSED}'"),
    Attack("becoming root", "import os\nos.setuid(0)", "Invalid argument"),
    Attack(
        "raising a limit",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "not allowed to raise|not permitted",
    ),
    Attack("going first", "import os\nos.nice(-5)", REFUSED),
)
ENDLESS = (
    Attack("endless", "while True: pass", "TimeoutError.*variables are kept", slow=True),
    Attack("sleeping", "import time\ntime.sleep(10**6)", "TimeoutError.*variables are kept", slow=True),
    Attack(
        "refusing to end",
        "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
        "TimeoutError.*lost",
        lost=True,
    ),
    Attack(
        "deaf to signals",
        "import signal\nfor s in range(1, 32):\n    if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        "TimeoutError.*lost",
        lost=True,
    ),
    Attack("endless in C", "sum(range(10**13))", "TimeoutError.*lost", lost=True),
    Attack("backtracking", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')", "TimeoutError", slow=True),
    Attack(
        "text without end",
        "class E:\n    def __repr__(self):\n        while True: pass\nE()",
        "TimeoutError",
        slow=True,
    ),
)
MEMORY = (
    Attack("memory", "a = bytearray(1 << 40)", "MemoryError", slow=True),
    Attack("memory bit by bit", "a = []\nwhile True: a.append(bytearray(1 << 23))", "MemoryError", slow=True),
    Attack(
        "memory of many processes",
        "import os, time\nfor n in range(10):\n    if os.fork() == 0:\n        a = b'x' * (64 << 20)\n"
        "        time.sleep(9)\ntime.sleep(9)",
        "MemoryError.*lost",
        lost=True,
        slow=True,
    ),
    Attack(
        "shared memory of many processes",
        "import mmap, os, time\nfor n in range(9):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 96 << 20)\n"
        "        m[::4096] = bytes(96 << 8)\n        time.sleep(9)\ntime.sleep(0.4)",
        "MemoryError.*lost",
        lost=True,
        slow=True,
    ),
    Attack("recursion", "def f(): f()\nf()", "RecursionError", slow=True),
    Attack("parentheses", "(" * 5000, "too many nested parentheses|MemoryError"),
    Attack("flood of lines", "while True: print('y' * 40000)", "printed far too much", lost=True, slow=True),
    Attack(
        "flood of bytes",
        "import os\nwhile True: os.write(1, bytes(1 << 20))",
        "printed far too much",
        lost=True,
        slow=True,
    ),
    Attack("null pointer", "import ctypes\nctypes.string_at(0)", "ended before the cell did", lost=True),
    Attack("abort", "import os\nos.abort()", "ended before the cell did", lost=True),
    Attack("exit at once", "import os\nos._exit(0)", "ended before the cell did", lost=True),
    Attack("text with a trap", "class E(Exception):\n    def __str__(self): raise SystemExit(5)\nraise E", "E"),
)
CHANNELS = (
    Attack("closing everything", "import os\nos.closerange(0, 128)", "no proper answer|ended before", lost=True),
    Attack(
        "pickle in place of an answer",
        CHANNEL + "import pickle\nclass P:\n    def __reduce__(self):\n"
        "        return (open, ('$TRACE', 'w'))\nchannel.sendall(pickle.dumps(P()) * 50)",
        "no proper answer",
        lost=True,
    ),
    Attack(
        "endless answer",
        CHANNEL + "channel.sendall(struct.pack('<II', 2**32 - 1, 2**32 - 1))",
        "no proper answer",
        lost=True,
    ),
    Attack(
        "no JSON", CHANNEL + "channel.sendall(struct.pack('<II', 4, 0) + b'\\xff[[[')", "no proper answer", lost=True
    ),
    Attack(
        "nested JSON",
        CHANNEL + "channel.sendall(struct.pack('<II', 9000, 0) + b'[' * 9000)",
        "no proper answer",
        lost=True,
    ),
    Attack(
        "huge image",
        CHANNEL + "for i in range(9):\n    channel.sendall(frame({'id': i, 'error': None, 'sizes': [[10**6, 10**6]],"
        " 'blobs': [3]}, b'abc'))",
        "no proper answer",
        lost=True,
    ),
    Attack(
        "answer without end",
        CHANNEL + "channel.sendall(struct.pack('<II', 100, 0))\nwhile True: pass",
        "no proper answer",
        lost=True,
        slow=True,
    ),
    Attack(
        "breaking our modules", "import sys, builtins\nsys.modules.clear()\nbuiltins.__dict__.clear()", "", lost=True
    ),
)
IMAGES = (
    Attack(
        "huge figure",
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(500, 500)); plt.show()",
        "MemoryError|ValueError|Timeout",
        slow=True,
    ),
    Attack(
        "bomb in a file",
        "import struct, zlib\nh = struct.pack('>IIBBBBB', 60000, 60000, 8, 0, 0, 0, 0)\n"
        "c = lambda k, d: struct.pack('>I', len(d)) + k + d + struct.pack('>I', zlib.crc32(k + d))\n"
        "parts = c(b'IHDR', h) + c(b'IDAT', zlib.compress(bytes(1 << 20))) + c(b'IEND', b'')\n"
        "open('a.png', 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + parts)",
        "^[0-9]+$",
    ),
    Attack("no image", "open('a.png', 'w').write('no')", "^2$"),
    Attack(
        "thousand images",
        "from PIL import Image\nfor n in range(1000): Image.new('L', (9, 9), n % 256).show()",
        "996 more images",
        slow=True,
    ),
)
ATTACKS = (*FILES, *NETWORK, *PROCESSES, *ENDLESS, *MEMORY, *CHANNELS, *IMAGES)
