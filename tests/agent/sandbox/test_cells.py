"""A session behaves like a notebook."""

import io
import threading
import tracemalloc

import numpy
import PIL.Image
import pytest

from tests.agent.sandbox.conftest import odd_images
from vrl.agent.sandbox.local import LocalRunner, LocalSession
from vrl.agent.sandbox.types import CellResult
from vrl.agent.tools.pictures import open_picture


@pytest.fixture
def session(runner: LocalRunner):
    made = runner.session()
    yield made
    made.close()


def opened(data: bytes) -> PIL.Image.Image:
    image = PIL.Image.open(io.BytesIO(data), formats=("PNG",))
    image.load()
    return image


def encoded(image: PIL.Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def well(result: CellResult) -> str:
    assert result.error is None, result.error
    assert not result.lost
    return result.output


def test_variables_live_and_the_last_expression_is_shown(session: LocalSession):
    assert well(session.run("def f(x):\n    return x + 1\na = f(1)")) == ""
    assert well(session.run("print('first'); f(a)")) == "first\n3\n"
    assert well(session.run("_ * 2")) == "6\n"
    assert well(session.run("None")) == ""
    assert well(session.run("")) == ""
    assert well(session.run("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A")) == "True\n"
    assert well(session.run("import numpy as np\nnp.arange(3)")) == "array([0, 1, 2])\n"


def test_output_comes_in_order_from_all_that_writes(session: LocalSession):
    code = """
import os, subprocess, sys
print("one")
print("two", file=sys.stderr)
os.write(1, b"three\\n")
subprocess.run([sys.executable, "-S", "-c", "print('four')"])
sys.stdout.write("five")
sys.stdout.flush()
os.write(2, b"\\xff\\n")
print("\\ud800")
"""
    assert well(session.run(code)) == "one\ntwo\nthree\nfour\nfive�\n\\ud800\n"


def test_a_traceback_shows_the_lines_of_the_cell_only(session: LocalSession):
    session.run("def divide(a):\n    return a / 0")
    result = session.run("import statistics\nprint('before')\nstatistics.mean(divide(x) for x in [1])")
    assert result.output == "before\n"
    assert result.error is not None
    lines = result.error.splitlines()
    assert lines[0] == '  File "<cell 2>", line 3, in <module>'
    assert any(line.startswith('  File "<cell 1>", line 2') for line in lines)
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "statistics.py" not in result.error
    assert "guest" not in result.error
    wrong = session.run("a = (1,")
    assert wrong.error is not None
    assert wrong.error.endswith("SyntaxError: '(' was never closed")


def test_long_output_is_cut_at_a_character_and_says_so(session: LocalSession):
    output = well(session.run("print('é' * 5000)"))
    assert output.startswith("é" * 2000 + "\n[the output was cut")
    assert "10001 bytes" in output
    assert len(well(session.run("list(range(10**5))"))) < 2200


@pytest.mark.parametrize(
    ("code", "error"), [("exit()", None), ("import sys; sys.exit(0)", None), ("import sys; sys.exit('bad')", "bad")]
)
def test_exit_ends_a_cell_not_the_session(session: LocalSession, code: str, error: str | None):
    session.run("kept = 1")
    result = session.run(code)
    assert (result.error is None) if error is None else (result.error or "").endswith(f"SystemExit: {error}")
    assert well(session.run("kept")) == "1\n"
    assert (session.run("input()").error or "").endswith("EOFError: EOF when reading a line")


def test_an_endless_cell_is_interrupted_and_variables_stay(session: LocalSession):
    session.run("n = 0")
    result = session.run("print('on')\nwhile True:\n    n += 1")
    assert result.output == "on\n"
    assert result.error is not None
    assert result.error.endswith("TimeoutError: the cell was interrupted after 1 s; variables are kept")
    assert not result.lost
    assert well(session.run("n > 1000")) == "True\n"


def test_after_a_lost_interpreter_the_next_cell_has_a_new_one(runner: LocalRunner):
    session = runner.session([encoded(PIL.Image.new("RGB", (3, 2), "red"))])
    session.run("kept = 1")
    result = session.run("print('last words', flush=True)\nimport os\nos._exit(3)")
    assert result.lost
    assert result.output == "last words\n"
    assert "variables are lost" in (result.error or "")
    assert "NameError" in (session.run("kept").error or "")
    assert well(session.run("image_1.size")) == "(3, 2)\n"
    session.close()


def test_images_of_the_prompt_are_files_and_variables(runner: LocalRunner):
    red = PIL.Image.new("RGB", (30, 20), (200, 0, 0))
    session = runner.session([encoded(red), encoded(red.resize((8, 8)), "JPEG")])
    assert (
        well(session.run("image_1.size, image_2.size, image_1.getpixel((0, 0))")) == "((30, 20), (8, 8), (200, 0, 0))\n"
    )
    code = "import os\nfrom PIL import Image\nsorted(os.listdir()), Image.open('image_2.png').format"
    result = session.run(code)
    assert well(result) == "(['image_1.png', 'image_2.png'], 'PNG')\n"
    assert result.images == ()
    shown = session.run("image_1.crop((0, 0, 10, 10))").images
    assert [opened(image).size for image in shown] == [(10, 10)]
    session.close()


def test_what_is_shown_or_saved_comes_back_once(session: LocalSession):
    code = """
import matplotlib.pyplot as plt
plt.figure(figsize=(2, 1)); plt.plot([1, 2]); plt.savefig("a.png"); plt.show()
plt.figure(figsize=(1, 2)); plt.plot([2, 1])
"""
    result = session.run(code)
    well(result)
    assert [opened(image).size for image in result.images] == [(200, 100), (100, 200)]
    assert numpy.asarray(opened(result.images[0])).std() > 1  # a line on white
    assert well(session.run("plt.get_fignums()")) == "[]\n"
    blue = session.run(
        "from PIL import Image\nb = Image.new('RGBA', (5, 4), (0, 0, 255, 0))\nb.show()\nb.save('b.webp')\nb"
    )
    assert [opened(image).getpixel((0, 0)) for image in blue.images] == [(255, 255, 255)]  # transparent on white
    assert session.run("1").images == ()


@pytest.mark.parametrize("settings", ["dpi=50", "bbox_inches='tight'", "dpi=200, format='png'"])
def test_a_figure_that_is_saved_and_shown_is_one_picture(session: LocalSession, settings: str):
    start = "import matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1)); plt.plot([1, 2])\n"
    shown = session.run(f"{start}plt.savefig('a.png', {settings})\nplt.show()")
    well(shown)
    assert len(shown.images) == 1
    assert len(session.run(f"{start}plt.savefig('a.png', {settings})").images) == 1
    changed = session.run(f"{start}plt.savefig('a.png', {settings})\nplt.plot([3, 1])\nplt.show()")
    assert len(changed.images) == 2
    two = session.run(f"{start}plt.savefig('a.png', dpi=50)\nplt.figure(figsize=(1, 2))\nplt.savefig('a.png', dpi=50)")
    assert [opened(image).size for image in two.images] == [(200, 100), (50, 100)]  # the second took the file


def test_images_in_folders_and_of_failed_cells_come_back(session: LocalSession):
    code = """
import os
from PIL import Image
os.makedirs("out/deep"); os.makedirs(".cache")
Image.new("RGB", (7, 7)).save("out/deep/a.png"); Image.new("RGB", (6, 6)).save(".cache/b.png")
"""
    assert [opened(image).size for image in session.run(code).images] == [(7, 7)]
    failed = session.run("Image.new('RGB', (5, 5)).save('c.png')\n1 / 0")
    assert (failed.error or "").endswith("ZeroDivisionError: division by zero")
    assert [opened(image).size for image in failed.images] == [(5, 5)]
    assert [opened(i).size for i in session.run("Image.new('L', (4, 4)).save('d.png')\nexit()").images] == [(4, 4)]


def test_images_of_the_prompt_are_what_the_model_sees(runner: LocalRunner):
    images = odd_images()
    session = runner.session(images)
    for number, data in enumerate(images, 1):
        assert opened(session.run(f"image_{number}").images[0]).tobytes() == open_picture(data).tobytes()
        assert well(session.run(f"image_{number}.mode, image_{number}.size")) == f"('RGB', {open_picture(data).size})\n"
    session.close()


def test_images_are_limited_in_number_and_size(session: LocalSession):
    code = "from PIL import Image\nfor n in range(9):\n    Image.new('L', (3000, 2000), n).show()"
    result = session.run(code)
    assert [opened(image).size for image in result.images] == [(1254, 836)] * 4
    assert result.output == "[5 more images are not shown; a cell may show 4]\n"
    long = session.run("Image.new('L', (5_000_000, 1)).show()")
    assert opened(long.images[0]).size[0] <= 1 << 20


def test_sessions_do_not_see_one_another(runner: LocalRunner):
    one, two = runner.session(), runner.session()
    one.run("import os\nsecret = 1\nopen('/tmp/note', 'w').write('x')\nopen('/dev/shm/note', 'w').write('x')")
    one.run("import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0note')\ns.listen()")
    assert "NameError" in (two.run("secret").error or "")
    assert well(two.run("import os\nos.listdir('/tmp'), os.listdir('/dev/shm'), os.getpid()")) == "([], [], 1)\n"
    assert "ConnectionRefused" in (
        two.run("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0note')").error or ""
    )
    one.close()
    two.close()


def test_cells_of_several_threads_run_side_by_side(runner: LocalRunner):
    outputs: dict[int, str] = {}

    def episode(number: int) -> None:
        session = runner.session()
        session.run(f"import time\nx = {number}\ntime.sleep(0.3)")
        outputs[number] = session.run("x").output
        session.close()

    threads = [threading.Thread(target=episode, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {number: f"{number}\n" for number in range(6)}


def test_closing_ends_a_cell_that_runs(runner: LocalRunner):
    session = runner.session()
    session.run("1")
    results: list[CellResult] = []
    thread = threading.Thread(target=lambda: results.append(session.run("import time\ntime.sleep(30)")))
    thread.start()
    while not session.busy:
        pass
    session.close()
    thread.join(timeout=5)
    assert results[0].lost


def test_a_cell_of_absurd_length_is_refused(session: LocalSession):
    assert "200000 characters" in (session.run("#" * 200_001).error or "")
    assert "source code string cannot contain null bytes" in (session.run("a\0b").error or "")
    assert "surrogates not allowed" in (session.run("'\ud800'").error or "")


def test_a_flood_does_not_grow_this_process(session: LocalSession):
    tracemalloc.start()
    try:
        result = session.run("import os\nwhile True: os.write(1, bytes(1 << 20))")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "printed far too much" in (result.error or "") or "TimeoutError" in (result.error or "")
    assert peak < 4 << 20
