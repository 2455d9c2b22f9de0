"""The trial of every operation before a run on a GPU that nobody has tested: it passes with the kernels as they are, and
finds what fails or is wrong."""

import re
from types import SimpleNamespace

import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as tk
from data.run import trial
from data.run.machine import Runtime, choose_kernels

ON_GPU, CPU = torch.cuda.is_available(), torch.device("cpu")
TINY = ["--vocab_size=257", "--model_dim=64", "--num_heads=2", "--compile=false"]
EVERY_KERNEL = "--kernels=" + ",".join(f"{op}:triton" for op in tk.IMPLEMENTATIONS)


def setting(*args, device=CPU):
    """(config, implementations) of a model with every kind of layer."""
    precision = ["--dtype=float32", "--fp8=false", "--fp8_mlp=false", "--fp8_qkv=false"] if device == CPU else []
    config = T.parse_config(["--preset=record", "--bigram_normal=false", f"--device={device.type}", *precision, *TINY, *args])
    return choose_kernels(config, device)[:2]


def broken(op, how):
    """An implementation of an operation that takes a wrong first tensor, or fails."""
    def run(first, *args):
        if how == "fails":
            raise RuntimeError("no kernel image\nis available")
        return tk.IMPLEMENTATIONS[op]["torch"](first * (torch.nan if how == "NaN" else 1.2), *args)
    return run


@pytest.mark.parametrize("args", [[], ["--preset=record74"]])
def test_kernels_pass(args, device):
    config, ops = setting(EVERY_KERNEL, *args, device=device)
    assert trial.find_faults(config, ops, device) == {}
    assert set(trial.trials(config.model, torch.float32, device)) == set(tk.IMPLEMENTATIONS)


def test_fp8_passes_and_fails(fp8_training, monkeypatch):
    """By the references, in bfloat16; then with a wrong scale of the codes."""
    config, ops = setting("--dtype=bfloat16", "--fp8=true", "--fp8_mlp=true", "--fp8_qkv=true")
    assert config.system.fp8_mlp and trial.find_faults(config, ops, CPU) == {}
    monkeypatch.setattr(tk, "x8_scale", lambda D: 2.0**-10)  # most codes are the largest one
    assert set(trial.find_faults(config, ops, CPU)) == {"fp8"}
    settled, (line,) = trial.replace_faulty_kernels(config, ops, Runtime(0, 1, CPU))
    assert not any((settled.system.fp8, settled.system.fp8_mlp, settled.system.fp8_qkv)) and "kernel of fp8" in line
    assert settled.system.kernels == config.system.kernels


@pytest.mark.parametrize("how, fault", [("scaled", r"differs by [\d.]+"), ("NaN", r"differs by (nan|[\d.]+)"),
                                        ("fails", r"fails \(.*no kernel image.*\)")])
@pytest.mark.parametrize("op", tk.IMPLEMENTATIONS)
def test_each_fault_is_found(op, how, fault):
    config, ops = setting()
    setattr(ops, op, broken(op, how))
    found = trial.find_faults(config, ops, CPU)
    assert list(found) == [op] and re.fullmatch(fault, found[op])  # in one line


def test_faults_of_all_ranks(monkeypatch):
    """What fails on one rank only is replaced on all."""
    config, ops = setting()
    ops.XXT = broken("XXT", "fails")

    def gather(found, own):
        found[:] = own, {"mlp": "differs by 0.3"}
    monkeypatch.setattr(trial.dist, "all_gather_object", gather)
    config, lines = trial.replace_faulty_kernels(config, ops, Runtime(0, 2, CPU))
    assert config.system.kernels == "XXT:torch,mlp:torch" and len(lines) == 2
    assert re.fullmatch(r"warning: on .+, with PyTorch 2\..+ and Triton .+, the kernel of mlp differs by 0\.3; this run does"
                        r" without it, and is slower\. Please report this line\.", lines[1])


def test_who_needs_a_trial(monkeypatch):
    auto, chosen = (SimpleNamespace(system=SimpleNamespace(kernels=kernels)) for kernels in ("auto", "mlp:torch"))
    cuda = torch.device("cuda")
    for capability, expected in (((9, 0), False), ((8, 9), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        assert trial.needs_trial(auto, cuda) == expected
        assert not trial.needs_trial(chosen, cuda) and not trial.needs_trial(auto, CPU)


@pytest.mark.skipif(ON_GPU, reason="a run on the CPU, in the interpreter")
def test_a_run_does_without_a_faulty_kernel(tmp_path, monkeypatch, capsys):
    for name in "train", "val":
        oracles.write_shard(tmp_path / f"{name}.bin", [256, *range(60)] * 80)
    monkeypatch.setattr(T, "needs_trial", lambda config, device: True)
    monkeypatch.setitem(tk.IMPLEMENTATIONS, "mlp", {"triton": broken("mlp", "fails"), "torch": tk.mlp_ref})
    assert T.main(["--preset=cpu", "--compile=false", *TINY, "--kernels=mlp:triton", "--scheduled_steps=4",
                   "--extension_steps=0", f"--train_files={tmp_path}/train.bin", f"--val_files={tmp_path}/val.bin",
                   "--val_tokens=128", "--val_batch_tokens=128", "--val_every=0", "--sample_tokens=0",
                   "--stage1.batch_tokens=64", "--stage2.batch_tokens=64", "--stage3.batch_tokens=64",
                   f"--log_dir={tmp_path}"]) == 0
    log = next(tmp_path.glob("*.txt")).read_text()
    assert "the kernel of mlp fails (" in log and " mlp:torch " in log and "final_val_loss" in log
    assert "the kernel of mlp fails (" in capsys.readouterr().out
