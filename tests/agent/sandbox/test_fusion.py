"""The client of a Sandbox Fusion server, against a server that runs code."""

import io
import time
from itertools import pairwise

import PIL.Image
import pytest

from tests.agent.broken_server import BROKEN, broken_server
from tests.agent.sandbox.conftest import odd_images
from tests.agent.sandbox.fusion_server import LATE_SECONDS, FusionServer, serving
from vrl.agent.sandbox.fusion import FusionRunner
from vrl.agent.sandbox.runner import probe
from vrl.agent.tools.pictures import open_picture
from vrl.protocol.config.sandbox import SandboxConfig
from vrl.protocol.errors import SandboxError


def config_of(server: FusionServer, rate: float = 1000.0) -> SandboxConfig:
    return SandboxConfig(
        kind="remote", url=server.url, rate=rate, cell_seconds=1.0, output_chars=1000, images=2, image_pixels=10_000
    )


def runner_of(server: FusionServer, rate: float = 1000.0) -> FusionRunner:
    return FusionRunner(config_of(server, rate), first_pause_seconds=0.01)


def test_a_session_keeps_its_variables_over_failed_cells():
    with serving() as server:
        session = runner_of(server).session()
        assert session.run("a = 1\nprint('hi')\na + 1").output == "hi\n2\n"
        failed = session.run("text = '''\n    kept'''\n1 / 0")
        assert failed.error == "ZeroDivisionError: division by zero"
        assert not failed.lost
        assert session.run("a, text").output == "(1, '\\n    kept')\n"
        late = session.run("while True: pass")
        assert late.error == "TimeoutError: the cell ran over 1 s; variables are as before it"
        assert session.run("a").output == "1\n"
        cut = session.run("print('x' * 5000)")
        assert cut.output.startswith("x" * 1000 + "\n[the output was cut")
        body = server.requests[-1][2]
        assert len(body["cells"]) == 5
        assert body["cell_timeout"] == 1.0
        assert body["memory_limit_MB"] == 512


def test_images_go_there_and_come_back_within_their_limits():
    jpeg = io.BytesIO()
    PIL.Image.new("RGB", (40, 30), "red").save(jpeg, "JPEG")
    with serving() as server:
        session = runner_of(server).session([jpeg.getvalue()])
        result = session.run("image_1.resize((400, 300))")
        assert result.error is None
        (image,) = (PIL.Image.open(io.BytesIO(data)) for data in result.images)
        assert image.format == "PNG"
        assert image.size == (115, 86)
        with pytest.raises(SandboxError, match="image of a prompt"):
            runner_of(server).session([b"no image"])


def test_images_go_there_as_the_model_sees_them():
    images = odd_images()
    with serving() as server:
        session = runner_of(server).session(images)
        for number, data in enumerate(images, 1):
            (back,) = session.run(f"image_{number}").images
            assert PIL.Image.open(io.BytesIO(back)).convert("RGB").tobytes() == open_picture(data).tobytes()


def test_a_whole_program_gets_its_input():
    with serving() as server:
        runner = runner_of(server)
        assert runner.run_program("print(int(input()) * 2)", "21\n").output == "42\n"
        failed = runner.run_program("raise SystemExit(3)")
        assert failed.error == "the program ended with exit code 3: "
        noisy = runner.run_program("import sys\nprint('out')\nprint('log', file=sys.stderr)\n1 / 0")
        assert noisy.output == "out\n"
        assert noisy.error == "the program ended with exit code 1: ZeroDivisionError: division by zero"
        assert runner.run_program("while True: pass").error == "TimeoutError: the program ran over 1 s"


def test_a_server_in_trouble_is_asked_again_with_growing_pauses():
    with serving(503, "cut", "sandbox") as server:
        assert runner_of(server).session().run("1 + 1").output == "2\n"
        times = [when for when, _, _ in server.requests]
        pauses = [after - before for before, after in pairwise(times)]
        assert len(pauses) == 3
        assert all(pause >= least for pause, least in zip(pauses, (0.01, 0.02, 0.04), strict=True))


@pytest.mark.parametrize(
    ("failures", "said", "tries"),
    [((504,) * 9, "HTTP status 504", 4), ((400,), "HTTP status 400", 1), (("sandbox",) * 9, "no pod is free", 4)],
)
def test_a_server_that_stays_in_trouble_is_no_fault_of_the_code(failures: tuple[int | str, ...], said: str, tries: int):
    with serving(*failures) as server:
        session = runner_of(server).session()
        with pytest.raises(SandboxError, match=said):
            session.run("1")
        assert len(server.requests) == tries


@pytest.mark.parametrize("answer", BROKEN)
def test_an_answer_that_breaks_off_is_tried_again(answer: bytes):
    with broken_server(answer) as (address, asked):
        runner = FusionRunner(SandboxConfig(kind="remote", url=address, rate=1000.0), first_pause_seconds=0.01)
        with pytest.raises(SandboxError, match="gives no answer"):
            runner.session().run("1")
        assert len(asked) == 4


def test_requests_keep_to_the_rate():
    with serving() as server:
        runner = runner_of(server, rate=5.0)
        for _ in range(3):
            runner.run_program("1")
        assert server.requests[-1][0] - server.requests[0][0] >= 0.38


@pytest.mark.parametrize(
    ("failures", "waited"), [(("slow",), LATE_SECONDS), ((503,), 0.3), (("no clock",), 0.0), ((503, "no clock"), 0.3)]
)
def test_time_is_what_the_code_takes_without_the_server(failures: tuple[int | str, ...], waited: float):
    """Without the server's own clock it is what the answer takes, without tries that failed."""
    with serving() as server:
        runner = FusionRunner(config_of(server), first_pause_seconds=0.3)
        for run in (runner.run_program, runner.session().run):
            server.failures = list(failures)
            began = time.monotonic()
            result = run("print(1)")
            assert (result.output, result.error) == ("1\n", None)
            assert result.seconds >= (LATE_SECONDS if "no clock" in failures else 0.001)
            assert time.monotonic() - began - result.seconds >= waited


def test_a_cell_does_not_count_the_cells_before_it():
    with serving() as server:
        session = runner_of(server).session()
        first = session.run("import time; time.sleep(0.5)")
        assert first.seconds >= 0.5
        assert session.run("print(1)").seconds < first.seconds - 0.3  # though the server has slept again
        assert len(server.requests[-1][2]["cells"]) == 2


def test_the_probe_asks_the_server():
    with serving() as server:
        assert probe(config_of(server)) is None
