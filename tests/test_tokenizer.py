"""Tokenizers, their folders and their chat templates."""

import itertools
import json

import pytest
from tiny_tokenizers import byte_level, of_pieces
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from specjax.tokenizer import Tokenizer, TokenizerError

pytestmark = pytest.mark.fast


# --- comparing vocabularies -----------------------------------------------------------------------


def vocabulary(size: int = 61) -> list[str]:
    return ["<unk>", "<s>", "</s>", *(f"w{id}" for id in range(3, size))]


def test_V1_padding_is_no_difference():
    target = of_pieces(vocabulary(61))
    draft = of_pieces([*vocabulary(61), "<extra0>", "<extra1>", "<extra2>"])
    assert (target.vocab_size, draft.vocab_size) == (61, 64)
    assert target.first_difference(draft) is None
    assert draft.first_difference(target) is None


def test_V5_swapped_tokens_are_named():
    tokens = vocabulary()
    swapped = [*tokens]
    swapped[5], swapped[6] = swapped[6], swapped[5]
    assert of_pieces(tokens).first_difference(of_pieces(swapped)) == (5, "w5", "w6")
    assert of_pieces(swapped).first_difference(of_pieces(tokens)) == (5, "w6", "w5")


def test_V5_another_eos_is_named():
    mine = of_pieces(vocabulary(), named_tokens={"eos_token": "</s>"})
    theirs = of_pieces(vocabulary(), named_tokens={"eos_token": "w7"})
    assert mine.first_difference(theirs) == (2, "</s> as eos_token", "</s>")
    assert theirs.first_difference(mine) == (2, "</s>", "</s> as eos_token")
    assert mine.first_difference(mine) is None
    assert mine.first_difference(of_pieces(vocabulary())) is None


def test_V5_added_special_tokens_are_compared():
    mine, theirs = of_pieces(vocabulary()), of_pieces(vocabulary())
    mine.backend.add_special_tokens(["<|user|>"])
    theirs.backend.add_special_tokens(["<|assistant|>"])
    assert mine.first_difference(theirs) == (61, "<|user|>", "<|assistant|>")


# --- folders and chat templates -------------------------------------------------------------------


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<|system|>Year: {{ date_string }}
{% if tools is not none %}with tools{% endif %}
{{ system }}</s>
{%- for message in messages %}
    {%- if message.role == 'ipython' %}{% continue %}{% endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
MISTRAL = """{{ bos_token }}
{% set state = namespace(turn=0) %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
        {% generation %}{{ message | tojson }}{{ eos_token }}{% endgeneration %}
    {% endif %}
    {% set state.turn = state.turn + 1 %}
{% endfor %}
{{ state.turn }}{{ nothing }}
"""
USER = {"role": "user", "content": " Is 1 < 2 & 'so on', <b>déjà vu</b>? "}
ASSISTANT = {"role": "assistant", "content": "한글 </s> 👍🏽", "name": None}


def save(folder, template=None, settings=None, adds_bos=False, tokenizer=None):
    """A folder as Hugging Face lays it out."""
    backend = (tokenizer or byte_level()).backend
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        **(settings or {}),
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL], ids=["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_chat_equals_transformers(tmp_path, template, adds_bos):
    from transformers import PreTrainedTokenizerFast

    folder = save(tmp_path, template, adds_bos=adds_bos)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    mine = Tokenizer.load(folder)
    conversations = ([USER], [USER, ASSISTANT], [USER, ASSISTANT, USER])
    for messages, prompt in itertools.product(conversations, (True, False)):
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False
        )
        got = mine.apply_chat_template(messages, add_generation_prompt=prompt)
        assert got == expected and len(got) > 10
        assert got.count(mine.bos_id) == (template != CHATML)
    for text in ("the fox", "", " déjà vu 😀", "fox<s>"):
        assert mine.encode(text) == theirs.encode(text)
        ids = mine.encode(text)
        for skip in (True, False):
            assert mine.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_the_template_file_goes_before_the_configuration(tmp_path):
    save(tmp_path, "config")
    assert Tokenizer.load(tmp_path).chat_template == "config"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert Tokenizer.load(tmp_path).chat_template == CHATML


def test_of_several_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": CHATML}]
    assert Tokenizer.load(save(tmp_path, named)).chat_template == CHATML


def test_one_bos_whoever_adds_it(tmp_path):
    for adds_bos, add_bos_token in itertools.product((False, True), (None, False, True)):
        settings = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        tokenizer = Tokenizer.load(save(tmp_path, settings=settings, adds_bos=adds_bos))
        wanted = adds_bos if add_bos_token is None else add_bos_token
        assert (tokenizer.encode("fox")[0] == tokenizer.bos_id) == wanted
        assert tokenizer.encode("fox").count(tokenizer.bos_id) == int(wanted)
        assert tokenizer.encode("<s>fox").count(tokenizer.bos_id) == 1


def test_prompts_are_neither_padded_nor_cut(tmp_path):
    tokenizer = byte_level()
    tokenizer.backend.enable_padding(length=50)
    tokenizer.backend.enable_truncation(3)
    loaded = Tokenizer.load(save(tmp_path, tokenizer=tokenizer))
    text = "over the lazy dog, déjà vu"
    assert loaded.decode(loaded.encode(text)) == text and 3 < len(loaded.encode(text)) < 50


def test_a_folder_needs_only_tokenizer_json(tmp_path):
    (save(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    assert tokenizer.bos_id is None and tokenizer.eos_id is None


def refusal(call, *arguments) -> str:
    with pytest.raises(TokenizerError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_text_beyond_a_vocabulary_without_unknowns_is_refused_by_name():
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend, source="a tiny vocabulary")
    assert tokenizer.encode("a b") == [0, 1]
    with pytest.raises(TokenizerError, match=r"a tiny vocabulary cannot encode the text \(.*UNK"):
        tokenizer.encode("a c")


def test_broken_folders_are_named(tmp_path):
    assert f"{tmp_path} has no tokenizer.json" in refusal(Tokenizer.load, tmp_path)
    save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert str(tmp_path / "tokenizer_config.json") in refusal(Tokenizer.load, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "no JSON object" in refusal(Tokenizer.load, tmp_path)
    save(tmp_path, settings={"eos_token": "<end>"})
    assert "'<end>' as its eos_token" in refusal(Tokenizer.load, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{\n")
    assert str(tmp_path / "tokenizer.json") in refusal(Tokenizer.load, tmp_path)


def test_conversations_that_cannot_be_rendered_are_refused(tmp_path):
    chat = Tokenizer.load(save(tmp_path)).apply_chat_template
    assert f"{tmp_path} has no chat template" in refusal(chat, [USER])
    chat = Tokenizer.load(save(tmp_path, MISTRAL)).apply_chat_template
    assert "messages is empty" in refusal(chat, [])
    assert "needs a 'role'" in refusal(chat, [{"content": "x"}])
    assert "roles must alternate" in refusal(chat, [USER, USER])
    assert "more than text" in refusal(chat, [{"role": "user", "content": b"x"}])
    assert str(tmp_path) in refusal(chat, [{"role": "user", "content": ["parts"]}])
    chat = Tokenizer.load(save(tmp_path, "{% if %}")).apply_chat_template
    assert "the chat template of" in refusal(chat, [USER])


def test_templates_run_in_a_sandbox(tmp_path):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    chat = Tokenizer.load(save(tmp_path, escape)).apply_chat_template
    assert "unsafe" in refusal(chat, [USER])
    change = "{% set _ = messages.append(1) %}"
    chat = Tokenizer.load(save(tmp_path, change)).apply_chat_template
    assert "refuses" in refusal(chat, [USER])
