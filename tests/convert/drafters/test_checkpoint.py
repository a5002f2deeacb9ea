"""A drafter's way from its folder through the command line to a checkpoint and back."""

import json
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from convert.drafters.test_mtp import GLM_CONFIG, MIMO_CONFIG, glm_tensors, mimo_tensors
from convert.drafters.tiny_drafters import (
    DRAFT_VOCAB,
    dflash_tensors,
    dspark_config,
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    write,
)
from convert.tiny_checkpoints import hf_config, hf_tensors, write_hf

from ckpt_convert import (
    Choices,
    ConversionError,
    convert,
    inspect,
    load,
    load_drafter,
    read_manifest,
)
from ckpt_convert.__main__ import main

pytestmark = pytest.mark.fast

PUBLISHED = {
    "medusa": ({"base_model_name_or_path": "some/target"}, medusa_tensors(2)),
    "eagle": (eagle_config(), eagle_tensors()),
    "eagle3": (eagle3_config(), eagle3_tensors()),
    "dflash": (dspark_config(), dflash_tensors()),
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_converter_knows_a_drafter_by_its_tensors(tmp_path, method):
    source = write(tmp_path / "source", *PUBLISHED[method])
    finding = inspect(source)
    assert finding.method == method and finding.faults == ()
    conversion = convert(source, tmp_path / "converted")
    drafter = load_drafter(tmp_path / "converted")
    assert drafter.config == conversion.config == finding.config
    floats = [leaf for leaf in jax.tree.leaves(drafter.params) if leaf.dtype == jnp.float32]
    assert sum(leaf.size for leaf in floats) == conversion.parameters == finding.parameters
    assert f"method      {method}" in str(finding) and f"method      {method}" in drafter.describe()


def test_the_command_says_what_it_found_and_heeds_what_is_chosen(tmp_path, capsys):
    source = write(tmp_path / "source", *PUBLISHED["dflash"])
    assert main([str(source), str(tmp_path / "converted"), "--layout", "fill-in"]) == 0
    said = capsys.readouterr().out
    assert "layout      fill-in, 4 slots, 3 drafts" in said
    assert "taps        after the target's layers 1, 5" in said
    assert "borrows     the target's embedding and head" in said
    assert load_drafter(tmp_path / "converted").config.layout == "fill-in"
    assert main(["inspect", str(source), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "drafter" and found["config"]["layout"] == "anchor-first"


def test_a_drafter_inside_a_model_is_asked_for(tmp_path, capsys):
    source = write(tmp_path / "source", MIMO_CONFIG, mimo_tensors())
    with pytest.raises(ConversionError, match="'MiMoForCausalLM' is not supported"):
        convert(source, tmp_path / "converted")
    assert main([str(source), str(tmp_path / "converted"), "--drafter"]) == 0
    assert load_drafter(tmp_path / "converted").method == "mtp"


def test_models_and_drafters_are_told_apart(tmp_path):
    model = write_hf(tmp_path / "model", hf_config("llama"), hf_tensors("llama"))
    with pytest.raises(ConversionError, match="holds no drafter, and layout is chosen"):
        convert(model, tmp_path / "none", choices=Choices(layout="fill-in"))
    with pytest.raises(ConversionError, match="no drafter of a format that is known"):
        convert(model, tmp_path / "none", drafter=True)
    convert(model, tmp_path / "converted")
    with pytest.raises(ConversionError, match="is a model, no drafter; read it with"):
        load_drafter(tmp_path / "converted")
    drafter = write(tmp_path / "drafter", *PUBLISHED["eagle"])
    with pytest.raises(ConversionError, match="not cut for a mesh; leave --shard-for out"):
        convert(drafter, tmp_path / "none", shard_for="1x2")
    convert(drafter, tmp_path / "drafts")
    for read in (load, read_manifest):
        with pytest.raises(ConversionError, match="is a drafter, no model; read it with"):
            read(tmp_path / "drafts")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_Y1_values_and_types_are_exact_and_ids_stay_whole(tmp_path, dtype):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {
        name: tensor.astype(kind) if tensor.dtype == np.float32 else tensor
        for name, tensor in eagle3_tensors().items()
    }
    write(tmp_path / "source", eagle3_config(), tensors)
    convert(tmp_path / "source", tmp_path / "converted")
    params = load_drafter(tmp_path / "converted").params
    assert params["head"].dtype == dtype and params["draft_to_target"].dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(params["head"]), tensors["lm_head.weight"])
    np.testing.assert_array_equal(np.asarray(params["fc"]), tensors["fc.weight"].T)
    wide = load_drafter(tmp_path / "converted", dtype="float32").params
    assert wide["head"].dtype == jnp.float32 and wide["draft_to_target"].shape == (DRAFT_VOCAB,)


def test_fp8_weights_are_multiplied_by_their_scales(tmp_path):
    tensors = eagle_tensors()
    whole = tensors["fc.weight"].astype(ml_dtypes.float8_e4m3fn)
    write(
        tmp_path / "source",
        eagle_config(quantization_config={"quant_method": "fp8"}),
        tensors | {"fc.weight": whole, "fc.weight_scale": np.array([0.5], np.float32)},
    )
    convert(tmp_path / "source", tmp_path / "converted")
    params = load_drafter(tmp_path / "converted").params
    np.testing.assert_array_equal(params["fc"], whole.astype(np.float32).T * 0.5)


def test_pickles_are_named_and_never_opened(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(print))
    with pytest.raises(ConversionError, match=r"pickles only \(medusa_lm_head.pt\).*safetensors"):
        convert(folder, tmp_path / "converted")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_attention_heads": "four"},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"hidden_size": [24]},
        {"rope_scaling": "llama3"},
        {"eagle_config": 7},
        {"eagle_aux_hidden_state_layer_ids": ["first"]},
        {"eagle_aux_hidden_state_layer_ids": "123"},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": "small"},
        {"speculators_model_type": ["eagle3"]},
        {"speculators_config": "eagle3"},
    ],
)
def test_nonsense_in_the_configuration_is_one_sentence(tmp_path, settings):
    write(tmp_path / "source", eagle3_config(**settings), eagle3_tensors())
    with pytest.raises(ConversionError) as raised:
        convert(tmp_path / "source", tmp_path / "converted", drafter=True)
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("settings", [{"num_hidden_layers": "3"}, {"text_config": [1]}])
def test_nonsense_around_a_module_is_one_sentence(tmp_path, settings):
    source = write(tmp_path / "source", GLM_CONFIG | settings, glm_tensors())
    with pytest.raises(ConversionError, match="config.json describes no model"):
        inspect(source, drafter=True)


def test_a_null_is_what_was_left_out(tmp_path):
    write(tmp_path / "source", eagle_config(rms_norm_eps=None), eagle_tensors())
    assert inspect(tmp_path / "source").config.layer.rms_norm_eps == 1e-6


@pytest.mark.parametrize("groups", [[{"weights": {}}], {"group": {"weights": [8]}}, {"group": 8}])
def test_nonsense_about_quantisation_is_refused_by_its_method(tmp_path, groups):
    settings = {"quant_method": "compressed-tensors", "config_groups": groups}
    write(tmp_path / "source", eagle_config(quantization_config=settings), eagle_tensors())
    with pytest.raises(ConversionError, match="quantised by compressed-tensors"):
        convert(tmp_path / "source", tmp_path / "converted")


def test_more_heads_than_there_are_tensors_are_not_listed(tmp_path):
    tensors = medusa_tensors(2)
    tensors.add("999999999.0.linear.weight", 1, 1)
    write(tmp_path / "source", {}, tensors)
    with pytest.raises(ConversionError, match="there should be 1000000000 tensors like blocks"):
        convert(tmp_path / "source", tmp_path / "converted")


def test_a_tensor_under_two_names_is_refused(tmp_path):
    tensors = mimo_tensors()
    tensors.norm("model.mtp_layers.0.enorm")
    write(tmp_path / "source", MIMO_CONFIG, tensors)
    with pytest.raises(ConversionError, match="holds model.mtp_layers.0.* under two names"):
        inspect(tmp_path / "source", drafter=True)


def with_header(folder, change):
    """The EAGLE drafter after ``change`` of its file's header, which keeps its length."""
    source = write(folder, *PUBLISHED["eagle"])
    file = source / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    return source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.replace(b"[24]", b"[24.0]"), "is damaged"),
        (lambda header: header.replace(b'"F32"', b'"F4"'), "is of type F4, which is not supported"),
        (lambda header: b"[" * 100_000, "is no safetensors file"),
        (lambda header: b'{"a": ' + b"9" * 5_000 + b"}", "is no safetensors file"),
    ],
)
def test_a_hostile_header_is_one_sentence(tmp_path, change, message):
    source = with_header(tmp_path / "source", change)
    with pytest.raises(ConversionError, match=message) as raised:
        inspect(source, drafter=True)
    assert "ConversionError" not in str(raised.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5_000 + "}"])
def test_a_hostile_configuration_is_one_sentence(tmp_path, text):
    source = write(tmp_path / "source", *PUBLISHED["eagle"])
    (source / "config.json").write_text(text)
    with pytest.raises(ConversionError, match="config.json cannot be read"):
        convert(source, tmp_path / "converted")


@pytest.mark.parametrize("harm", ["cut", "two files", "damaged manifest", "lost array"])
def test_Y5_what_is_incomplete_is_named(tmp_path, harm):
    source = write(tmp_path / "source", *PUBLISHED["eagle3"])
    file = source / "model.safetensors"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-10])
        with pytest.raises(ConversionError, match="is truncated.*fetch it again"):
            convert(source, tmp_path / "converted", drafter=True)
    elif harm == "two files":
        file.rename(source / "a.safetensors")
        (source / "b.safetensors").write_bytes((source / "a.safetensors").read_bytes())
        with pytest.raises(ConversionError, match="2 safetensors files and no model.safetensors"):
            convert(source, tmp_path / "converted", drafter=True)
    else:
        convert(source, tmp_path / "whole")
        manifest = tmp_path / "whole" / "config.json"
        if harm == "damaged manifest":
            manifest.write_text(manifest.read_text().replace('"eagle3"', '"eagle9"'))
        else:
            next((tmp_path / "whole" / "params").iterdir()).unlink()
        with pytest.raises(ConversionError, match="is incomplete or damaged"):
            load_drafter(tmp_path / "whole")
    assert not (tmp_path / "converted").exists()
