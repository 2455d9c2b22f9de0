"""Normalised ids: which tokens are one, and how their table reaches the hash of bigrams and checkpoints."""

from types import SimpleNamespace

import numpy as np
import pytest

import train_gpt as T
from data import loader, tokenizer
from data.run import start
from data.run.program import UserError
from records import evaluate
from test_checkpoint import differing, train
from test_guard import KNOBS, make_corpus
from test_run import fails  # noqa: F401 (a fixture)


@pytest.mark.parametrize("token, text", [
    (b" The", "the"), ("É".encode(), "e"), ("ＡＢ".encode(), "ab"), (b"a\n b", "a b"), (b"\n \n", ""),
    (b"\xe2\x82", ""), ("\u0301".encode(), "")])
def test_normalised_text(token, text):
    assert tokenizer.normalised_text(token) == text


def test_normalised_ids():
    """Tokens of one text have the id of the first; those without text, BOS and the padding keep their own."""
    tokens = [b"a", b" ", b"b", b" A", b"\xff", b"\n", b"B"]
    ids = tokenizer.normalised_ids(tokens.__getitem__, T.Model(vocab_size=8))
    assert ids.dtype == np.int32 and ids.tolist() == [0, 1, 2, 0, 4, 5, 2, *range(7, 128)]


def test_reaches_the_hash_and_the_checkpoint(tmp_path, monkeypatch, fails):
    """Ids 2k and 2k + 1 are one text here. A resumed run needs no tokenizer; a new run says that it does."""
    args = ["--preset=record74", *KNOBS, *make_corpus(tmp_path, bos=50256), "--vocab_size=50257", "--sampled_frac=0",
            "--bigram_tables=1", "--bigram_normal=true", "--bigram_signs=true", "--save_every=2", "--keep=99"]
    corpus, batches, make_batch = SimpleNamespace(args=args), [], loader.make_batch
    monkeypatch.setattr(loader, "make_batch", lambda *a, **k: batches.append(make_batch(*a, **k)) or batches[-1])
    for module in T, start:
        monkeypatch.setattr(module, "text_codec", lambda size: (None, lambda id: str(id // 2).encode()))
    whole = train(corpus, tmp_path / "whole")

    def no_tokenizer(size):
        raise UserError("no GPT-2 tokenizer")
    for module in T, start:
        monkeypatch.setattr(module, "text_codec", no_tokenizer)
    resumed = train(corpus, tmp_path / "resumed", f"--resume={whole.saved[2]}")
    assert differing(resumed.saved[4], whole.saved[4]) == []
    assert evaluate.main([str(whole.saved[4]), f"--export={tmp_path}/weights"]) == 0
    for batch in batches:
        tokens, rows, signs = (x.cpu().numpy() for x in (batch.tokens, *batch.row_ids.values()))
        ids = np.where(tokens == 50256, 50256, tokens // 2 * 2)
        assert np.array_equal(rows, loader.ngram_rows(ids, [(2, 50304)]))
        assert np.array_equal(signs, [0, *(ids[1:] ^ ids[:-1]) % 8192])
    (line,) = (line for line in whole.text.splitlines() if line.startswith("hash_ids: sha256 "))
    assert line in resumed.text.splitlines()
    fails([*args, f"--log_dir={tmp_path}"], "no GPT-2 tokenizer")
