"""Tokenizers, and what the model takes from them."""

import functools
import os
import unicodedata

import numpy as np

from data.run.program import UserError, is_writable
from data.shards import data_root


def gpt2_bpe():
    """GPT-2's BPE of tiktoken, which fetches its files once, into data/cache beside the shards. Raises UserError."""
    folder = data_root() / "data" / "cache" / "tiktoken"
    if folder.exists() or is_writable(folder):  # else tiktoken's own folder, in /tmp
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(folder))
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken passes on all errors of its download
        raise UserError(f"no GPT-2 tokenizer ({type(error).__name__}): tiktoken fetches it once, online") from None


def text_codec(vocab_size):
    """(encode: text -> token ids, decode: id -> bytes) of the byte tokenizer or GPT-2's BPE. Raises UserError."""
    if vocab_size == 257:
        return lambda text: list(text.encode(errors="replace")), lambda id: bytes([id])
    if vocab_size != 50257:
        raise UserError(f"no tokenizer is known for a vocabulary of {vocab_size}; 257 are bytes, 50257 the GPT-2 BPE")
    bpe = gpt2_bpe()
    return bpe.encode_ordinary, bpe.decode_single_token_bytes


def normalised_text(token: bytes) -> str:
    """The text of a token without case, accents and spaces around it; "" if the bytes are part of a character."""
    try:
        text = unicodedata.normalize("NFKD", token.decode())
    except UnicodeDecodeError:
        return ""
    return " ".join("".join(c for c in text if not unicodedata.combining(c)).lower().split())


@functools.cache  # .1 s, for each run of a process
def normalised_ids(decode, model) -> np.ndarray:
    """(padded_vocab,) int32: for each token the first token with the same normalised text. Tokens without such text,
    BOS and the padding keep their ids. PR 375, Daniel Monroe."""
    ids, first = np.arange(model.padded_vocab, dtype=np.int32), {}
    for id in range(model.bos_id):
        if text := normalised_text(decode(id)):
            ids[id] = first.setdefault(text, id)
    return ids
