"""What is done with a checkpoint: text, validation loss and bits per byte, HellaSwag, export; against the model of oracles.py.
And the commands of the README."""

import dataclasses
import hashlib
import importlib.util
import io
import json
import math
import re
import shlex
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracles
import train_gpt as T
from data.files import UserError
from records import evaluate as E
from test_checkpoint import train
from test_run import ENV, FINAL_WINDOW, ROOT, STAGES, VAL_TOKENS, corpus  # noqa: F401, a fixture

RECENT = STAGES[-1][1] - 1  # tokens that a continuation sees, beside the separator


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """A run that ended with a sample: log, checkpoint, its config and model."""
    run = train(corpus, tmp_path_factory.mktemp("trained"), "--save=true", "--sample_tokens=12", "--sample_prompt=the ")
    (path,) = run.saved.values()
    config, model, ops = E.load_model(path, {"device": "cpu"})
    return SimpleNamespace(text=run.text, val=run.val, path=path, config=config, model=model, ops=ops)


@pytest.fixture(scope="module")
def eloquent(trained):
    """The same, with weights that make it say many things: every token depends on those before it, by all the ways there are."""
    model = T.GPT(trained.config.model, trained.ops, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for label, param in model.named_parameters():
            param.copy_(trained.model.get_parameter(label))
            if param.dtype == torch.bfloat16:
                param.add_(torch.randn(param.shape, generator=generator), alpha=1.0 if param.ndim == 2 else 0.1)
        model.smear_lambda.fill_(0.8)
        model.bigram_lambdas.fill_(0.3)
    return SimpleNamespace(config=trained.config, model=model)


def oracle(model, rows):
    """Softcapped logits (N, V) of documents, side by side in one row, by the plain model with the view of the final validation."""
    params = {name: tensor.float() for name, tensor in model.state_dict().items()}
    freqs, scale = oracles.base_freqs(48 // 6 // 4), 0.1
    for old, new in zip(STAGES, STAGES[1:]):
        freqs, scale = oracles.yarn(freqs, scale, old[3], new[3])
    tokens, cu = sum(rows, []), np.cumsum([0, *map(len, rows)]).tolist()
    hashed = oracles.bigram_hash(tokens, len(params["bigram_embed"]))
    h = oracles.model_hidden(params, tokens, cu, hashed, S=STAGES[-1][2], L=FINAL_WINDOW, H=6, freqs=freqs, attn_scale=scale,
                             lambda_dtype=torch.bfloat16)
    return oracles.softcapped_logits(params, h)


# ---- Text ------------------------------------------------------------------------------------------------------------


def test_greedy_text_is_the_argmax_at_every_position(eloquent):
    """Of one teacher-forced pass over all of it, up to a row that is full; beyond, of one over the text that is still seen."""
    start, model = list(b"the "), eloquent.model
    ids = [*start, *E.generate(model, eloquent.config, start, RECENT + 1 - len(start), 0.0, 0)]
    likeliest = oracle(model, [[256, *ids[:-1]]])[:, :256].argmax(1).tolist()
    assert len(ids) == RECENT + 1 and likeliest[len(start):] == ids[len(start):] and len(set(ids)) > 20
    new = list(E.generate(model, eloquent.config, ids, 5, 0.0, 0))
    rows = [[256, *[*ids, *new[:i]][-RECENT:]] for i in range(5)]
    seen = torch.stack([oracle(model, [row])[-1, :256] for row in rows])
    assert new == seen.argmax(1).tolist() and {len(row) for row in rows} == {RECENT + 1}
    assert not torch.allclose(seen, oracle(model, [[256, *ids, *new]])[-6:-1, :256], atol=1e-4)  # what is no longer seen matters


@pytest.mark.parametrize("length", [1, 127, 128, 129])
def test_what_fills_the_row_changes_nothing(eloquent, length):
    tokens = torch.randint(0, 257, (length,)).tolist()
    view = E.final_attention(eloquent.model, eloquent.config, 256)
    with torch.no_grad():
        h = E.forward(eloquent.model, eloquent.config, [tokens], view)
        hashed = oracles.bigram_hash(tokens, eloquent.config.model.bigram_rows)
        want = eloquent.model(*(torch.tensor(x).int() for x in (tokens, [0, length])), {"bigram_embed": torch.tensor(hashed).int()}, view)
    assert len(h) == -(-length // 128) * 128 and torch.allclose(h[:length], want, rtol=0, atol=1e-4 * want.abs().max())


def test_temperature_seed_and_top_k(eloquent):
    def sampled(*args, seed=1):
        config = dataclasses.replace(eloquent.config, system=dataclasses.replace(eloquent.config.system, seed=seed))
        return list(E.generate(eloquent.model, config, list(b"the "), 20, *args))

    greedy, free = sampled(0.0, 0), sampled(3.0, 0)
    assert sampled(3.0, 1) == greedy == sampled(1e-4, 0) == sampled(0.0, 0, seed=2)
    assert free == sampled(3.0, 0) == sampled(3.0, 10**6) and free not in (sampled(3.0, 0, seed=2), sampled(1.0, 0), greedy)
    three = sampled(9.0, 3)
    z = oracle(eloquent.model, [[256, *b"the ", *three[:-1]]])[4:, :256]
    ranks = {row.topk(3).indices.tolist().index(id) for id, row in zip(three, z)}  # of a fourth one there is none
    assert len(ranks) > 1


def test_the_run_and_its_checkpoint_say_the_same(trained, capfd):
    assert T.main([f"--sample={trained.path}", "--device=cpu", "--tokens=12"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("the ") and len(said) > len("the \n") and f"\nsample:\n{said}" in trained.text


def test_characters_are_whole(trained, monkeypatch):
    """Bytes of a character come one at a time; broken ones, and the half of one at the end, become signs of that."""
    data = [*"a¿€😀b".encode(), 0xFF, *"ü".encode(), 0xE2, 0x82]
    monkeypatch.setattr(E, "generate", lambda model, config, ids, *rest: iter(data))
    pieces = list(E.sample(trained.model, dataclasses.replace(trained.config, system=T.System(sample_prompt="é"))))
    assert [piece for piece in pieces if piece] == ["é", "a", "¿", "€", "😀", "b", "\ufffd", "ü", "\ufffd"]


def test_the_prompt_may_be_anything(trained):
    for prompt in "", "ü😀", "\udcff":
        config = dataclasses.replace(trained.config, system=T.System(sample_prompt=prompt, sample_tokens=2))
        assert "".join(E.sample(trained.model, config)).startswith(prompt)


@pytest.mark.parametrize("args, message", [
    ("--promt=x", "unknown key --promt; the nearest is --prompt"), ("--sample_token=3", "nearest is --sample_tokens"),
    ("--temperature=hot", "--temperature=hot: expected float"), ("--temperature=-1", "--temperature=-1.0.*negative"),
    ("--temperature=nan", "--temperature=nan"), ("--top_k=-1", "--top_k=-1.*negative"), ("--tokens=x", "tokens=x: expected int"),
    ("--tokens=-1", "tokens=-1: must be 0 or more"), ("--sample=none.pt", "none.pt is no checkpoint of this trainer: No such file"),
    ("verbose", "argument 'verbose': write --key=value"), ("--model_dim=96", "other weights: .*embed"),
    ("--vocab_size=300", "no tokenizer is known for a vocabulary of 300|other weights")])
def test_mistakes_with_sample(trained, capsys, args, message):
    assert T.main([f"--sample={trained.path}", "--device=cpu", *args.split()]) == 1
    assert re.fullmatch(rf"error: .*({message}).*\n", err := capsys.readouterr().err), err


BPE = SimpleNamespace(encode_ordinary=lambda text: [len(word) for word in text.split()],
                      decode_single_token_bytes=lambda id: b"x" * (1 + id % 3))


def test_tokenizers(monkeypatch):
    """Bytes; the BPE of tiktoken where it can be had; no others."""
    encode, data = E.text_codec(257)
    assert encode("aü") == [97, 195, 188] and data(195) == b"\xc3"
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding={"gpt2": BPE}.get))
    assert E.text_codec(50257) == (BPE.encode_ordinary, BPE.decode_single_token_bytes)
    for broken in SimpleNamespace(get_encoding=lambda name: 1 / 0), None:
        monkeypatch.setitem(sys.modules, "tiktoken", broken)
        with pytest.raises(UserError, match=r"^no GPT-2 tokenizer \(\w+\): tiktoken fetches it once, online$"):
            E.text_codec(50257)
    with pytest.raises(UserError, match="no tokenizer is known for a vocabulary of 50258"):
        E.text_codec(50258)


# ---- Validation ------------------------------------------------------------------------------------------------------


def evaluate(trained, capsys, *args):
    """{key: value} of what the command prints."""
    assert E.main([str(trained.path), "--device=cpu", *args]) == 0, capsys.readouterr().err
    return dict(re.findall(r"^(\w+): (.*)$", capsys.readouterr().out, re.M))


def test_validation_is_that_of_the_run(trained, corpus, capsys):
    found = evaluate(trained, capsys)
    assert found["val_loss"] == trained.val["11"] and list(found) == ["val_loss", "val_bits_per_byte"]
    letters = (corpus.val[1:VAL_TOKENS + 1] != 256).sum()
    bits = float(found["val_loss"]) * VAL_TOKENS / math.log(2) / letters
    assert letters < VAL_TOKENS and abs(float(found["val_bits_per_byte"]) - bits) < 3e-4
    less = evaluate(trained, capsys, "--val_tokens=1536", f"--val_files={corpus.folder}/val_1.bin")
    assert less["val_loss"] != found["val_loss"] and evaluate(trained, capsys, "--validate=false") == {}


def test_bits_per_byte_of_longer_tokens(monkeypatch):
    """Tokens of 1, 2, 3 bytes by turns; the separator is predicted, and no text. Four tokens of 3 nats each in 1 + 3 + 2 bytes."""
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=lambda name: BPE))
    tokens = np.array([0, 5, 50256, 50251], np.uint16)
    assert E.bits_per_byte(T.PRESETS["record"], 3.0, tokens) == pytest.approx(4 * 3 / math.log(2) / (1 + 3 + 2))


def test_no_tokenizer_no_bits(trained, capsys, monkeypatch):
    monkeypatch.setattr(E, "text_codec", lambda size: (_ for _ in ()).throw(UserError("no GPT-2 tokenizer")))
    E.validate(trained.model, trained.config, trained.ops)
    assert capsys.readouterr().out == f"val_loss: {trained.val['11']}\nno bits per byte: no GPT-2 tokenizer\n"


# ---- HellaSwag -------------------------------------------------------------------------------------------------------

EXAMPLES = [{"ctx": context, "endings": endings, "label": label, "activity_label": "x"} for context, endings, label in (
    ("the sun", ["rise", "set it", "shone", "is"], 1), ("a", ["b", "cc", "ddd", "eeee"], 3),
    ("there is no more", ["tea", "rest at all", "ide", "one"], "2"))]


def test_losses_of_endings_are_those_of_one_at_a_time(eloquent):
    """Whatever stands beside them in the row: in rows of 128 tokens, of 256 and of 1536, and each on its own by the plain model."""
    encode, _ = E.text_codec(257)
    pairs = [(encode(example["ctx"]), encode(" " + ending)) for example in EXAMPLES for ending in example["endings"]]
    found = []
    for tokens in 128, 256, 1536:
        config = dataclasses.replace(eloquent.config, data=dataclasses.replace(eloquent.config.data, val_batch_tokens=tokens))
        found.append(list(E.ending_losses(eloquent.model, config, pairs)))
    for i, (context, ending) in enumerate(pairs):
        z = oracle(eloquent.model, [[256], [256], [256, *context, *ending]])
        want = oracles.mtp_losses(z[-len(ending) - 1:-1], ending, [1.0])
        assert all(losses[i].shape == want.shape and torch.allclose(losses[i], want, atol=1e-4) for losses in found)
    for before in [[256, *b"another"]], [[256, *b"another"], [256]]:  # what the two separators are for
        z = oracle(eloquent.model, [*before, [256, *context, *ending]])
        assert not torch.allclose(oracles.mtp_losses(z[-len(ending) - 1:-1], ending, [1.0]), want, atol=1e-3)


def made(tmp_path, lines):
    path = tmp_path / "made.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_accuracy(trained, tmp_path, capsys, monkeypatch):
    """Of three examples the least sum finds one right ending and the least mean two."""
    losses = [[3, 1, 5, 9], [1, 2, 2, 2], [1, 9, 2, 9], [9, 1, 9, 9], [1, 1, 9, 9], [9, 9, 9, 1], [9, 8, 7, 9], [9, 6, 9, 9],
              [9, 9, 0, 9], [1, 9, 9, 9], [9, 9, 9, 8], [7, 9, 9, 9]]
    right = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    path = made(tmp_path, map(json.dumps, EXAMPLES))
    lengths = [len(" " + ending) for example in EXAMPLES for ending in example["endings"]]
    totals = [(length * loss[0] / 2, loss[0] / 2) for length, loss in zip(lengths, losses)]
    monkeypatch.setattr(E, "ending_losses", lambda model, config, pairs: (
        torch.full((length,), loss[0] / 2) for length, loss in zip(lengths, losses)))
    found = evaluate(trained, capsys, f"--hellaswag={path}", "--validate=false")
    labels = [1, 3, 2]
    for name, key in ("acc", 0), ("acc_norm", 1):
        hits = [min(range(4), key=lambda j: totals[4 * i + j][key]) == label for i, label in enumerate(labels)]
        right = sum(hits) / 3
        assert found[f"hellaswag_{name}"] == f"{right:.4f}"
        assert found[f"hellaswag_{name}_standard_error"] == f"{math.sqrt(right * (1 - right) / 3):.4f}"
    assert found["hellaswag_examples"] == "3" and found["hellaswag_acc"] != found["hellaswag_acc_norm"]


@pytest.mark.parametrize("line", ["", "{", "3", "{}", *(json.dumps(EXAMPLES[0] | other) for other in (
    {"endings": ["a"]}, {"endings": [1, 2, 3, 4]}, {"label": 4}, {"label": None}))])
def test_lines_that_are_no_examples(trained, tmp_path, capsys, line):
    path = made(tmp_path, [json.dumps(EXAMPLES[0]), line])
    assert E.main([str(trained.path), "--device=cpu", "--hellaswag", str(path), "--validate=false"]) == 1
    assert capsys.readouterr().err == f"error: {path}, line 2: not an example with ctx, four endings and label\n"


@pytest.mark.parametrize("args, message", [
    ("--hellaswag=none.jsonl", "cannot read none.jsonl: No such file"), ("--hellaswag={d}/empty", "empty: no examples"),
    ("--hellaswag={d}/binary", "cannot read .*binary: not text"), ("--export={d}/empty/x", "cannot write .*empty/x.* folder"),
    ("--hellaswag={d}/long", "an example has 2007 tokens: --val_batch_tokens=1536"), ("--helaswag=x", "the nearest is --hellaswag"),
    ("--val_files=none_*.bin", "no files match .*none_"), ("--validate=maybe", "maybe: expected bool")])
def test_mistakes_with_evaluate(trained, tmp_path, capsys, args, message):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text(json.dumps(EXAMPLES[0] | {"ctx": "x" * 1999}))
    validate = [] if "val" in args else ["--validate=false"]
    assert E.main([str(trained.path), "--device=cpu", *validate, args.format(d=tmp_path)]) == 1
    assert re.fullmatch(rf"error: .*{message}.*\n", err := capsys.readouterr().err), err


def test_download(trained, tmp_path, capsys, monkeypatch):
    """Once; not what is something else; offline one line that names the way out. No file is left that is not whole."""
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
    for message in r"cannot fetch HellaSwag from https://\S+ \(.*no route.*\); --hellaswag=FILE takes", "not the published file":
        assert E.main(args) == 1 and re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
        assert not list(tmp_path.rglob("*.*"))
    for _ in range(2):
        assert E.main(args) == 0 and "\nhellaswag_acc_norm: " in capsys.readouterr().out
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")] == ["data/hellaswag/hellaswag_val.jsonl"]


# ---- Export ----------------------------------------------------------------------------------------------------------


def read_safetensors(path):
    """(metadata, tensors), by the published description of the format."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data, end, tensors = json.loads(content[8:8 + length]), content[8 + length:], 0, {}
    metadata = header.pop("__metadata__")
    assert content[8:9] == b"{" and (8 + length) % 8 == 0 and all(isinstance(x, str) for x in metadata.values())
    for label, entry in header.items():
        begin, stop = entry["data_offsets"]
        assert begin == end  # no holes
        end, dtype = stop, {"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]
        tensors[label] = torch.frombuffer(bytearray(data[begin:stop]), dtype=dtype).reshape(entry["shape"])
    assert end == len(data)
    return metadata, tensors


def test_export(trained, tmp_path, capsys):
    """All weights, bit for bit, and the config."""
    path = tmp_path / "new" / "model.safetensors"
    assert evaluate(trained, capsys, f"--export={path}", "--validate=false") == {"exported": str(path)}
    metadata, tensors = read_safetensors(path)
    want = torch.load(trained.path, weights_only=True)["model"]
    assert list(tensors) == list(want) and {x.dtype for x in tensors.values()} == {torch.bfloat16, torch.float32}
    assert all(tensors[label].dtype == x.dtype and torch.equal(tensors[label], x) for label, x in want.items())
    assert metadata["model_dim"] == "48" and metadata["stage2.mtp_end"] == "1.0,0.0"
    assert metadata.keys() == T.flatten(trained.config).keys()
    if importlib.util.find_spec("safetensors"):
        from safetensors.torch import load_file
        assert all(torch.equal(x, want[label]) for label, x in load_file(path).items())


# ---- Commands --------------------------------------------------------------------------------------------------------


def test_commands_of_the_readme(corpus, tmp_path):
    """As typed, but for a run of few and small steps, whose log goes elsewhere."""
    section = (ROOT / "README.md").read_text().partition("## Save, sample and evaluate")[2].partition("\n## ")[0]
    first, newest, *others = re.search("```bash\n(.*?)```", section, re.S)[1].strip().splitlines()
    (tmp_path / "data" / "hellaswag").mkdir(parents=True)
    made(tmp_path, map(json.dumps, EXAMPLES)).rename(tmp_path / "data" / "hellaswag" / "hellaswag_val.jsonl")

    def run(line, *more):
        command = shlex.split(line.replace("$CKPT", checkpoint), comments=True)
        assert command[0] == "python"
        env = ENV | {"DATA_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, ROOT / command[1], *command[2:], *more]
        done = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    checkpoint = ""
    assert "--save_every=" in first
    run(first, *corpus.args, f"--log_dir={tmp_path}/logs", "--save_every=6")
    checkpoint = subprocess.check_output(["bash", "-c", newest + "\necho $CKPT"], cwd=tmp_path, text=True).strip()
    assert checkpoint.endswith("state_step000011.pt") and len(list(tmp_path.glob("logs/*/*.pt"))) == 2
    speak, export, hellaswag = others
    assert run(speak, "--tokens=5").startswith("def ")
    assert re.search(r"^val_loss: \S+\nval_bits_per_byte: \S+$", run(export), re.M)
    assert read_safetensors(tmp_path / "model.safetensors")[0]["run_label"] == "run"
    assert "hellaswag_acc_norm: " in run(hellaswag)
    older = next(tmp_path.glob("logs/*/state_step000006.pt"))
    resume = re.search(r"`--resume=logs/\.\.\./state_step000048\.pt`", section)
    assert resume and "resumed: step 6, " in run(first, *corpus.args, f"--log_dir={tmp_path}/again", f"--resume={older}")


def test_evaluate_without_arguments_explains_itself(capsys):
    assert E.main([]) == 1 and "records/evaluate.py CHECKPOINT" in capsys.readouterr().out
    assert E.main(["--help"]) == 0 and "records/evaluate.py CHECKPOINT" in capsys.readouterr().out
