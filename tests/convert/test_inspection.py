"""What is said of a source before anything is converted, and what is refused by name."""

import json
import os
import pickle
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from convert.tiny_checkpoints import (
    expected_params,
    hf_config,
    hf_tensors,
    write_gguf,
    write_hf,
    write_safetensors,
)
from tokenizers import Tokenizer, models

from ckpt_convert import ConversionError, convert, inspect, load
from ckpt_convert.__main__ import main

pytestmark = pytest.mark.fast


def refused(source: Path) -> str:
    """The one sentence with which both commands refuse; neither leaves anything behind."""
    before = sorted(os.listdir(source.parent))
    with pytest.raises(ConversionError) as error:
        convert(source, source.parent / "converted")
    assert sorted(os.listdir(source.parent)) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def write_tokenizer(folder: Path, tokens: int, **settings) -> None:
    vocabulary = {f"t{id}": id for id in range(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2"} | settings))


# What is found.


def test_inspect_says_what_there_is_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    tensors = hf_tensors("llama", dtype=ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    source = write_hf(tmp_path / "source", hf_config("llama"), tensors)
    write_tokenizer(source, 61)
    assert main(["inspect", str(source)]) == 0
    said = capsys.readouterr().out
    for fact in [
        "family      llama",
        "parameters  0.0 million",
        "vocabulary  64, 61 of them tokens",
        "context     128",
        "tensors     30: 29 BF16, 1 F32",
        "stored as   bfloat16",
        "ends with   2 t2",
        "tokenizer   tokenizer.json, tokenizer_config.json",
        "ignored     model.layers.0.self_attn.rotary_emb.inv_freq: follows from the config",
        "note        1 tensors such as model.norm.weight are rounded to bfloat16",
    ]:
        assert fact in said
    assert os.listdir(tmp_path) == ["source"]
    assert main(["inspect", "--json", str(source)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["vocabulary"], found["tokens"]) == ("llama", 64, 61)
    assert found["tensors"] == {"BF16": 29, "F32": 1}
    assert found["parameters"] == sum(tensor.size for tensor in tensors.values()) - 4
    assert found["faults"] == []


def test_the_conversion_says_the_same_before_it_reads(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    found = []

    def look(finding):
        assert not (tmp_path / "converted").exists()
        found.append(str(finding))

    convert(source, tmp_path / "converted", found=look)
    assert found == [str(inspect(source))]


def test_all_faults_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    tensors = hf_tensors("llama")
    del tensors["model.norm.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    source = write_hf(tmp_path / "source", hf_config("llama"), tensors)
    write_tokenizer(source, 61)
    (source / "added_tokens.json").write_text('{"<tool>": 61}')
    assert main(["inspect", str(source)]) == 1
    said = capsys.readouterr().out
    assert said.count("fault ") == 2
    for fault in ["missing model.norm.weight; missing model.layers.2", "'<tool>'"]:
        assert fault in said
    assert "missing model.norm.weight" in refused(source)


def test_a_folder_called_like_a_command_is_a_source_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "inspect", hf_config("llama"), hf_tensors("llama"))
    assert main(["./inspect", "converted"]) == 0
    assert "written     converted" in capsys.readouterr().out


# Ids.


def test_V1_padding_rows_are_kept(tmp_path):
    """Rows beyond the tokenizer may be trained, and drafters put their mask token there."""
    tensors = hf_tensors("llama")
    source = write_hf(tmp_path / "source", hf_config("llama"), tensors)
    write_tokenizer(source, 61)
    assert inspect(source).vocabulary.size == 61
    convert(source, tmp_path / "converted")
    embed = np.asarray(load(tmp_path / "converted").params["embed"])
    np.testing.assert_array_equal(embed, tensors["model.embed_tokens.weight"])


def test_V1_tokens_without_a_row_are_a_note(tmp_path):
    """Multimodal tokenizers have a token or two beyond the text model's vocabulary."""
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    write_tokenizer(source, 66)
    (note,) = inspect(source).notes
    assert note == "2 tokens from 64 (t64) on have no row: they can't be used"


@pytest.mark.parametrize("where", ["added_tokens.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("token", "id"), [("t5", 6), ("<new>", 61)])
def test_V5_added_tokens_at_other_ids_are_refused_by_name(tmp_path, where, token, id):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    write_tokenizer(source, 61, added_tokens_decoder={"7": {"content": "t7"}})
    added = {token: id}
    if where == "tokenizer_config.json":
        added = {"added_tokens_decoder": {str(id): {"content": token}}}
    (source / where).write_text(json.dumps(added))
    message = refused(source)
    assert repr(token) in message and f"id {id}" in message and "save_pretrained" in message


@pytest.mark.parametrize(("ids", "beyond"), [([2, 64], 64), (-1, -1)])
def test_ids_beyond_the_vocabulary_are_a_note(tmp_path, ids, beyond):
    config = hf_config("llama", eos_token_id=ids)
    source = write_hf(tmp_path / "source", config, hf_tensors("llama"))
    (note,) = inspect(source).notes
    assert note.startswith(f"the id {beyond} ") and note.endswith("it never comes")


def test_files_without_tokenizer_json_are_a_note(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    (source / "tokenizer.model").write_bytes(b"pieces")
    (note,) = inspect(source).notes
    assert "tokenizer.model" in note and "save_pretrained" in note


# Quantised safetensors.


def quantise(tensor: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 values and one scale a block, block by block."""
    rows, columns = (-(-size // along) for size, along in zip(tensor.shape, block, strict=True))
    values = np.empty(tensor.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            here = np.s_[
                row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]
            ]
            scales[row, column] = np.abs(tensor[here]).max() / 448
            values[here] = (tensor[here] / scales[row, column]).astype(values.dtype)
    return values, scales


def in_fp8(tensors, block, ending) -> tuple[dict, dict]:
    """The tensors of such a checkpoint, and what its matrices hold, entry by entry."""
    stored, held = {}, {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            stored[name] = held[name] = tensor
            continue
        stored[name], scales = quantise(tensor, block or tensor.shape)
        steps = block or tensor.shape
        at = [
            [scales[i // steps[0], j // steps[1]] for j in range(tensor.shape[1])]
            for i in range(tensor.shape[0])
        ]
        held[name] = stored[name].astype(np.float32) * np.array(at, np.float32)
        stored[name + ending] = scales if block else scales.reshape(())
        stored[name.replace(".weight", ".input_scale")] = np.ones((), np.float32)
    return stored, held


@pytest.mark.parametrize(
    ("block", "ending", "settings"),
    [
        ((24, 10), "_scale_inv", {"quant_method": "fp8", "weight_block_size": [24, 10]}),
        (None, "_scale", {"quant_method": "fp8"}),
        (
            None,
            "_scale",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
        ),
        ((1, 10_000), "_scale", {"quant_method": "fbgemm_fp8"}),
    ],
)
def test_fp8_is_undone_tensor_by_tensor(tmp_path, block, ending, settings):
    tensors, held = in_fp8(hf_tensors("llama"), block, ending)
    source = write_hf(
        tmp_path / "source", hf_config("llama", quantization_config=settings), tensors
    )
    finding = inspect(source)
    assert (finding.dtype, finding.kinds["F8_E4M3"]) == (np.float32, 21)
    assert set(finding.ignored.values()) == {
        "undone in the weights",
        "a scale for computing in FP8, which is not done",
    }
    convert(source, tmp_path / "converted")
    params = load(tmp_path / "converted").params
    expected = expected_params(held)
    for name, values in expected["layers"].items():
        np.testing.assert_allclose(params["layers"][name], values, rtol=1e-6)


def test_fp8_takes_the_type_of_the_other_matrices(tmp_path):
    tensors, _ = in_fp8(hf_tensors("llama"), (128, 128), "_scale_inv")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    config = hf_config("llama", quantization_config={"quant_method": "fp8"})
    assert inspect(write_hf(tmp_path / "source", config, tensors)).dtype.name == "bfloat16"


def test_fp8_without_its_scale_is_refused_by_name(tmp_path):
    tensors, _ = in_fp8(hf_tensors("llama"), None, "_scale")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name + "_scale"]
    source = write_hf(tmp_path / "source", hf_config("llama"), tensors)
    assert refused(source).startswith(f"{name} is FP8 without a scale")


def test_fp8_scales_of_another_shape_are_refused(tmp_path):
    tensors, _ = in_fp8(hf_tensors("llama"), (16, 16), "_scale_inv")
    config = hf_config("llama", quantization_config={"quant_method": "fp8"})
    assert "do not fit" in refused(write_hf(tmp_path / "source", config, tensors))


@pytest.mark.parametrize(
    ("settings", "extra", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, None, "awq"),
        ({"quant_method": "gptq", "bits": 4}, None, "gptq"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, None, "bitsandbytes"),
        ({"quant_method": "hqq"}, None, "hqq"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            None,
            "compressed-tensors (4 bits int)",
        ),
        (None, "model.layers.0.mlp.up_proj.qweight", "GPTQ or AWQ"),
        (None, "model.layers.0.mlp.up_proj.weight.absmax", "bitsandbytes"),
        (None, "model.layers.0.mlp.up_proj.weight_packed", "compressed-tensors"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path, settings, extra, named):
    config = hf_config("llama") | ({"quantization_config": settings} if settings else {})
    tensors = hf_tensors("llama") | ({extra: np.ones((4, 4), np.int32)} if extra else {})
    message = refused(write_hf(tmp_path / "source", config, tensors))
    assert f"quantised by {named}, " in message and "unquantised checkpoint" in message


def test_a_gguf_type_that_cannot_be_undone_is_named_before_anything_is_read(tmp_path):
    tensors = hf_tensors("llama")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.ones((64, 32), np.int8)
    write_gguf(tmp_path / "model.gguf", "llama", tensors)
    message = refused(tmp_path / "model.gguf")
    assert "blk.1.ffn_up.weight is quantised as I8" in message
    assert "another quantisation" in message


# Files that are no checkpoints.


def test_a_big_endian_gguf_is_named_with_the_remedy(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    message = refused(tmp_path / "model.gguf")
    assert "big-endian" in message and "gguf-convert-endian" in message


def test_a_gguf_of_another_version_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    assert "GGUF version 9" in refused(tmp_path / "model.gguf")


def test_a_part_of_a_gguf_is_named_with_the_remedy(tmp_path):
    write_gguf(
        tmp_path / "model-00001-of-00003.gguf",
        "llama",
        hf_tensors("llama"),
        tokenizer={"split.count": 3},
    )
    message = refused(tmp_path / "model-00001-of-00003.gguf")
    assert "one of 3 parts" in message and "--merge" in message


@pytest.mark.parametrize("name", ["model.gguf", "source/model.safetensors"])
def test_an_empty_file_is_named(tmp_path, name):
    write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    (tmp_path / name).write_bytes(b"")
    message = refused(tmp_path / name.partition("/")[0])
    assert message == f"{tmp_path / name} is empty; fetch it again"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"num_attention_heads": 5},
        {"num_key_value_heads": [2]},
        {"rope_scaling": 3},
        {"max_position_embeddings": 0},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    ],
)
def test_a_config_that_describes_no_model_is_one_line(tmp_path, changes):
    source = write_hf(tmp_path / "source", hf_config("llama", **changes), hf_tensors("llama"))
    assert "describes no model" in refused(source)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": True}, "architecture True is not supported"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', no token id"),
        ({"bos_token_id": [None]}, r"bos_token_id is [None], no token id"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            "quantised by compressed-tensors",
        ),
    ],
)
def test_settings_of_another_type_are_named(tmp_path, changes, said):
    source = write_hf(tmp_path / "source", hf_config("llama", **changes), hf_tensors("llama"))
    assert said in refused(source)


def test_json_that_is_nested_without_end_is_named(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    endless = b"[" * 100_000
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(endless)) + endless)
    assert "model.safetensors is no safetensors file" in refused(source)
    (source / "config.json").write_bytes(endless)
    assert "config.json cannot be read" in refused(source)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": {}}',
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": 1}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0.0, 0.0]}}',
        b'{"a": {"dtype": "F32", "shape": [0.0], "data_offsets": [0, 0]}}',
    ],
)
def test_a_damaged_header_is_named(tmp_path, header):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    file = source / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert refused(source).startswith(f"{file} is damaged")


def test_what_is_beside_a_model_is_told_from_it(tmp_path):
    write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    message = refused(tmp_path / "source" / "model.safetensors")
    assert "give the folder" in message
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "files" / "model.gguf") in refused(tmp_path / "files")


class Bomb:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_pickles_are_named_and_never_executed(tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    pickle.loads(bomb)
    (tmp_path / "exploded").unlink()  # so it would have
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config("llama")))
    (folder / "pytorch_model.bin").write_bytes(bomb)
    for source in (folder, folder / "pytorch_model.bin"):
        message = refused(source)
        assert "pytorch_model.bin" in message and "never executed" in message
        assert "safetensors" in message
    assert not (tmp_path / "exploded").exists()


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that fails is Linux's own")
def test_an_unreadable_file_is_one_line(tmp_path):
    """Address 0 of one's own memory: a file that opens and cannot be read, even by root."""
    (tmp_path / "model.gguf").symlink_to("/proc/self/mem")
    assert "cannot be read: Input/output error" in refused(tmp_path / "model.gguf")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that fails is Linux's own")
def test_an_unreadable_tokenizer_is_one_line(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))
    (source / "tokenizer.json").symlink_to("/proc/self/mem")
    assert "cannot be read: Input/output error" in refused(source)


def test_a_file_cut_while_it_is_converted_is_named(tmp_path):
    source = write_hf(tmp_path / "source", hf_config("llama"), hf_tensors("llama"))

    def cut(finding):
        with open(source / "model.safetensors", "r+b") as file:
            file.truncate(20_000)

    with pytest.raises(ConversionError, match=r"model\.safetensors is truncated"):
        convert(source, tmp_path / "converted", found=cut)
    assert os.listdir(tmp_path) == ["source"]


def test_an_integer_tensor_that_nobody_wants_is_no_fault(tmp_path):
    tensors = hf_tensors("llama")
    source = write_hf(tmp_path / "source", hf_config("llama"), tensors)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.int64)}
    write_safetensors(source / "model.safetensors", tensors | extra)
    assert inspect(source).faults == ()
