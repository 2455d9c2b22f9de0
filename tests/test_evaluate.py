"""Text, validation loss and bits per byte, HellaSwag and export of a checkpoint. The model of oracles.py judges the
numbers."""

import copy
import hashlib
import io
import json
import math
import re
import runpy
import struct
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
from data.loader import make_batch
from data.run import sample as sampling
from data.run.config import flatten, with_knobs
from data.run.program import UserError
from data.run.sample import generate, sample
from data.tokenizer import text_codec
from records import evaluate as E
from test_checkpoint import train
from test_run import VAL_TOKENS, corpus, final_view  # noqa: F401 (corpus is a fixture)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run with one step in each stage that ended with a sample: log, checkpoint, its config and model."""
    run = train(corpus, tmp_path_factory.mktemp("trained"), "--scheduled_steps=3", "--extension_steps=1", "--save=true",
                "--micro_batches=1", "--val_every=99", "--sample_tokens=12", "--sample_prompt=the ")
    run.checkpoint = str(run.saved[4])
    run.config, run.model, run.attention = T.load_model(run.checkpoint, {"device": "cpu"})
    return run


@torch.no_grad()
def scrambled(model):
    """The model with random parameters: each of them matters, and a token depends on all tokens before it."""
    generator = torch.Generator().manual_seed(7)
    for label, param in model.named_parameters():
        size = 0.5 if param.dtype == torch.float32 else 1.0 if "gate" in label else model.embed.size(1)**-0.5
        param.copy_(size * torch.randn(param.shape, generator=generator))
    model.lm_head[:, model.config.gate_id or 0] *= 8  # the gate, so that the pointer matters
    if model.config.bigram_normal:
        model.hash_ids.random_(99, generator=generator)
    return model


# ---- Text ------------------------------------------------------------------------------------------------------------

def test_temperature_seed_and_top_k(trained):
    """Greedy text is the argmax at every position of one pass over it."""
    model = scrambled(copy.deepcopy(trained.model))
    params = {name: tensor.float() for name, tensor in model.state_dict().items()}

    def text(temperature=0.0, top_k=0, seed=1, count=10):
        config = with_knobs(trained.config, seed=seed)
        return list(generate(model, config, trained.attention, b"the ", count, temperature, top_k))

    def logits(new):
        ids = [256, *b"the ", *new[:-1]]
        hashed = oracles.bigram_hash(ids, len(params["bigram_embed"]))
        h = oracles.model_hidden(params, ids, [0, len(ids)], hashed, **final_view())
        return oracles.softcapped_logits(params, h)[4:, :256]
    greedy, free, three = text(count=100), text(3.0), text(9.0, 3)
    assert greedy == logits(greedy).argmax(1).tolist() and len(set(greedy)) > 20
    assert text(3.0, 1) == text(1e-4) == text(1e-50) == greedy[:10] and text(3.0, 10**6) == free
    assert free not in (text(3.0, 0, 2), text(1.0), greedy[:10])
    ranks = {row.topk(3).indices.tolist().index(id) for id, row in zip(three, logits(three))}  # there is no fourth
    assert len(ranks) > 1


def test_the_run_and_its_checkpoint_say_the_same(trained, capfd):
    assert T.main([f"--sample={trained.checkpoint}", "--device=cpu", "--tokens=12"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("the ") and len(said) > len("the \n") and f"\nsample:\n{said}" in trained.text


BPE = SimpleNamespace(encode_ordinary=lambda text: [len(word) for word in text.split()],
                      decode_single_token_bytes=lambda id: b"x" * (1 + id % 3))


@pytest.mark.parametrize("prompt", ["é", "", "\udcff"])
def test_characters(trained, monkeypatch, prompt):
    """The bytes of a character come one at a time. A replacement character stands for broken and half characters."""
    data = [*"a¿€😀b".encode(), 0xFF, *"ü".encode(), 0xE2, 0x82]
    monkeypatch.setattr(sampling, "generate", lambda *_: iter(data))
    config = with_knobs(trained.config, sample_prompt=prompt)
    assert "".join(sample(trained.model, config, None)) == prompt + "a¿€😀b\ufffdü\ufffd"


@pytest.mark.parametrize("count", [1, 127, 128, 255])
def test_any_number_of_documents(trained, count):
    """Those that follow change nothing, nor does the padding, a document of its own."""
    documents = [[256, 5 + i % 9] for i in range(count + 1)]
    found, more = (sampling.forward(trained.model, trained.config, part, trained.attention)[0].h[:2 * count]
                   for part in (documents[:count], documents))
    torch.testing.assert_close(found, more, rtol=0, atol=1e-5)


def test_tokenizers_and_bits_per_byte(monkeypatch):
    encode, decode = text_codec(257)
    assert encode("aü") == [97, 195, 188] and decode(195) == b"\xc3"
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding={"gpt2": BPE}.get))
    assert text_codec(50257) == (BPE.encode_ordinary, BPE.decode_single_token_bytes)
    tokens = np.array([0, 5, 50256, 50251])  # of 1, 3, 0 (a separator is no text) and 2 bytes, each of 3 nats
    bits = E.bits_per_byte(T.PRESETS["record"].config, 3.0, tokens)
    assert bits == pytest.approx(4 * 3 / math.log(2) / (1 + 3 + 2))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for size, message in (50257, r"^no GPT-2 tokenizer \(\w+\): tiktoken fetches it once, online$"), (
            50258, "no tokenizer is known for a vocabulary of 50258"):
        with pytest.raises(UserError, match=message):
            text_codec(size)


# ---- Validation ------------------------------------------------------------------------------------------------------

def evaluate(trained, capsys, *args):
    """{key: value} of what the command prints."""
    assert E.main([trained.checkpoint, "--device=cpu", *args]) == 0, capsys.readouterr().err
    return dict(re.findall(r"^([\w ]+): (.*)$", capsys.readouterr().out, re.M))


def test_validation_is_that_of_the_run(trained, corpus, tmp_path, capsys, monkeypatch):
    """It says which files it passes over, and needs no tokenizer for the loss."""
    found = evaluate(trained, capsys)
    letters = (corpus.val[1:VAL_TOKENS + 1] != 256).sum()
    bits = pytest.approx(float(trained.val["4"]) * VAL_TOKENS / math.log(2) / letters, abs=3e-4)
    assert letters < VAL_TOKENS and list(found) == ["val_loss", "val_bits_per_byte"]
    assert found["val_loss"] == trained.val["4"] and float(found["val_bits_per_byte"]) == bits
    monkeypatch.setattr(E, "text_codec", Mock(side_effect=UserError("reason")))
    (tmp_path / "val_1.bin").symlink_to(corpus.folder / "val_1.bin")
    oracles.write_shard(tmp_path / "val_0.bin", [])
    assert E.main([trained.checkpoint, "--device=cpu", "--val_tokens=1536", f"--val_files={tmp_path}/val_*.bin"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"val_loss: (\S+)\nno bits per byte: reason\n", out)[1] != found["val_loss"]
    assert err == f"warning: {tmp_path}/val_0.bin holds no tokens and is passed over\n"


# ---- HellaSwag -------------------------------------------------------------------------------------------------------

EXAMPLES = [{"ctx": context, "endings": endings, "label": label, "activity_label": "x"} for context, endings, label in (
    ("the sun", ["rise", "set it", "shone", "is"], 1), ("a", ["b", "cc", "ddd", "eeee"], 3),
    ("there is no more", ["tea", "rest at all", "ide", "one"], "2"))]


def test_hellaswag_is_fetched_once_and_scored(trained, tmp_path, capsys, monkeypatch):
    """The file must be the published one, and no part of a file is left. The least sum and the least mean of the losses
    choose different endings: here two and three of three are right."""
    content = "".join(json.dumps(example) + "\n" for example in EXAMPLES).encode()
    fetch = Mock(side_effect=[urllib.error.URLError("no route"), io.BytesIO(content[:-9]), io.BytesIO(content)])
    monkeypatch.setattr(urllib.request, "urlopen", fetch)
    monkeypatch.setattr(E, "HELLASWAG_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    for message in r"cannot fetch HellaSwag from https://\S+ \(.*no route.*\); --hellaswag=", "not the published file":
        with pytest.raises(UserError, match=f"^.*{message}.*$"):
            E.main([trained.checkpoint, "--device=cpu", "--hellaswag", "--validate=false"])
        assert not list(tmp_path.rglob("*.*"))
    assert "hellaswag_acc_norm" in evaluate(trained, capsys, "--hellaswag", "--validate=false")
    means = [3, 1, 5, 9, 1, 9, 9, .9, 1, 9, .9, 9]
    monkeypatch.setattr(E, "ending_losses", lambda model, config, attention, pairs: (
        torch.full((len(ending),), float(mean)) for (_, ending), mean in zip(pairs, means)))
    assert evaluate(trained, capsys, "--hellaswag", "--validate=false") == {
        "hellaswag_examples": "3", "hellaswag_acc": "0.6667", "hellaswag_acc_standard_error": "0.2722",
        "hellaswag_acc_norm": "1.0000", "hellaswag_acc_norm_standard_error": "0.0000"}
    assert [call.args for call in fetch.call_args_list] == [(E.HELLASWAG_URL,)] * 3
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["data/hellaswag/hellaswag_val.jsonl"]


@pytest.mark.parametrize("args, message", [
    ("--sample=CKPT --promt=x", "unknown key --promt; the nearest is --prompt"), ("--sample=CKPT x", "argument 'x'"),
    ("--sample=CKPT --temperature=hot", "--temperature=hot: expected float"),
    ("--sample=CKPT --temperature=nan", "--temperature=nan"), ("--sample=CKPT --top_k=-1", "--top_k=-1.*negative"),
    ("--sample=none.pt", "none.pt is no checkpoint of this trainer: No such file"),
    ("--sample=CKPT --model_dim=96", r"other parameters than this train_gpt\.py: .*embed"),
    ("CKPT --helaswag=x", "the nearest is --hellaswag"), ("CKPT --hellaswag=none", "cannot read none .No such"),
    ("CKPT --hellaswag=empty", "empty: no examples"), ("CKPT --hellaswag=binary", "cannot read binary .*utf-8"),
    ("CKPT --hellaswag=long", "an example has 2007 tokens: --val_batch_tokens=768"),
    *((f"CKPT --hellaswag=line{i}", "line 2: not an example with ctx, four endings and label") for i in range(4)),
    ("CKPT --export=empty/x", "cannot write empty/x"),
    ("CKPT --val_files=none_*.bin --validate=true", "no files match .*none_"),
    ("CKPT --val_files=CWD/val_gpt2.bin", "val_gpt2.bin: token 50256 but a vocabulary of 257"),
    ("CKPT --val_files=CWD/val_few.bin", "val_few.bin: no document separator .token 256"),
    ("CKPT --val_files=CWD/val_0.bin", "val_0.bin: no file holds a token")])
def test_errors_are_one_line(trained, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    good, long, few, wrong = (json.dumps(EXAMPLES[0] | changes) for changes in (
        {}, {"ctx": "x" * 1999}, {"endings": ["a"]}, {"label": 4}))
    lines = {f"line{i}": f"{good}\n{line}\n" for i, line in enumerate(["", "{", few, wrong])}
    for name, content in {"empty": "", "binary": "\xff\xfe", "long": long, **lines}.items():
        (tmp_path / name).write_text(content, "latin-1")
    for name, tokens in {"gpt2": [50256, *[97] * 4000], "few": [97] * 4000, "0": []}.items():
        oracles.write_shard(tmp_path / f"val_{name}.bin", tokens)
    argv = [*args.replace("CKPT", trained.checkpoint).replace("CWD", str(tmp_path)).split(), "--device=cpu"]
    with pytest.raises(UserError, match=f"^.*({message}).*$"):
        if args.startswith("--sample"):
            sampling.sample_command(argv, T.RECORD74, T.load_model)
        else:
            E.main(argv + ["--validate=false"] * ("--val" not in args))


def test_export(trained, tmp_path, capsys):
    """All weights, bit for bit, and the config, by the published description of the format. No reader for two lanes."""
    path = tmp_path / "new" / "model.safetensors"
    assert evaluate(trained, capsys, f"--export={path}", "--validate=false") == {
        "exported": str(path), "no reader": "plain_gpt.py does not know two lanes"}
    content, end = path.read_bytes(), 0
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    metadata, want = header.pop("__metadata__"), torch.load(trained.checkpoint, weights_only=True)["model"]
    assert content[8:9] == b"{" and (8 + length) % 8 == 0 and list(header) == list(want)
    for label, x in want.items():
        begin, end = end, end + x.nbytes  # no holes
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[x.dtype]
        assert header[label] == {"dtype": dtype, "shape": [*x.shape], "data_offsets": [begin, end]}
        assert data[begin:end] == x.view(-1).view(torch.uint8).numpy().tobytes()
    assert end == len(data) and metadata.keys() == flatten(trained.config).keys() and [*path.parent.iterdir()] == [path]
    assert metadata["model_dim"] == "48" and metadata["stage2.mtp_end"] == "1.0,0.0"


@pytest.mark.parametrize("args", [
    "--preset=cpu --ngram_rows=60,200,0,500",
    "--preset=single --model_dim=192 --ngram_rows=60,500 --device=cpu --dtype=float32 --micro_batches=1",
    "--preset=cpu --model_dim=192 --ngram_rows=0 --bigram_tables=2 --bigram_signs=false --pointer=false --layer0=narrow"
    " --backout_layer=none --layer1.skip_from=0 --layer2=attention=false --layer3=value_embed"])
def test_the_reader_is_the_model(args, tmp_path, monkeypatch, capsysbinary):
    """Its log-probabilities, in a document longer than all windows; its text, as of --sample, after more tokens than it
    reads. It needs no module of ours, and does not come with a model that it does not know."""
    config = T.parse_config([*args.split(), "--stage4.short_window=9", "--stage4.long_window=25", "--final_window=40",
                             "--stage4.max_doc_len=80", "--sample_tokens=20",
                             "--sample_prompt=" + "~ " * 60 + "The " * 79])  # a pointer to 79 tokens copies no ~
    cpu, N, rows = torch.device("cpu"), 144, [*range(9), *range(9, 144, 15)]
    model = scrambled(T.GPT(config.model, T.kernels.choose_ops(cpu, "torch")[0], torch.float32, cpu))
    tokens = np.array([config.model.bos_id, *np.random.default_rng(0).integers(0, 30, N)])
    batch = make_batch(tokens, np.array([N]), config, cpu, sampling.hash_ids(model))
    attention = T.attention_settings(config, cpu, model.dtype)[-1]
    with torch.no_grad():
        output = model(batch.tokens, batch.documents, batch.row_ids, attention)
        want = torch.stack([sampling.log_probabilities(model, output, row) for row in rows])

    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding={"gpt2": BPE}.get))
    monkeypatch.setattr(E, "load_model", lambda path, knobs: (config, model, attention))
    file, reader = (str(tmp_path / name) for name in ("model.safetensors", "plain_gpt.py"))
    assert E.main(["any", f"--export={file}", "--validate=false"]) == 0
    with pytest.raises(UserError, match="^the first argument, the checkpoint, is empty; --save=true makes one$"):
        E.main([""])  # as of an unset variable
    monkeypatch.setattr(sys, "argv", [reader, file, config.system.sample_prompt, "20"])
    plain, text = runpy.run_path(reader, run_name="__main__"), "".join(sample(model, config, attention))
    said = f"exported: {file}\nreader: {reader}\n{text}\n"
    assert capsysbinary.readouterr().out.decode(errors="replace") == said
    # Sums in another order differ by 7e-6 here. RMS_EPS times 2 makes 2e-4, a wrong term or factor more.
    got = plain["Model"](file)(batch.tokens.long())[rows]
    torch.testing.assert_close(got, want[:, :config.model.vocab_size], rtol=0, atol=5e-5)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    example = (E.READER.parent / "guide.md").read_text().rpartition("import torch\nfrom plain_gpt")
    exec("".join(example[1:]).partition("```")[0], told := {})
    assert told["log_p"].shape == (4, config.model.vocab_size)
    sys.modules.pop("plain_gpt")

    modules = re.findall(r"^ *(?:import|from) (\w+)", E.READER.read_text(), re.M)
    assert {*modules} - sys.stdlib_module_names == {"torch", "tiktoken"}
    with pytest.raises(SystemExit, match=r"^error: \S+ is no export for this program \(.*\)$"):
        plain["main"](reader)
    model.register_parameter("gain", torch.nn.Parameter(torch.zeros(1)))
    assert E.unreadable(model) == "the parameter gain"
