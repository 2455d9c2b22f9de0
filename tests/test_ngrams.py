"""The table of n-grams: rows and signs, gradients and updates of the rows that occur, and runs with such a table."""

import functools
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data.loader as L
import train_gpt as T
import triton_kernels as tk
from data.run.machine import Runtime
from data.run.memory import state_bytes
from data.run.sample import forward, log_probabilities
from forks import Forks, rank_variables
from oracles import gpu, only_gpu, rows_step
from test_checkpoint import read_logs, train
from test_embedding import sorted_ids
from test_run import STEPS, VAL_BATCH, corpus, finish, start  # noqa: F401 (corpus is a fixture)

TABLE, ROWS, CPU = "--ngram_rows=300,203", 503, torch.device("cpu")
OPS, _ = tk.choose_ops(CPU, "torch")


# ---- Rows and signs --------------------------------------------------------------------------------------------------
def test_rows_of_all_orders():
    """Against Python's numbers. The last row of each part is for tokens without a whole n-gram."""
    tokens = np.random.default_rng(0).integers(0, 65536, 500).astype(np.uint16)
    factors = 36313, 27191, 51637, 44987, 58379, 40507, 62539, 33941
    assert T.Model(vocab_size=50257, bigram_tables=0.1).ngrams == [(2, 5030)]
    for rows in (300, 0, 70), (0, 1000), (10**6,), (2**30, 2**20, 2**10), (0, 0, 0, 90, 0, 0, 10**6):
        ngrams = T.Model(ngram_rows=rows).ngrams
        assert ngrams == [(order, count) for order, count in zip(range(2, 9), rows) if count]
        got, start = L.ngram_rows(tokens, ngrams).reshape(len(ngrams), -1), 0
        assert got.dtype == np.int32
        for (order, count), part in zip(ngrams, got):
            for i, row in enumerate(part.tolist()):
                history = [int(tokens[i - j]) for j in range(order) if j <= i]
                hashed = functools.reduce(int.__xor__, (a * b for a, b in zip(factors, history)))
                assert row == start + (hashed % (count - 1) if len(history) == order else count - 1)
            start += count
            if count > 10**5:
                assert len(np.unique(part)) > 490
    for n in 1, 2, 3:
        assert L.ngram_rows(tokens[:n], [(2, 9), (4, 5), (8, 3)]).tolist()[n:] == [13] * n + [16] * n
    for n, order in product(range(1, 9), range(2, 9)):
        rows, signs = L.ngram_rows(tokens[:n], [(order, 1000)]), L.sign_rows(tokens[:n], [(order, 1000)])
        assert len(rows) == n and (rows[:order - 1] == 999).all() and (rows[order - 1:] < 999).all()
        assert len(signs) == n and not signs[:order - 1].any() and signs[order - 1:].all()


def test_embedding_of_a_token():
    """The sum over the orders of a row times its signs, which are those of every model; tokens without a whole n-gram
    have the signs of row 0."""
    config = T.Model(vocab_size=50257, model_dim=16, num_heads=2, bigram_signs=True,
                     ngram_rows=(100, 0, 50, 0, 0, 0, 30))
    assert config.ngram_table == "ngram_embed" and not any(p.label == "bigram_embed" for p in T.param_table(config))
    model, other = (T.GPT(config, OPS, torch.float32, CPU) for _ in range(2))
    assert model.ngram_embed.shape == (180, 16) and torch.equal(model.signs, other.signs)
    assert model.signs.shape == (8192, 16) and (model.signs.abs() == 1).all() and abs(model.signs.mean()) < 0.02
    assert len(model.signs.unique(dim=0)) > 7000
    torch.nn.init.normal_(model.ngram_embed)
    tokens = torch.randint(50257, (40,), dtype=torch.int32)
    def row_ids(tokens):
        return {name: torch.from_numpy(made(tokens.numpy().astype(np.uint16), config.ngrams))
                for name, made in (("ngram_embed", L.ngram_rows), ("signs", L.sign_rows))}
    rows = row_ids(tokens)
    signs, ids, factors = [], tokens.tolist(), (1, 1, 20011, 30011, 44021, 52609, 37013, 28001)
    for order in 2, 4, 8:
        mixed = (functools.reduce(int.__xor__, (a * b for a, b in zip(factors, ids[end::-1][:order])))
                 for end in range(order - 1, 40))
        signs.append([0] * (order - 1) + [each % 8192 for each in mixed])
    assert rows["signs"].dtype == torch.int32 and rows["signs"].tolist() == sum(signs, [])
    parts = zip(rows["ngram_embed"].view(3, -1), signs)
    wanted = sum(model.ngram_embed[part] * model.signs[some] for part, some in parts)
    torch.testing.assert_close(model.lookup(tokens, rows)[1], wanted)
    one = model.lookup(tokens[:1], row_ids(tokens[:1]))
    assert torch.isfinite(one[1]).all() and one[1].shape == (1, 16)


# ---- Gradients and updates -------------------------------------------------------------------------------------------
@pytest.fixture(params=["kernels", "plain"])
def ops(request, monkeypatch):
    """The operations of the table; a kernel that falls back to its reference fails."""
    names = "embedding_grad", "signed_rows", "update_few_rows"
    plain = SimpleNamespace(**{name: getattr(tk, f"{name}_ref") for name in names})
    if request.param == "plain":
        return plain
    for name in names:
        monkeypatch.setattr(tk, f"{name}_ref", None)
    return SimpleNamespace(**{name: getattr(tk, name) for name in names})


@pytest.mark.parametrize("rows, width, n", [(1, 8, 3), (50, 24, 40), (400, 300, 64), only_gpu(10**5, 768, 24576)])
def test_updates_are_those_of_all_rows(rows, width, n, ops, device):
    """Five, against a pass over all rows in fp64; other rows stay. Numbers may be tensors."""
    table = torch.randn(rows, width, device=device)
    few = tk.FewRows(table, min(rows, 3 * n))
    v, last = torch.zeros(rows, 1, device=device), torch.zeros(rows, 1, dtype=torch.int32, device=device)
    seen = torch.arange(rows, device=device)[:4 * n]  # the oracle follows no other rows
    exact, exact_v, beta2, eps = table[seen].double(), v[seen].double(), 0.9, 1e-3
    for t in range(1, 6):
        before, wanted = [x.clone() for x in (table, v, last)], torch.zeros_like(exact)
        for _ in range(2 + t % 2):
            ids = torch.randint(0, min(rows, 4 * n), (n,), dtype=torch.int32, device=device)
            ids[:n // 3] = ids[0].item()
            leaf, upstream = table.clone().requires_grad_(), torch.randn(n, width, device=device)
            (found,) = tk.lookup(leaf, 1, sorted_ids(ids), ops, few=few)
            assert torch.equal(found, table[ids.long()])
            found.backward(upstream)
            assert leaf.grad is None
            wanted.index_add_(0, ids.long(), upstream.double())
        occurred, count = wanted.any(1), few.count.item()
        listed = few.rows[:count].long()
        assert torch.equal(listed.sort().values, occurred.nonzero()[:, 0])
        assert torch.equal(few.place[listed], torch.arange(count, dtype=torch.int32, device=device))
        assert (few.place >= 0).sum() == count
        # A sum has up to 8192 numbers in fp32. The reference made the largest error seen on a GPU, 1.1e-4.
        torch.testing.assert_close(few.grad[:count].double(), wanted[listed], rtol=1e-5, atol=5e-4)
        numbers = [torch.tensor(float(x), device=device) if t % 2 else x for x in (t, 0.1 / t, 0.05)]
        ops.update_few_rows(table, v, last, few.grad, few.place, few.rows, few.count, *numbers, beta2, eps)
        exact, exact_v = rows_step(exact, exact_v, wanted, 0.1 / t, 0.05, beta2, eps, one_number=True)
        torch.testing.assert_close(table[seen].double(), exact, rtol=1e-5, atol=1e-5)
        assert few.count.item() == 0 and (few.place == -1).all() and not few.grad.any()
        idle = torch.ones(rows, dtype=torch.bool, device=device)
        idle[seen[occurred]] = False
        assert all(torch.equal(new[idle], old[idle]) for new, old in zip((table, v, last), before))
        assert (last[seen[occurred]] == t).all()
    torch.testing.assert_close(v[seen].double() * beta2 ** (5 - last[seen].double()), exact_v, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("orders, signed", [(1, True), (2, False), (2, True), (3, True)])
@pytest.mark.parametrize("rows, width, n", [(30, 24, 7), (400, 300, 64), only_gpu(10**5, 768, 24576)])
def test_sum_over_orders(rows, width, n, orders, signed, ops, device):
    """Value and gradient against autograd in fp64, with gradients of the whole table and of few rows."""
    ids = torch.randint(rows, (orders * n,), dtype=torch.int32, device=device)
    sign_ids = torch.randint(5, ids.shape, dtype=torch.int32, device=device)
    signs = (torch.randint(2, (5, width), device=device) * 2.0 - 1, sign_ids) if signed else ()
    table = torch.randn(rows, width, device=device, requires_grad=True)
    upstream = torch.randn(n, width, device=device)
    exact = table.detach().double().requires_grad_()
    wanted = exact[ids.long()] * (signs[0].double()[sign_ids.long()] if signed else 1)
    wanted = wanted.view(orders, n, width).sum(0)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, upstream.double())
    few = tk.FewRows(table.detach(), orders * n)
    for rows_of in few, None:
        (found,) = tk.lookup(table, 1, sorted_ids(ids), ops, few=rows_of, orders=orders, signs=signs)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
        found.backward(upstream)
    torch.testing.assert_close(table.grad.double(), wanted_grad, rtol=1e-5, atol=1e-5)
    listed = few.rows[:few.count.item()].long()
    torch.testing.assert_close(few.grad[:len(listed)].double(), wanted_grad[listed], rtol=1e-5, atol=1e-5)
    assert set(listed.tolist()) == set(ids.tolist())


def test_the_sum_has_the_dtype_of_table_and_signs(device):
    """As in a run with --dtype=float32, whose table is bf16."""
    table = torch.randn(9, 24, device=device).bfloat16()
    ids = torch.randint(9, (8,), dtype=torch.int32, device=device)
    signs = torch.ones(2, 24, device=device), ids % 2
    for arguments in (table, ids, 2), (table, ids, 2, *signs):
        wanted = tk.signed_rows_ref(*arguments)
        found = tk.signed_rows(*arguments)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)


@gpu
def test_table_of_more_than_two_billion_numbers(device):
    rows, width = 2**31 // 768 + 5, 768
    table, signs = torch.zeros(rows, width, dtype=torch.bfloat16, device=device), torch.ones(1, width, device=device)
    ids = torch.tensor([rows - 1, 0, rows - 2], dtype=torch.int32, device=device)
    new = torch.randn(3, width, device=device).bfloat16()
    few, zeros = tk.FewRows(table, 3), torch.zeros_like(ids)
    tk.embedding_grad(few.grad, sorted_ids(ids), -new, *few.places)
    v, last = torch.zeros(rows, 1, device=device), torch.zeros(rows, 1, dtype=torch.int32, device=device)
    tk.update_few_rows(table, v, last, few.grad, few.place, few.rows, few.count, 1, 1.0, 0.0, 0.0, 0.0)
    wanted = new.float() / new.float().square().mean(1, keepdim=True).sqrt()
    for found in table[ids.long()], tk.signed_rows(table, ids, 1, signs.bfloat16(), zeros):
        torch.testing.assert_close(found.float(), wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("rows, width, n", [(60, 24, 300), only_gpu(10**5, 384, 65536)])
def test_gradients_do_not_depend_on_places(rows, width, n, ops, device):
    """The same bits for places in the order of the programs, and for places given before in another order."""
    batches = [(torch.randint(rows, (n,), dtype=torch.int32, device=device), torch.randn(n, width, device=device))
               for _ in range(2)]
    for ids, _ in batches:
        ids[:n // 3] = ids[0].item()
    occurred, found = torch.cat([ids for ids, _ in batches]).unique().long(), []
    some = occurred[torch.randperm(len(occurred), device=device)]
    for places in occurred[:0], some[::2], some:
        few = tk.FewRows(torch.zeros(rows, width, device=device), len(occurred))
        few.place = torch.full((rows + 16,), -1, dtype=torch.int32, device=device)[16:]  # a kernel must not read before
        for given in occurred.flip(0), places:  # the second alone remains
            few.load(given, (given is not places) + torch.zeros(len(given), width, device=device))
        assert torch.equal(few.place[places].cpu(), torch.arange(len(places), dtype=torch.int32))
        assert (few.place >= 0).sum() == few.count.item() == len(places)
        for ids, upstream in batches:
            ops.embedding_grad(few.grad, sorted_ids(ids), upstream, *few.places)
        assert few.count.item() == len(occurred) and torch.equal(few.rows.sort().values, occurred.int())
        found.append(few.grad[few.place[occurred].long()])
    assert found[0].any(1).all() and all(torch.equal(found[0], other) for other in found[1:])


@gpu
def test_lists_of_any_length_take_the_same_kernels(device):
    """Ranks exchange lists of any length; a length must not compile a kernel while the clock runs."""
    few, compiled = tk.FewRows(torch.zeros(900, 768, dtype=torch.bfloat16, device=device), 900), set()
    caches = [kernel.device_caches[torch.cuda.current_device()][0]
              for kernel in (tk._sum_rows_kernel, tk._sum_pieces_kernel)]
    for n in 160, 1, 2, 15, 16, 17, 64, 333:
        ids = torch.randint(900, (n,), dtype=torch.int32, device=device)
        upstream = torch.randn(n, 768, dtype=torch.bfloat16, device=device)
        tk.embedding_grad(few.grad, sorted_ids(ids), upstream, *few.places)
        compiled.add(tuple(map(len, caches)))
    assert len(compiled) == 1


# ---- What a token sees -----------------------------------------------------------------------------------------------
ORDERS = 3  # bigrams, trigrams, 4-grams


def random_model(*args):
    """Config, a model whose tables are random, and the attention of the last validation."""
    config = T.parse_config(["--preset=cpu", "--ngram_rows=500,300,200", "--bigram_signs=true", *args])
    model = T.GPT(config.model, OPS, torch.float32, CPU)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for label in "ngram_embed", "lm_head", "mlp_bank", "xsa_lambdas", "mix_lambdas", "dynamic_out":
            param = model.get_parameter(label)
            param.add_(torch.randn(param.shape, generator=generator) * 0.3)
    return config, model, T.attention_settings(config, CPU, torch.float32)[-1]


def predictions(documents, *args):
    """Log-probabilities (tokens, classes) of `random_model` for packed documents."""
    config, model, attention = random_model(*args)
    with torch.no_grad():
        output, _ = forward(model, config, documents, attention)
        return torch.stack([log_probabilities(model, output, row) for row in range(sum(map(len, documents)))])


def test_no_token_sees_what_it_must_not():
    """Change one token. Predictions before the token stay as they are, bit for bit. In a model whose keys do not lag,
    predictions in the next document stay, too, unless its first n-grams contain the token (K1)."""
    tokens = np.random.default_rng(0).integers(0, 256, 60)
    first, second = [256, *tokens[:30].tolist()], [256, *tokens[30:].tolist()]
    layers = T.parse_config(["--preset=cpu"]).model.layers
    border, no_lag = len(first), [f"--layer{i}.long=false" for i, layer in enumerate(layers) if layer.long]
    for args in (), no_lag, [*no_lag, "--pointer=true"]:
        wanted = predictions([first, second], *args)
        assert torch.allclose(wanted.exp().sum(1), torch.ones(len(wanted)), atol=1e-5)
        for place in 5, border - ORDERS - 1, border - ORDERS, border - 1, border + 1, border + 20:
            documents = [first.copy(), second.copy()]
            changed, i = (documents[0], place) if place < border else (documents[1], place - border)
            changed[i] = (changed[i] + 1) % 256
            differs = (predictions(documents, *args) != wanted).any(1)
            assert differs[place] and not differs[:place].any()
            assert not args or differs[border:].any() == (place >= border - ORDERS)


def test_memory(corpus):  # noqa: F811
    """The estimate counts what the optimizer holds for the table."""
    config = T.parse_config([*corpus.args, TABLE])
    with_table, without = (sum(state_bytes(config, [p for p in T.param_table(config.model) if keep(p)]))
                           for keep in (lambda p: True, lambda p: p.optim != "rows"))
    optimizer = T.NorMuonAndAdam(T.GPT(config.model, OPS, torch.float32, CPU), config, Runtime(0, 1, CPU), OPS)
    few, state = optimizer.tables["ngram_embed"].few, optimizer.state["ngram_embed"]
    held = [optimizer.params["ngram_embed"], few.grad, few.place, *state.values()]
    assert with_table - without == sum(x.numel() * x.element_size() for x in held)


# ---- Several ranks ---------------------------------------------------------------------------------------------------
# Three pieces of validation: the second of two ranks has one less than the first, the last of four has none.
RANKS = (TABLE, "--bigram_signs=true", f"--val_tokens={3 * VAL_BATCH // 2}", f"--val_batch_tokens={VAL_BATCH // 2}",
         "--val_share=0", "--micro_batches=4", "--save_every=5", "--keep=99")


def on_ranks(corpus, logs, ranks, *args):  # noqa: F811
    out, err, status = finish(start(corpus, *RANKS, *args, f"--log_dir={logs}", ranks=ranks))
    assert status == 0, out + err
    return read_logs(logs)


def near(got, wanted, saved, rest=False):
    """Two runs have the same table in checkpoint `saved`; rest: Adam is at rest, and only gradients are rounded."""
    states = [torch.load(run.saved[saved], weights_only=True) for run in (got, wanted)]
    ours, theirs = (state["optimizer"]["ngram_embed"] for state in states)
    assert ours.keys() == theirs.keys() and torch.equal(ours["last"], theirs["last"]) and theirs["v"].any()
    bound = 0.02 if rest else 0.15  # largest seen: 0.016 and 0.062, of waiting gradients; of losses 1e-4
    assert (ours["v"] - theirs["v"]).norm() <= bound * theirs["v"].norm()
    if "rows" in theirs:
        assert len(ours["rows"]) == len({*ours["rows"].tolist()})
        assert {*ours["rows"].tolist()} == {*theirs["rows"].tolist()}
        dense = [torch.zeros(ROWS, part["grad"].size(1)).index_add_(0, part["rows"], part["grad"].float())
                 for part in (ours, theirs)]
        assert (dense[0] - dense[1]).norm() <= bound * dense[1].norm()
    ours, theirs = (state["model"]["ngram_embed"].float() for state in states)
    assert ours.shape == (ROWS, 48) and (ours - theirs).norm() <= bound * theirs.norm() and theirs.any() != rest
    losses = [[float(loss) for loss in run.val.values()] for run in (got, wanted)]
    assert losses[0] == pytest.approx(losses[1][-len(losses[0]):], abs=2e-4 if rest else 5e-3)


@pytest.mark.parametrize("rest", [True, False])
def test_ranks_share_the_table(corpus, tmp_path, rest):  # noqa: F811
    """Two, three and four ranks train the table of one."""
    more = [f"--micro_batches={6 if rest else 4}", *(f"--stage{i}.batch_tokens=576" for i in (1, 2, 3, 4))]
    more += ["--adam_lr=0", "--table_lr=0"] * rest
    one = train(corpus, tmp_path / "1", *RANKS, *more)
    for ranks in (2, 3) if rest else (4,):
        run = on_ranks(corpus, tmp_path / str(ranks), ranks, *more)
        for saved in 5, 10, STEPS:
            near(run, one, saved, rest)


COUNT_FETCHES = """
counts, fetch, run = [0, 0], T.Table.fetch, T.Trainer.run
def counted(self, exchange):
    counts[0] += exchange.pieces is not None  # of training
    counts[1] += bool(self.under_way) and self.under_way[0] is exchange
    fetch(self, exchange)
def counting(self):
    counts[:] = 0, 0
    result = run(self)
    self.log.line(f"fetches {counts}")
    return result
T.Table.fetch, T.Trainer.run = counted, counting
"""


@pytest.mark.parametrize("every, late", [(0, 1), (4, 1 + STEPS // 4)])
def test_rows_travel_ahead(corpus, tmp_path, every, late):  # noqa: F811
    """All but those of the first micro-batch, and of the first after a validation, which comes between."""
    args = f"--log_dir={tmp_path}", f"--val_every={every}", "--save_every=0"
    out, err, status = finish(start(corpus, *RANKS, *args, ranks=2, hook=COUNT_FETCHES))
    assert status == 0, out + err
    (log,) = tmp_path.glob("*.txt")
    fetches = 2 * STEPS  # of a rank
    assert f"fetches [{fetches}, {fetches - late}]" in log.read_text()


def test_lists_of_rows():
    """Three ranks with lists of their own, of which one is short and one has rows of one rank alone: every rank gives
    what the others take, in their order, and the numbers lead back to the rows."""
    code = """
import numpy as np, torch, torch.distributed as dist
from types import SimpleNamespace
from data.loader import RowRouter
dist.init_process_group("gloo")
rank = dist.get_rank()
rows = [[5, 0, 5, 99, 33, 34], [70, 99, 71, 70, 68, 99], [0, 0, 0, 0, 0, 0]][rank]
router = RowRouter(SimpleNamespace(rank=rank, world=3), 100)
assert router.block == 34
for training in True, False:
    numbers, found = router(np.array(rows, np.int32), torch.from_numpy, training)
    wanted = sorted({*rows})
    assert [wanted[i] for i in numbers] == rows and numbers.dtype == np.int32
    assert found.takes == [sum(r // 34 == owner for r in wanted) for owner in range(3)]
    assert found.gives == [[3, 0, 1], [1, 0, 0], [1, 4, 0]][rank]
    assert found.rows.tolist() == [[0, 5, 33, 0], [0], [31, 0, 2, 3, 31]][rank], found
    assert (found.pieces is not None) == training
dist.barrier()
dist.destroy_process_group()
"""
    out, err, status = finish(Forks(code, [], rank_variables(3)))
    assert status == 0, out + err
