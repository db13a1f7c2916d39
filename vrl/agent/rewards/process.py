"""The program of one reward process: `python -m vrl.agent.rewards.process PARENT_PID`, started by `pool`.

Standard input is a socket to the pool. The first frame is the spec; the answer says what went wrong with it, if
anything did. Then requests are answered one by one until the socket closes. The process never imports torch (unless a
user's file does); user code sees an empty standard input and prints to standard error.
"""

import json
import pickle
from dataclasses import asdict
from functools import partial

from vrl.agent.child_process import serve_parent
from vrl.agent.rewards.code_runner import grading_sandbox, provide_code_runner
from vrl.agent.rewards.scoring import make_scorer
from vrl.agent.rewards.types import RewardRequest, RewardSpec, Score
from vrl.agent.rewards.wire import frame, read_frame
from vrl.agent.sandbox.runner import make_runner
from vrl.protocol.errors import ConfigError

_MAX_ANSWER_BYTES = 1 << 20


def main() -> None:
    """Serve the pool until it is gone."""
    connection = serve_parent()
    spec_payload = read_frame(connection)
    if spec_payload is None:
        return
    spec: RewardSpec = pickle.loads(spec_payload)
    provide_code_runner(partial(make_runner, grading_sandbox(spec)), spec.time_limit_seconds / 2)
    try:
        scorer = make_scorer(spec)
    except ConfigError as error:
        connection.sendall(frame(json.dumps({"error": str(error)}).encode()))
        return
    connection.sendall(frame(json.dumps({"error": None}).encode()))
    while (payload := read_frame(connection)) is not None:
        request: RewardRequest = pickle.loads(payload)
        connection.sendall(frame(_encode(scorer(request))))


def _encode(score: Score) -> bytes:
    try:
        answer = json.dumps(asdict(score)).encode()
    except ValueError as error:  # an integer of thousands of digits
        return json.dumps(asdict(Score.failed("bad value", f"extra values cannot be kept: {error}"))).encode()
    if len(answer) > _MAX_ANSWER_BYTES:
        large = Score.failed("bad value", f"extra values of {len(answer)} bytes, at most {_MAX_ANSWER_BYTES} are kept")
        return json.dumps(asdict(large)).encode()
    return answer


if __name__ == "__main__":
    main()
