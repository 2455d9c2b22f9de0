"""Text, validation loss and bits per byte, HellaSwag and export of a checkpoint. The model of oracles.py judges the
numbers."""

import dataclasses
import hashlib
import io
import json
import math
import re
import struct
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
from data.run import sample as sampling
from data.run.errors import UserError
from data.run.knobs import flatten
from data.run.sample import forward, generate, sample
from data.tokenizer import text_codec
from records import evaluate as E
from test_checkpoint import train
from test_run import FINAL_WINDOW, STAGES, VAL_TOKENS, corpus  # noqa: F401, a fixture

RECENT = STAGES[-1][1] - 1  # tokens that a continuation sees, beside the separator
FEW = "--scheduled_steps=3", "--extension_steps=1", "--micro_batches=1", "--val_every=99"  # one step in each stage


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run that ended with a sample: log, checkpoint, its config and model."""
    run = train(corpus, tmp_path_factory.mktemp("trained"), *FEW, "--save=true", "--sample_tokens=12",
                "--sample_prompt=the ")
    (path,) = run.saved.values()
    config, model, attention = T.load_model(path, {"device": "cpu"})
    return SimpleNamespace(text=run.text, val=run.val, path=path, config=config, model=model, attention=attention)


@pytest.fixture(scope="module")
def eloquent(trained):
    """The same with other weights, so that the model says many things: a token depends on all tokens before it."""
    model = T.GPT(trained.config.model, trained.model.ops, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for label, param in model.named_parameters():
            param.copy_(trained.model.get_parameter(label))
            if param.dtype == torch.bfloat16:
                param.add_(torch.randn(param.shape, generator=generator), alpha=1.0 if param.ndim == 2 else 0.1)
        model.smear_lambda.fill_(0.8)
        model.bigram_lambdas.fill_(0.3)
    return SimpleNamespace(config=trained.config, model=model, attention=trained.attention)


def oracle(model, rows):
    """Softcapped logits (N, V) of documents in one packed sequence, with the windows of the final validation."""
    params = {name: tensor.float() for name, tensor in model.state_dict().items()}
    freqs, scale = oracles.base_freqs(48 // 6 // 4), 0.1
    for old, new in zip(STAGES, STAGES[1:]):
        freqs, scale = oracles.yarn(freqs, scale, old[3], new[3])
    tokens, cu = sum(rows, []), np.cumsum([0, *map(len, rows)]).tolist()
    hashed = oracles.bigram_hash(tokens, len(params["bigram_embed"]))
    h = oracles.model_hidden(params, tokens, cu, hashed, S=STAGES[-1][2], L=FINAL_WINDOW, H=6, freqs=freqs,
                             attn_scale=scale, lambda_dtype=torch.bfloat16)
    return oracles.softcapped_logits(params, h)


# ---- Text ------------------------------------------------------------------------------------------------------------


def test_greedy_text_is_the_argmax_at_every_position(eloquent, monkeypatch):
    """Of one teacher-forced pass over the text, up to a full window. Beyond, of a pass over the last tokens only."""
    start, model = list(b"the "), eloquent.model
    ids = [*start, *generate(model, eloquent.config, eloquent.attention, start, RECENT + 1 - len(start), 0.0, 0)]
    likeliest = oracle(model, [[256, *ids[:-1]]])[:, :256].argmax(1).tolist()
    assert len(ids) == RECENT + 1 and likeliest[len(start):] == ids[len(start):] and len(set(ids)) > 20
    calls = []
    monkeypatch.setattr(sampling, "forward", lambda model, config, parts, view: calls.extend(parts) or forward(
        model, config, parts, view))
    new = list(generate(model, eloquent.config, eloquent.attention, ids, 3, 0.0, 0))
    documents = [[256, *[*ids, *new[:i]][-RECENT:]] for i in range(3)]
    seen = torch.stack([oracle(model, [document])[-1, :256] for document in documents])
    assert new == seen.argmax(1).tolist() and calls == documents
    assert not torch.allclose(seen, oracle(model, [[256, *ids, *new]])[-4:-1, :256], atol=1e-4)  # older tokens matter


def test_temperature_seed_and_top_k(eloquent):
    def sampled(*args, seed=1):
        system = dataclasses.replace(eloquent.config.system, seed=seed)
        return list(generate(eloquent.model, dataclasses.replace(eloquent.config, system=system),
                             eloquent.attention, b"the ", 10, *args))

    greedy, free = sampled(0.0, 0), sampled(3.0, 0)
    assert sampled(3.0, 1) == greedy == sampled(1e-4, 0)
    assert free == sampled(3.0, 10**6) and free not in (sampled(3.0, 0, seed=2), sampled(1.0, 0), greedy)
    three = sampled(9.0, 3)
    z = oracle(eloquent.model, [[256, *b"the ", *three[:-1]]])[4:, :256]
    assert len({row.topk(3).indices.tolist().index(id) for id, row in zip(three, z)}) > 1  # there is no fourth rank


def test_the_run_and_its_checkpoint_say_the_same(trained, capfd):
    assert T.main([f"--sample={trained.path}", "--device=cpu", "--tokens=12"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("the ") and len(said) > len("the \n") and f"\nsample:\n{said}" in trained.text


BPE = SimpleNamespace(encode_ordinary=lambda text: [len(word) for word in text.split()],
                      decode_single_token_bytes=lambda id: b"x" * (1 + id % 3))


def test_characters_and_tokenizers(trained, monkeypatch):
    """The bytes of a character come one at a time. A replacement character stands for broken and half characters."""
    data = [*"a¿€😀b".encode(), 0xFF, *"ü".encode(), 0xE2, 0x82]
    monkeypatch.setattr(sampling, "generate", lambda *_: iter(data))
    for prompt in "é", "", "\udcff":
        config = dataclasses.replace(trained.config, system=T.System(sample_prompt=prompt))
        assert "".join(sample(trained.model, config, None)) == prompt + "a¿€😀b\ufffdü\ufffd"
    encode, decode = text_codec(257)
    assert encode("aü") == [97, 195, 188] and decode(195) == b"\xc3"
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding={"gpt2": BPE}.get))
    assert text_codec(50257) == (BPE.encode_ordinary, BPE.decode_single_token_bytes)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for size, message in (50257, r"^no GPT-2 tokenizer \(\w+\): tiktoken fetches it once, online$"), (
            50258, "no tokenizer is known for a vocabulary of 50258"):
        with pytest.raises(UserError, match=message):
            text_codec(size)


# ---- Validation ------------------------------------------------------------------------------------------------------


def evaluate(trained, capsys, *args):
    """{key: value} of what the command prints."""
    assert E.main([str(trained.path), "--device=cpu", *args]) == 0, capsys.readouterr().err
    return dict(re.findall(r"^(\w+): (.*)$", capsys.readouterr().out, re.M))


def test_validation_is_that_of_the_run(trained, corpus, capsys, monkeypatch):
    found = evaluate(trained, capsys)
    assert found["val_loss"] == trained.val["4"] and list(found) == ["val_loss", "val_bits_per_byte"]
    letters = (corpus.val[1:VAL_TOKENS + 1] != 256).sum()
    bits = float(found["val_loss"]) * VAL_TOKENS / math.log(2) / letters
    assert letters < VAL_TOKENS and abs(float(found["val_bits_per_byte"]) - bits) < 3e-4
    monkeypatch.setattr(E, "text_codec", lambda size: (_ for _ in ()).throw(UserError("reason")))
    less = evaluate(trained, capsys, "--val_tokens=1536", f"--val_files={corpus.folder}/val_1.bin")
    assert less.keys() == {"val_loss"} and less["val_loss"] != found["val_loss"]


def test_bits_per_byte_of_longer_tokens(monkeypatch):
    """Tokens of 1, 2 and 3 bytes. The separator is predicted but is no text. Here 4 tokens of 3 nats have 6 bytes."""
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=lambda name: BPE))
    tokens = np.array([0, 5, 50256, 50251], np.uint16)
    assert E.bits_per_byte(T.PRESETS["record"], 3.0, tokens) == pytest.approx(4 * 3 / math.log(2) / (1 + 3 + 2))


# ---- HellaSwag -------------------------------------------------------------------------------------------------------

EXAMPLES = [{"ctx": context, "endings": endings, "label": label, "activity_label": "x"} for context, endings, label in (
    ("the sun", ["rise", "set it", "shone", "is"], 1), ("a", ["b", "cc", "ddd", "eeee"], 3),
    ("there is no more", ["tea", "rest at all", "ide", "one"], "2"))]


def test_losses_of_endings_are_those_of_one_at_a_time(eloquent):
    """In packed sequences of 128 and of 1536 tokens, against each ending alone in the plain model."""
    encode, _ = text_codec(257)
    pairs = [(encode(example["ctx"]), encode(" " + ending)) for example in EXAMPLES for ending in example["endings"]]
    found = []
    for tokens in 128, 1536:
        data = dataclasses.replace(eloquent.config.data, val_batch_tokens=tokens)
        found.append(list(E.ending_losses(eloquent.model, dataclasses.replace(eloquent.config, data=data),
                                           eloquent.attention, pairs)))
    for i, (context, ending) in enumerate(pairs):
        z = oracle(eloquent.model, [[256], [256], [256, *context, *ending]])
        expected = oracles.mtp_losses(z[-len(ending) - 1:-1], ending, [1.0])
        for losses in found:
            assert losses[i].shape == expected.shape and torch.allclose(losses[i], expected, atol=1e-4)
    z = oracle(eloquent.model, [[256, *b"another"], [256], [256, *context, *ending]])  # why there are two separators
    assert not torch.allclose(oracles.mtp_losses(z[-len(ending) - 1:-1], ending, [1.0]), expected, atol=1e-3)


def test_accuracy(trained, tmp_path, capsys, monkeypatch):
    """The least sum and the least mean choose different endings."""
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(map(json.dumps, EXAMPLES)))
    lengths = [[len(" " + ending) for ending in example["endings"]] for example in EXAMPLES]
    means = [[3, 1, 5, 9], [1, 9, 9, .9], [1, 9, .9, 9]]
    monkeypatch.setattr(E, "ending_losses", lambda *_: (
        torch.full((n,), float(mean)) for row in zip(lengths, means) for n, mean in zip(*row)))
    found = evaluate(trained, capsys, f"--hellaswag={path}", "--validate=false")
    sums = [[n * mean for n, mean in zip(*row)] for row in zip(lengths, means)]
    for name, scores in ("acc_norm", means), ("acc", sums):
        right = sum(row.index(min(row)) == label for row, label in zip(scores, (1, 3, 2))) / 3
        assert found[f"hellaswag_{name}"] == f"{right:.4f}"
        assert found[f"hellaswag_{name}_standard_error"] == f"{math.sqrt(right * (1 - right) / 3):.4f}"
    assert found["hellaswag_examples"] == "3" and found["hellaswag_acc"] != found["hellaswag_acc_norm"]


NO_EXAMPLE = "line 2: not an example with ctx, four endings and label"


@pytest.mark.parametrize("args, message", [
    ("--sample=CKPT --promt=x", "unknown key --promt; the nearest is --prompt"), ("--sample=CKPT x", "argument 'x'"),
    ("--sample=CKPT --temperature=hot", "--temperature=hot: expected float"),
    ("--sample=CKPT --temperature=nan", "--temperature=nan"), ("--sample=CKPT --top_k=-1", "--top_k=-1.*negative"),
    ("--sample=none.pt", "none.pt is no checkpoint of this trainer: No such file"),
    ("--sample=CKPT --model_dim=96", r"other parameters than this train_gpt\.py: .*embed"),
    ("CKPT --helaswag=x", "the nearest is --hellaswag"), ("CKPT --hellaswag=none", "cannot read none: No such"),
    ("CKPT --hellaswag=empty", "empty: no examples"), ("CKPT --hellaswag=binary", "cannot read binary: not text"),
    ("CKPT --hellaswag=long", "an example has 2007 tokens: --val_batch_tokens=768"),
    *((f"CKPT --hellaswag=line{i}", NO_EXAMPLE) for i in range(4)), ("CKPT --export=empty/x", "cannot write empty/x"),
    ("CKPT --val_files=none_*.bin --validate=true", "no files match .*none_")])
def test_errors_are_one_line(trained, tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text(json.dumps(EXAMPLES[0] | {"ctx": "x" * 1999}))
    wrong = ({"endings": ["a"]}, {"label": 4})
    for i, line in enumerate(["", "{", *(json.dumps(EXAMPLES[0] | new) for new in wrong)]):
        (tmp_path / f"line{i}").write_text(f"{json.dumps(EXAMPLES[0])}\n{line}\n")
    first, *others = args.replace("CKPT", str(trained.path)).split()
    main = T.main if first.startswith("--sample") else E.main
    others += ["--validate=false"] * (main is E.main and "--val" not in args)
    assert main([first, "--device=cpu", *others]) == 1
    assert re.fullmatch(rf"error: .*({message}).*\n", err := capsys.readouterr().err), err


def test_download(trained, tmp_path, capsys, monkeypatch):
    """The file is fetched once and must be the published one. No part of a file is left."""
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    content = "".join(json.dumps(example) + "\n" for example in EXAMPLES).encode()
    answers = [urllib.error.URLError("no route"), content[:-9], content]

    def urlopen(url, timeout):
        assert url == E.HELLASWAG_URL
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return io.BytesIO(answer)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(E, "HELLASWAG_SHA256", hashlib.sha256(content).hexdigest())
    args = [str(trained.path), "--device=cpu", "--hellaswag", "--validate=false"]
    for message in r"cannot fetch HellaSwag from https://\S+ \(.*no route.*\); --hellaswag=", "not the published file":
        assert E.main(args) == 1 and re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
        assert not list(tmp_path.rglob("*.*"))
    for _ in range(2):
        assert E.main(args) == 0 and "\nhellaswag_acc_norm: " in capsys.readouterr().out
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["data/hellaswag/hellaswag_val.jsonl"]


# ---- Export ----------------------------------------------------------------------------------------------------------


def test_export(trained, tmp_path, capsys):
    """All weights, bit for bit, and the config, by the published description of the format."""
    path = tmp_path / "new" / "model.safetensors"
    assert evaluate(trained, capsys, f"--export={path}", "--validate=false") == {"exported": str(path)}
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data, end = json.loads(content[8:8 + length]), content[8 + length:], 0
    metadata, want = header.pop("__metadata__"), torch.load(trained.path, weights_only=True)["model"]
    assert content[8:9] == b"{" and (8 + length) % 8 == 0 and list(header) == list(want)
    for label, entry in header.items():
        (begin, stop), dtype = entry["data_offsets"], {"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]
        found = torch.frombuffer(bytearray(data[begin:stop]), dtype=dtype).reshape(entry["shape"])
        assert begin == end and dtype == want[label].dtype and torch.equal(found, want[label])  # no holes
        end = stop
    assert end == len(data) and metadata.keys() == flatten(trained.config).keys()
    assert metadata["model_dim"] == "48" and metadata["stage2.mtp_end"] == "1.0,0.0"
