from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from core.errors import ModelError, UnknownBackend
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import TOKENIZERS, decode, open_hf

TINY = Path("models/tiny-moe")


def sentencepiece_folder(folder: Path) -> Path:
    """A small tokenizer in the way of Llama 2: U+2581 for spaces, bytes for rare characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁hi", "▁you", "h"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_registry_knows_hf_and_bytes():
    assert TOKENIZERS.load("hf")(TINY).vocab_size == 4096
    plain = TOKENIZERS.load("bytes")(TINY)
    assert plain.encode("é", add_special=True) == [0xC3, 0xA9]
    with pytest.raises(UnknownBackend, match="tokenizer 'nope'"):
        TOKENIZERS.load("nope")


def test_ids_of_special_tokens_come_from_the_config():
    tokenizer = open_hf(TINY)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(3)
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(99_999) == tokenizer.token_bytes(-1) == b""


def test_bytes_bound_a_text_from_below_where_there_is_one_for_each(tmp_path):
    tokenizer = open_hf(sentencepiece_folder(tmp_path))
    assert tokenizer.least_tokens("x" * 100) == 20  # "<unk>" has the most: five


def test_sentencepiece_tokens_are_bytes_too(tmp_path):
    tokenizer = open_hf(sentencepiece_folder(tmp_path))
    hi, you, smile = 260, 261, [3 + b for b in "🙂".encode()]
    ids = [1, hi, you, *smile, 2]
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert decode(tokenizer, ids) == reference.decode(ids) == "hi you🙂"
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def test_the_first_space_stays_after_a_prompt(tmp_path):
    tokenizer = open_hf(sentencepiece_folder(tmp_path))
    assert Detokenizer(tokenizer, continues=True).push([260]) == " hi"
    assert Detokenizer(tokenizer, continues=False).push([260]) == "hi"


def test_the_post_processor_decides_about_special_tokens(tmp_path):
    tokenizer = open_hf(sentencepiece_folder(tmp_path))
    assert tokenizer.encode("h", add_special=True) == [1, 262]
    assert tokenizer.encode("h", add_special=False) == [262]
    assert open_hf(TINY).encode("h", add_special=True) == open_hf(TINY).encode(
        "h", add_special=False
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*tokenizer.json"),
        ("{", "tokenizer.json is not a JSON object"),
        ("{}", "tokenizer.json is not a tokenizer"),
        ('{"decoder": {"type": "CTC"}}', "tokenizer.json: decoder .*CTC.* is not supported"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        open_hf(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text((TINY / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config.json must hold a JSON object"):
        open_hf(tmp_path)
