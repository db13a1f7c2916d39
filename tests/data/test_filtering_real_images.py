"""The filter with the real renderer of a tiny Qwen2.5-VL: visual tokens, images that cannot be used, threads."""

import pytest

from vrl.data.dataset import load_rows
from vrl.data.filtering import filter_rows
from vrl.data.tiny_tasks import tokenizer_texts
from vrl.models.renderer import load_renderer
from vrl.models.tiny import build_tiny_model


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    folder = build_tiny_model("qwen2_5_vl", tmp_path_factory.mktemp("model"), tokenizer_texts(), seed=0)
    return load_renderer(folder, max_pixels=1_000_000)


def test_visual_tokens_decide_and_bad_images_are_counted(save, row, image, renderer):
    good, large = image(56, 84), image(280, 280, "JPEG")
    images = [
        good,
        large,
        image(28, 6000),
        b"no image",
        image(200, 200)[:-40],
        image(200, 200, "JPEG")[:400],
        image(1, 1),
    ]
    dataset = load_rows(
        save("a.parquet", [row(i, "<image>?", images=[{"bytes": data}]) for i, data in enumerate(images)])
    )
    text = len(renderer.render(dataset[0].messages)) - 1
    kept, report = filter_rows(dataset, renderer, text + 99)
    assert kept.row_ids == ("a:0", "a:6")
    assert (report.overlong, report.broken, report.longest) == (1, 4, text + 100)
    assert len(filter_rows(dataset, renderer, text + 100)[0]) == 3
    assert "200 times" in filter_rows(dataset.select([0, 2]), renderer, 999)[1].examples[0]


def test_threads_measure_what_one_thread_measures(save, row, image, renderer):
    sides = [(28 * (1 + i % 5), 28 * (1 + i % 3)) for i in range(120)]
    rows = [row(i, "<image>" + "say " * (i % 11), images=[{"bytes": image(*side)}]) for i, side in enumerate(sides)]
    dataset = load_rows(save("a.parquet", rows))
    one, four = (filter_rows(dataset, renderer, 40, workers=workers) for workers in (1, 4))
    assert (one[0].row_ids, one[1]) == (four[0].row_ids, four[1])
    assert 0 < one[1].kept < 120
