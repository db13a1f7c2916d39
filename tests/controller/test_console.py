"""Lines for a person. Torch-free."""

import pytest

from vrl.controller.console import TimeLeft, step_line, validation_lines

STEP = {
    "critic/score/mean": 0.7342,
    "response_length/mean": 12.34,
    "response_length/clip_ratio": 0.02,
    "actor/entropy": 0.41,
    "actor/kl_loss": 0.00123,
    "actor/grad_norm": 0.851,
    "timing_s/step": 4.0,
    "timing_s/gen": 1.8,
    "timing_s/update_actor": 1.2,
    "timing_s/update_critic": 0.4,
    "timing_s/update_weights": 0.1,
    "perf/total_num_tokens": 9876.0,
}


def test_a_whole_step_line():
    assert step_line(STEP, 7, 120, 452.0) == (
        "step   7/120 | score 0.734 | length 12.3 (2% cut) | entropy 0.410 | kl 1.2e-03 | grad 0.85 | "
        "4.0 s (gen 45% update 40% sync 2%) | 2,469 tok/s | left 7m32s"
    )


def test_what_is_missing_is_left_out_and_failures_are_shown():
    metrics = {"critic/score/mean": 0.5, "training/failed_rows": 3.0, "timing_s/step": 1.0, "timing_s/gen": 1.0}
    assert step_line(metrics, 10, 10, 0.0) == "step 10/10 | score 0.500 | 1.0 s (gen 100%) | 3 rows failed"


def test_long_times_are_hours():
    assert step_line({}, 1, 2, 3 * 3600 + 61).endswith("left 3h01m")


def test_time_left_follows_the_last_steps():
    clock = TimeLeft(100)
    assert clock.after(1, 30.0, now=0.0) == 99 * 30.0  # only the step itself is known
    assert clock.after(2, 5.0, now=10.0) == 98 * 10.0  # with what was done between the steps
    for step in range(3, 60):
        left = clock.after(step, 1.0, now=10.0 + step)
    assert left == pytest.approx(41.0)


def test_validation_lines():
    metrics = {
        "val-core/tiny/visual/acc/mean@4": 0.91,
        "val-core/tiny/visual/acc/best@4/mean": 0.99,
        "val-core/tiny/visual/acc/best@4/std": 0.1,
        "val-core/tiny/visual/acc/greedy": 0.93,
        "val-aux/tiny/visual/num_rows": 400.0,
        "val-aux/tiny/visual/failed_rows": 2.0,
        "val-aux/tiny/visual/reward/mean@4": 0.9,
        "val-core/sums/reward/mean@1": 0.5,
        "critic/score/mean": 1.0,
    }
    assert validation_lines(metrics, 20) == [
        "held out after step 20, tiny/visual | acc mean@4 0.910 | acc best@4 0.990 | acc greedy 0.930 | "
        "400 rows, 2 failed",
        "held out after step 20, sums | reward mean@1 0.500",
    ]
