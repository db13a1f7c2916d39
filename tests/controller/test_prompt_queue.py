"""The shared queue of episodes: what replicas get and in what order."""

from vrl.controller.prompt_queue import PromptQueue, fixed_sources
from vrl.protocol.trajectory import Prompt


def episodes(prompts: int, samples: int) -> list[tuple[Prompt, int]]:
    rows = [
        Prompt(uid=f"u{i}", row_id=f"train:{i}", messages=(), data_source="x", ground_truth="1") for i in range(prompts)
    ]
    return [(prompt, sample) for prompt in rows for sample in range(samples)]


def names(taken: list[tuple[Prompt, int]]) -> list[tuple[str, int]]:
    return [(prompt.uid, sample) for prompt, sample in taken]


def test_what_can_start_at_once_is_shared_evenly() -> None:
    queue = PromptQueue(2)
    given = episodes(8, 4)
    queue.fill(given)
    first, second = queue.take(128), queue.take(128)
    assert (len(first), len(second)) == (16, 16)
    assert names(first + second) == names(given)
    assert queue.take(128) == []


def test_without_room_for_all_shares_get_smaller_towards_the_end() -> None:
    queue = PromptQueue(2)
    given = episodes(64, 1)
    queue.fill(given)
    sizes = []
    taken: list[tuple[Prompt, int]] = []
    while part := queue.take(8):
        sizes.append(len(part))
        taken += part
    assert names(taken) == names(given)
    assert sizes[:2] == [8, 8]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_samples_of_a_prompt_stay_together_where_they_fit() -> None:
    queue = PromptQueue(3)
    queue.fill(episodes(4, 4))
    assert [len(queue.take(100)) for _ in range(3)] == [8, 4, 4]


def test_each_step_begins_anew() -> None:
    queue = PromptQueue(2)
    queue.fill(episodes(4, 1))
    assert len(queue.take(1)) == 1
    queue.fill(episodes(8, 1))
    assert [len(queue.take(100)) for _ in range(2)] == [4, 4]


def test_fixed_shares_do_not_depend_on_time() -> None:
    given = episodes(4, 2)
    first, second = fixed_sources(given, 2)
    assert names(first.take(100)) == [("u0", 0), ("u0", 1), ("u2", 0), ("u2", 1)]
    assert names(second.take(100)) == [("u1", 0), ("u1", 1), ("u3", 0), ("u3", 1)]
    assert first.take(1) == []
