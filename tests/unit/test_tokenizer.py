import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from nemotron_ultra.data import encode
from nemotron_ultra.data.tokenizer import BUILTIN, load_tokenizer
from nemotron_ultra.errors import DataError

SAMPLES = [
    "def f(x):\n    return x + 128\n",
    "Grüße, 世界! 🎈\u200d\n\n\t end",
    "",
    " a  b   c\r\n",
    "\ufffd\x00\x7f",
]


@pytest.fixture(scope="module")
def builtin():
    return load_tokenizer("builtin")


def folder_with(path, content=None, **config):
    path.mkdir(exist_ok=True)
    content = content or json.loads((BUILTIN / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(content, indent=3))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_builtin_ids(builtin):
    assert (builtin.vocab_size, builtin.pad_id, builtin.bos_id, builtin.eos_id) == (4096, 0, 1, 2)
    names = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert [builtin.id(name) for name in names] == [10, 11, 12, 13, 14, 15]
    assert builtin.token(12) == "<think>"


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_and_its_bytes_are_counted(builtin, text):
    ids = builtin.encode(text)
    assert builtin.decode(ids) == text
    assert builtin.byte_lengths()[ids].sum() == len(text.encode())


def test_special_tokens_in_text_stay_text_unless_asked_for(builtin):
    text = "<think>a</think></s>"
    assert all(i > 15 for i in builtin.encode(text))
    assert builtin.encode(text, special=True)[0] == 12 and builtin.encode(text, special=True)[-1] == 2
    assert builtin.decode([12, *builtin.encode("a"), 2], special=False) == "a"
    assert builtin.byte_lengths()[:16].sum() == 0


def test_hash_is_of_content_not_layout(builtin, tmp_path):
    same = load_tokenizer(folder_with(tmp_path / "same", eos_token="</s>"))
    assert same.hash == builtin.hash and same.name != builtin.name
    content = json.loads((BUILTIN / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    assert load_tokenizer(folder_with(tmp_path / "other", content, eos_token="</s>")).hash != builtin.hash


def test_saving_again_keeps_the_hash(builtin, tmp_path):
    content = json.loads((BUILTIN / "tokenizer.json").read_text())
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    names = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    template = {"type": "TemplateProcessing", "single": [start, sequence], "pair": [sequence, sequence]}
    content["post_processor"] = template | {"special_tokens": names}
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    other = load_tokenizer(folder_with(tmp_path / "saved", content, eos_token="</s>"))
    assert other.hash == builtin.hash and other.encode("a b") == builtin.encode("a b")


def test_truncation_and_padding_of_the_file_are_off(builtin, tmp_path):
    content = json.loads((BUILTIN / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    cutting = load_tokenizer(folder_with(tmp_path / "cutting", content, eos_token={"content": "</s>"}))
    assert cutting.encode("a b c d e f") == builtin.encode("a b c d e f")
    assert cutting.hash == builtin.hash


def test_byte_fallback_vocabulary(tmp_path):
    entries = ["<unk>", "</s>", "\u2581hi", "<0xC3>", "<0xA9>", "\u2581", "h", "i", "hi"]
    vocab = {entry: index for index, entry in enumerate(entries)}
    model = models.BPE(vocab, [("h", "i"), ("\u2581", "hi")], unk_token="<unk>", byte_fallback=True)
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["</s>"])
    tokenizer = load_tokenizer(folder_with(tmp_path / "sp", json.loads(library.to_str())))
    assert tokenizer.eos_id == 1 and tokenizer.bos_id is None
    assert tokenizer.byte_lengths().tolist() == [5, 0, 3, 1, 1, 1, 1, 1, 2]
    assert tokenizer.byte_lengths()[tokenizer.encode("hi é")].sum() == len(" hi é".encode())


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer not found; got some/name.*hf download"):
        load_tokenizer("some/name")
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(DataError, match=r"has no tokenizer.json; got a folder with vocab.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json is not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_end_of_document_must_exist(tmp_path):
    with pytest.raises(DataError, match="no end-of-document token; got eos_token '<none>'"):
        load_tokenizer(folder_with(tmp_path / "a", eos_token="<none>"))
    assert load_tokenizer(folder_with(tmp_path / "b")).eos_id == 2


def test_bulk_encoding_equals_single(builtin, monkeypatch):
    text = "".join(f"line {i} of é text\n\n  indented {i}\nx\n" for i in range(200))
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 300)
    ids, lengths = encode.encode_documents(builtin, [text, *SAMPLES])
    wanted = [[*builtin.encode(t), 2] for t in [text, *SAMPLES]]
    assert ids.tolist() == [i for document in wanted for i in document]
    assert lengths.tolist() == [len(document) for document in wanted]
    assert len(list(encode._pieces(text))) > 10
