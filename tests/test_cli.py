"""The command line as a user meets it: what it prints, and one line where something is wrong."""

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from convert.tiny_checkpoints import hf_config, hf_tensors, write_gguf, write_hf
from fixtures import compilations
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import specjax
from ckpt_convert.conversion import convert
from specjax.bench import machine
from specjax.bench.findings import writable, write_json
from specjax.cli import main

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ,.!?"
SMOLLM2 = "smollm2-135m-instruct"
PAIR_OF_PROMPTS = """
{"prompt": "abcabcabcabc", "kind": "copy"}

{"prompt": "fox", "kind": "open"}
"""


def tokenizer(characters: str) -> str:
    """One token a character, for the vocabulary of the tiny checkpoints."""
    names = ["<s>", "<unk>", "</s>", *characters]
    vocabulary = {name: id for id, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return backend.to_str()


def checkpoint(folder: Path, name: str, characters: str = CHARACTERS, seed: int = 0) -> Path:
    source = write_hf(folder / f"{name}-source", hf_config("llama"), hf_tensors("llama", seed=seed))
    (source / "tokenizer.json").write_text(tokenizer(characters))
    return convert(source, folder / name).destination


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("command-line")


@pytest.fixture(scope="session")
def tiny(folder) -> str:
    return str(checkpoint(folder, "tiny"))


@pytest.fixture(scope="session")
def stranger(folder) -> str:
    """A checkpoint of the same size whose tokenizer has two characters the other way round."""
    return str(checkpoint(folder, "stranger", CHARACTERS.replace("bc", "cb")))


@pytest.fixture
def prompts(tmp_path) -> str:
    (tmp_path / "prompts.jsonl").write_text(PAIR_OF_PROMPTS)
    return str(tmp_path / "prompts.jsonl")


@pytest.fixture
def run(capfd) -> Callable[..., tuple[int, str, str]]:
    """`run("generate", "abc", ...)`: exit status, standard output and standard error."""

    def run(*arguments) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def refused(run) -> Callable[..., str]:
    """`refused(...)`: the one line that a command ends in, before it compiles anything."""

    def refused(*arguments) -> str:
        with compilations() as names:
            status, out, err = run(*arguments)
        *progress, line = err.splitlines()
        assert (status, out) == (1, "")
        assert line.startswith("specjax: ")
        # Fetching and converting say that they begin.
        assert all(one.startswith("specjax: ") and "once)" in one for one in progress), err
        assert not [name for name in names if "rogram" in name]
        return line

    return refused


# A shell that runs the tests in the background has them, and their children, ignore Ctrl-C.
COMMAND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("specjax", run_name="__main__", alter_sys=True)
"""


def command(*arguments, **environment) -> subprocess.Popen:
    """The command in a process of its own."""
    package = str(Path(specjax.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": package, "JAX_PLATFORMS": "cpu"} | environment,
    )


# --- faults ---------------------------------------------------------------------------------------

GENERATE_FAULTS = {
    "temperature": (["--temperature", "-1"], "temperature is -1.0: it must be 0 (greedy) or"),
    "temperature nan": (["--temperature", "nan"], "temperature is nan"),
    "temperature inf": (["--temperature", "inf"], "temperature is inf"),
    "top-p 0": (["--top-p", "0"], "top_p is 0.0: it must lie in (0, 1]"),
    "top-p 1.5": (["--top-p", "1.5"], "top_p is 1.5: it must lie in (0, 1]"),
    "top-k": (["--top-k", "-5"], "top_k is -5"),
    "min-p": (["--min-p", "2"], "min_p is 2.0"),
    "n": (["--n", "0"], "n is 0: it must be at least 1"),
    "max-tokens": (["--max-tokens", "0"], "max_tokens is 0: it must be at least 1"),
    "seed": (["--seed", "-1"], "seed is -1: it must be at least 0"),
    "stop": (["--stop", ""], "a stop string is empty"),
    "method": (["--method", "n-gram"], "unknown method 'n-gram': did you mean 'ngram'?"),
    "rule": (["--rule", "coupling"], "unknown rule 'coupling': did you mean 'coupled'?"),
    "rule of temperature": (
        ["--rule", "greedy", "--temperature", "0.5"],
        "rule 'greedy' would ignore temperature 0.5: set it to 0",
    ),
    "no method": (["--num-speculative-tokens", "3"], "no 'method': choose one of none, ngram,"),
    "another method's": (
        ["--method", "ngram", "--exit-layer", "1"],
        "'exit_layer' belongs to method 'early_exit', not to 'ngram'",
    ),
    "K of 0": (
        ["--method", "ngram", "--num-speculative-tokens", "0"],
        "num_speculative_tokens is 0: it must be at least 1",
    ),
    "K beyond the cache": (
        ["--method", "ngram", "--num-speculative-tokens", "128"],
        "num_speculative_tokens is 128, more than the 128 tokens of max_model_len can hold",
    ),
    "no exit layer": (["--method", "early_exit"], "method 'early_exit' needs 'exit_layer'"),
    "exit layer": (
        ["--method", "early_exit", "--exit-layer", "3"],
        "early exit after 3 layers: the model has 3, choose 1 to 2",
    ),
    "no draft model": (["--method", "draft_model"], "method 'draft_model' needs 'model'"),
    "draft model": (
        ["--method", "draft_model", "--draft-model", "gpt-9"],
        "'gpt-9' is neither a path nor a known model (known: smollm2-135m-instruct)",
    ),
    "max-model-len": (["--max-model-len", "1"], "max_model_len is 1: this model takes 2 to 128"),
    "dtype": (["--dtype", "int8"], "dtype 'int8' is not known; choose auto, float32"),
    "stream and json": (["--stream", "--json"], "--stream prints text as it comes and --json"),
}


@pytest.mark.parametrize("name", GENERATE_FAULTS)
def test_generate_ends_in_a_line(refused, tiny, name):
    options, sentence = GENERATE_FAULTS[name]
    assert sentence in refused("generate", "abc", "--model", tiny, *options)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "prompt 0 is empty: give at least one token"),
        ("a" * 128, "prompt 0 has 128 tokens and max_model_len is 128: at most 127 leave room"),
        ("a\udcff", "no valid Unicode at character 1 of 2"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--stream"], ["--json"]])
def test_a_prompt_that_cannot_be(refused, tiny, prompt, sentence, form):
    assert sentence in refused("generate", prompt, "--model", tiny, *form)


def test_standard_input_that_is_no_text(refused, tiny, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert "can't decode byte 0xff" in refused("generate", "-", "--model", tiny)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "prompt 0 is empty" in refused("generate", "-", "--model", tiny)


def test_a_draft_model_of_another_tokenizer(refused, tiny, stranger):
    line = refused(
        "generate", "abc", "--model", tiny, "--method", "draft_model", "--draft-model", stranger
    )
    assert "tokenizer differs at id 4: the target has 'b', the draft 'c'" in line


SOURCES = {
    "nothing there": "is neither a path nor a known model",
    "a GGUF file cut short": "cut.gguf",
    "a safetensors file cut short": "truncated",
    "an architecture nobody knows": "MambaForCausalLM",
    "a folder without a model": "config.json",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_is_no_model(refused, tmp_path, monkeypatch, name):
    cache = tmp_path / "cache"
    monkeypatch.setenv("SPECJAX_CACHE", str(cache))
    model = tmp_path / "missing.gguf"
    if "GGUF" in name:
        model = tmp_path / "cut.gguf"
        write_gguf(model, "llama", hf_tensors("llama"))
        model.write_bytes(model.read_bytes()[:-1000])
    if "safetensors" in name:
        model = write_hf(tmp_path / "hf", hf_config("llama"), hf_tensors("llama"))
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    if "architecture" in name:
        config = hf_config("llama") | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
        model = write_hf(tmp_path / "hf", config, hf_tensors("llama"))
    if "folder" in name:
        model = tmp_path / "empty"
        model.mkdir()
    assert SOURCES[name] in refused("generate", "abc", "--model", model)
    assert list(cache.rglob("config.json")) == [], "nothing half-written"


@pytest.fixture
def damaged(tmp_path, tiny, monkeypatch) -> Path:
    """The known model's place in a cache folder of its own; no network to fetch it again."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    return Path(shutil.copytree(tiny, tmp_path / SMOLLM2))


def test_a_cached_array_that_was_cut(refused, damaged):
    array = max((damaged / "params").rglob("*"), key=lambda file: file.stat().st_size)
    array.write_bytes(array.read_bytes()[:-8])
    line = refused("generate", "abc")
    assert "is incomplete or damaged" in line and "delete the folder" in line


@pytest.mark.parametrize("content", ["{", "{}", '{"format": "specjax-checkpoint", "version": 1}'])
def test_a_cached_configuration_that_is_broken(refused, damaged, content):
    (damaged / "config.json").write_text(content)
    line = refused("generate", "abc")
    assert str(damaged) in line and "delete the folder" in line


def test_no_network_on_the_first_run(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert "connect to the network for the first run" in refused("generate", "abc")


def test_a_full_disk(folder, tmp_path):
    """The system refuses every file beyond 20 kB, as a full disk would, and the cache is empty."""
    source = folder / "full-source"
    if not source.exists():
        write_hf(source, hf_config("llama"), hf_tensors("llama"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        process = command("generate", "abc", "--model", source, SPECJAX_CACHE=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1].startswith("specjax: the disk is full: ")
    assert "Traceback" not in err
    assert list(tmp_path.rglob("config.json")) == [], "nothing half-written"


BENCH_FAULTS = {
    "no file": (None, "cannot read the prompts in"),
    "no line": ("\n\n", "holds no prompt"),
    "no JSON": ('{"prompt": "a"}\nprompt\n', "line 2: expected"),
    "no object": ('["a"]\n', "line 1: expected"),
    "no prompt": ('{"text": "a"}\n', "line 1: expected"),
    "an empty prompt": ('{"prompt": ""}\n', "line 1: expected"),
    "a number of messages": ('{"messages": 5}\n', "line 1: expected"),
    "messages of text": ('{"messages": ["a"]}\n', "line 1: expected"),
    "not UTF-8": (b'{"prompt": "\xff"}', "it is not UTF-8 text"),
    "too deep": ("[" * 100_000, "line 1: expected"),
}


@pytest.mark.parametrize("name", BENCH_FAULTS)
def test_prompts_that_cannot_be_read(refused, tiny, tmp_path, name):
    content, sentence = BENCH_FAULTS[name]
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused("bench", "--prompts", file, "--model", tiny)
    assert sentence in line and str(file) in line


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--repeats", "0"], "repeats is 0: it must be at least 1"),
        (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json: its folder does not"),
        (["--json", "/"], "cannot write /: "),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
    ],
)
def test_a_benchmark_that_cannot_be(refused, tiny, prompts, options, sentence):
    assert sentence in refused("bench", "--prompts", prompts, "--model", tiny, *options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-prompts", "0"], "the number of prompts is 0: it must be at least 1"),
        (["--num-prompts", "-1"], "the number of prompts is -1: it must be at least 1"),
        (["--batch", "0"], "max_num_seqs is 0: it must be at least 1"),
        (["--num-speculative-tokens", "5", "0"], "num_speculative_tokens is 0"),
        (["--method", "ngram", "early_exit"], "method 'early_exit' needs 'exit_layer'"),
        (["--method", "eagle9"], "unknown method 'eagle9'"),
        (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
    ],
)
def test_a_certificate_that_cannot_be(refused, tiny, options, sentence):
    assert sentence in refused("certify", "--identity", "--model", tiny, *options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rule", "rejektion"], "unknown rule 'rejektion'; known: greedy, rejection"),
        (["--drafter", "medusa9"], "unknown drafter 'medusa9'; known: none, ngram"),
        (["--rule", "typical"], "rule 'typical' is lossy and cannot be certified as lossless"),
        (
            ["--rule", "greedy", "--drafter", "ngram"],
            "no check has the rule 'greedy' with the drafters ngram",
        ),
        (["--seed", "-1"], "seed is -1: it must be at least 0"),
        (["--seed", 10**30], "it must be less than 2**32"),
        (["--claim", "lossy", "--drafter", "ngram"], "no check that was asked for has a lossy"),
        (["--json", "one", "--markdown", "./one"], "cannot hold both JSON and Markdown"),
        (["--json", "n" * 300], "File name too long"),
        (["--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
        (["--markdown", "/nowhere/out.md"], "cannot write /nowhere/out.md"),
        (["--num-prompts", "3"], "--num-prompts means nothing to the certificate of laws"),
        (["--model", "gpt-9"], "'gpt-9' is neither a path nor a known model"),
        (["--model", "gpt-9", "--rule", "block"], "--model has checks of its own: leave out"),
        (["--identity", "--rule", "block"], "--rule means nothing to --identity"),
        (["--greedy", "--temperature", "1"], "--temperature means nothing to --greedy"),
        (["--greedy", "--num-prompts", "0"], "the number of prompts is 0"),
    ],
)
def test_a_certificate_of_laws_that_cannot_be(refused, tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    assert sentence in refused("certify", *options)
    assert list(tmp_path.iterdir()) == []


def test_options_that_no_parser_knows_are_the_shells_usual_error(capsys):
    for arguments in ([], ["generate"], ["generate", "a", "--temperature", "warm"], ["gennerate"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 2
        assert "error: " in capsys.readouterr().err


# --- results on a tiny checkpoint -----------------------------------------------------------------


def test_generate_in_every_form_says_the_same(run, tiny, monkeypatch):
    common = ["--model", tiny, "--max-tokens", "20", "--method", "ngram"]
    status, text, err = run("generate", "abcabc", *common)
    assert (status, err) == (0, "")
    assert run("generate", "abcabc", *common, "--stream") == (0, text, "")
    assert run("generate", "abcabc", *common, "--raw") == (0, text, "")
    monkeypatch.setattr("sys.stdin", io.StringIO("abcabc"))
    assert run("generate", "-", *common) == (0, text, "")
    status, out, err = run("generate", "abcabc", *common, "--json")
    assert (status, err) == (0, "")
    told = json.loads(out)
    (output,) = told["outputs"]
    assert told["prompt"] == "abcabc" and len(told["prompt_token_ids"]) == 6
    assert output["text"] + "\n" == text
    assert len(output["token_ids"]) == output["metrics"]["output_tokens"] <= 20
    assert output["finish_reason"] in ("length", "stop")


def test_samples_and_stops(run, tiny):
    common = ["--model", tiny, "--max-tokens", "12", "--temperature", "1", "--seed", "3"]
    status, out, _ = run("generate", "abc", *common, "--n", "3", "--json")
    samples = [output["text"] for output in json.loads(out)["outputs"]]
    assert status == 0 and len(set(samples)) == 3
    status, out, _ = run("generate", "abc", *common, "--n", "3", "--stream")
    assert status == 0 and all(f"[{index}] " in out for index in range(3))
    stop = samples[0][4:6]
    _, out, _ = run("generate", "abc", *common, "--stop", stop, "--json")
    (output,) = json.loads(out)["outputs"]
    assert output["text"] == samples[0][: samples[0].index(stop)]
    assert output["stop_reason"] == stop


def test_bench_measures_and_writes(run, tiny, prompts, tmp_path):
    out = tmp_path / "found.json"
    common = ["--prompts", prompts, "--model", tiny, "--repeats", "2", "--json", out]
    status, text, err = run("bench", *common, "--max-tokens", "20")
    assert status == 0 and f"wrote {out}" in err
    for column in ("speed-up", "TPOT ms", "acceptance", "identical"):
        assert column in text
    assert text.count("1/1") == 2, "both kinds of prompts, each identical"
    found = json.loads(out.read_text())
    assert [one["kind"] for one in found["summaries"]] == ["copy", "open"]
    for one in found["runs"]:
        assert one["identical"]
        assert len(one["plain"]) == len(one["speculative"]) == 2
        assert one["speculative"][0]["tokens_per_target_forward"] >= 1
    status, text, _ = run("bench", *common, "--max-tokens", "1")
    assert status == 0 and "no output has a second token: ask for more tokens" in text


def test_what_the_machine_allows(run, tiny, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "REPEATS", 2)
    out = tmp_path / "found.json"
    wanted = ["--prompts", prompts, "--model", tiny, "--repeats", "1", "--max-tokens", "8"]
    status, text, _ = run("bench", *wanted, "--machine", "--json", out)
    assert status == 0
    for said in ("one thread reads", "shaped by top_k, top_p", "truncations that no row asks for"):
        assert said in text
    found = json.loads(out.read_text())["machine"]
    assert found["bandwidth_gb_s"] > 0 and set(found["unused"]) == {"plain", "speculative"}
    for one in found["rounds"]:
        assert one["width"] == (1 if one["round"].startswith("plain") else 6)
        assert 0 < one["forward_ms"] and 0 < one["round_ms"]
    compiled = {(one["round"], one["rows"]) for one in found["rounds"]}
    assert len(compiled) == len(found["rounds"]) == 9


def test_prompts_may_hold_any_character(run, tiny, tmp_path):
    """U+2028 and U+0085 end no line of JSON."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab\u2028c\u0085d"}\r\n', encoding="utf-8")
    status, text, _ = run(
        "bench", "--prompts", file, "--model", tiny, "--repeats", "1", "--max-tokens", "20"
    )
    assert status == 0 and "| all" in text


def test_convert_takes_the_converters_options(run, folder, tiny, tmp_path, capfd):
    source = Path(tiny).with_name("tiny-source")
    status, out, _ = run("convert", "--dtype", "bfloat16", source, tmp_path / "half")
    assert status == 0 and "bfloat16" in out
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    status, out, _ = run("convert", "inspect", source)
    assert status == 0 and "family      llama" in out
    status, out, _ = run("convert", "export", tmp_path / "half", tmp_path / "back")
    assert status == 0 and "BF16" in str(
        (tmp_path / "back" / "model.safetensors").read_bytes()[:400]
    )
    with pytest.raises(SystemExit) as exit:
        main(["convert", "--help"])
    assert exit.value.code == 0 and "source" in capfd.readouterr().out


@pytest.mark.parametrize("form", [["--stream"], ["--json"]])
def test_a_reader_that_goes_away_is_no_fault(tiny, form):
    process = command("generate", "abc", "--model", tiny, "--max-tokens", "100", *form)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=120), err) == (141, "")


def test_an_interrupt_prints_what_is_there(run, tiny, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.llm.LLM._advance", interrupted)
    status, out, err = run("generate", "abc", "--model", tiny, "--max-tokens", "20")
    assert (status, err) == (130, "interrupted\n")
    assert len(out) <= 2
    assert run("generate", "abc", "--model", tiny, "--stream")[::2] == (130, "interrupted\n")


def test_an_interrupted_benchmark_measures_nothing(run, tiny, prompts, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.llm.LLM._advance", interrupted)
    out = tmp_path / "found.json"
    common = ["--prompts", prompts, "--model", tiny, "--json", out]
    assert run("bench", *common) == (130, "", "interrupted\n")
    assert not out.exists()


# --- findings are written whole or not at all -----------------------------------------------------


def test_findings_on_a_full_disk(tmp_path):
    """The system refuses every file beyond 1 kB: what was there before is there still."""
    file = tmp_path / "found.json"
    write_json(file, {"old": True})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ValueError, match="cannot write .*found.json: File too large"):
            write_json(file, {"new": "x" * 10_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert json.loads(file.read_text()) == {"old": True}
    assert [one.name for one in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_findings_on_a_device_that_is_always_full():
    assert writable("/dev/full") == Path("/dev/full")
    with pytest.raises(ValueError, match="cannot write /dev/full: No space left on device"):
        write_json(Path("/dev/full"), {"a": 1})
    assert Path("/dev/full").is_char_device()


def test_looking_whether_a_place_is_writable_leaves_no_trace(tmp_path):
    assert writable(tmp_path / "new.json") == tmp_path / "new.json"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


def test_findings_may_have_the_longest_name_that_there_is(tmp_path):
    file = writable(tmp_path / ("n" * 255))
    write_json(file, {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="cannot write .*: File name too long"):
        writable(tmp_path / ("n" * 256))


def test_a_link_that_leads_nowhere_yet_leads_to_the_findings(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "found.json")
    write_json(writable(tmp_path / "link"), {"a": 1})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "found.json").is_file()


def test_a_folder_that_takes_no_new_file_is_known_before(tmp_path, monkeypatch):
    """Though the old file could be written to: a whole one takes its place, or none."""
    (tmp_path / "old.json").write_text("old")

    def refusing(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkstemp", refusing)
    with pytest.raises(ValueError, match="old.json: Permission denied; choose another place"):
        writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


# --- the real model -------------------------------------------------------------------------------


# Shared by two tests, which so share compiled programs.
ON_THE_REAL_MODEL = ("--dtype", "float32", "--num-prompts", 4, "--num-speculative-tokens", 5)


@pytest.mark.network
def test_greedy_and_coupled_speculation_say_what_plain_decoding_says(run, tmp_path, scale):
    """SmolLM2, four prompts, five drafts, side by side; at full scale one by one, too."""
    out = tmp_path / "certificate.json"
    batches, tokens = scale((4,), (1, 4)), scale(24, 48)
    status, text, _ = run(
        *("certify", "--identity", *ON_THE_REAL_MODEL, "--max-tokens", tokens),
        *("--batch", *batches, "--json", out),
    )
    assert status == 0, text
    assert f"\nidentical: {4 * tokens * 2 * len(batches)} tokens" in text
    findings = json.loads(out.read_text())
    assert [(one["mode"], one["batch"]) for one in findings] == [
        (mode, batch) for mode in ("greedy", "coupled") for batch in batches
    ]
    for one in findings:
        assert one["faults"] == 0 and one["tokens"] == 4 * tokens
        assert one["tokens_per_target_forward"] > 1


@pytest.mark.network
def test_greedy_output_is_rescored_by_the_plain_model(run, tmp_path):
    """SmolLM2, four prompts of 24 tokens, five drafts."""
    out = tmp_path / "greedy.json"
    status, text, _ = run(
        *("certify", "--greedy", *ON_THE_REAL_MODEL, "--max-tokens", 24),
        *("--batch", 4, "--json", out),
    )
    assert status == 0, text
    assert "the plain model's best, or nearly tied: 96 tokens" in text
    (found,) = json.loads(out.read_text())
    assert (found["dtype"], found["tokens"], found["faults"]) == ("float32", 96, 0)


@pytest.mark.network
def test_an_answer_in_every_form(run, monkeypatch):
    common = ["--max-tokens", 16, "--max-model-len", 128]
    question = "What is the capital of France?"
    status, text, _ = run("generate", question, *common)
    assert status == 0 and "Paris" in text
    assert run("generate", question, *common, "--stream")[:2] == (0, text)
    monkeypatch.setattr("sys.stdin", io.StringIO(question))
    assert run("generate", "-", *common)[:2] == (0, text)
    _, out, _ = run("generate", "The capital of France is", *common, "--raw", "--json")
    (output,) = json.loads(out)["outputs"]
    assert output["text"].startswith(" Paris")
    assert len(output["token_ids"]) == output["metrics"]["output_tokens"]


@pytest.mark.network
def test_an_empty_question_is_refused(refused):
    for question in ("", " \n"):
        assert "the prompt is empty: give some text, or -" in refused("generate", question)
    assert "prompt 0 is empty" in refused("generate", "", "--raw")


@pytest.mark.network
def test_memory_of_a_warm_generate():
    """At most 1.5 GB where the weights are 0.54 GB.

    Not `ru_maxrss`, in which a child begins with the memory of the process that started it.
    """
    arguments = ["generate", "Count to ten.", "--dtype", "float32", "--max-tokens", 16]
    first = command(*arguments)
    _, err = first.communicate(timeout=600)
    assert first.returncode == 0, err
    measured = (
        "import sys; from pathlib import Path; from specjax.cli import main; "
        "status = main(sys.argv[1:]); "
        "said = Path('/proc/self/status').read_text(); "
        "print(said.partition('VmHWM:')[2].split()[0], file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", measured, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(specjax.__file__).parents[1])},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    kilobytes = int(done.stderr.splitlines()[-1])
    assert kilobytes * 1024 <= 1.5e9


@pytest.mark.network
def test_ctrl_c_stops_a_stream():
    process = command("generate", "Write a long story.", "--stream", "--max-tokens", 1500)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


@pytest.mark.network
def test_the_demonstration(run):
    status, text, _ = run("demo", "--max-tokens", 16, "--dtype", "float32")
    assert status == 0, text
    assert text.count("| yes, 16 tokens") + text.count("yes, ") >= 6
    assert "What to try next" in text and "no, from token" not in text
