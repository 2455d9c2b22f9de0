"""The trial of every operation before a run on a GPU that nobody has tested: it passes with the kernels as they are,
and finds what fails or is wrong."""

import re
from unittest.mock import Mock

import pytest
import torch

import oracles
import train_gpt as T
import triton_kernels as tk
from data.run import trial
from data.run.length import BORDERS
from data.run.machine import Runtime, choose_kernels
from data.run.program import UserError
from oracles import gpu

ON_GPU, CPU = torch.cuda.is_available(), torch.device("cpu")
TINY = ["--vocab_size=257", "--model_dim=64", "--num_heads=2"]
EVERY_KERNEL = "--kernels=" + ",".join(f"{op}:triton" for op in tk.IMPLEMENTATIONS)


def setting(*args, device=CPU):
    """(config, implementations) of a model with every kind of layer."""
    precision = ["--dtype=float32", "--fp8=false", "--fp8_mlp=false", "--fp8_qkv=false"] if device == CPU else []
    config = T.parse_config(["--preset=record", "--bigram_normal=false", f"--device={device.type}", *precision, *TINY,
                             *args])
    return choose_kernels(config, device)[:2]


def broken(op, how):
    """An implementation of an operation whose result is scaled by 1.2 or is NaN, or which fails."""
    factor = {"scaled": 1.2, "NaN": torch.nan}.get(how)

    def run(first, *args):
        if factor is None:
            raise RuntimeError("no kernel image\nis available")
        result = tk.IMPLEMENTATIONS[op]["torch"](first, *args)
        if result is None:  # the operation changes its first tensors; NorMuon's are halves of numbers
            return next(x for x in (first, *args) if torch.is_tensor(x) and x.is_floating_point()).mul_(factor)
        if isinstance(result, tk.Mixed):
            return result._replace(xs=[factor * x for x in result.xs])
        return factor * result if torch.is_tensor(result) else [factor * x for x in result]
    if op == "mix":
        vars(run).update(vars(tk.mix_ref))  # what has the same choice
    return run


@pytest.mark.parametrize("args", [
    [], *(pytest.param(["--preset=single", "--vocab_size=50257", f"--model_dim={size.width}", f"--depth={size.layers}",
                   f"--num_heads={size.width // 128}"], marks=gpu) for size in BORDERS)])
def test_kernels_pass(args, device):
    config, ops = setting(EVERY_KERNEL, *args, device=device)
    assert trial.find_faults(config, ops, device) == {}


def test_fp8_passes_and_fails(fp8_training, monkeypatch):
    """By the references, in bfloat16; then with a wrong scale of the codes."""
    config, ops = setting("--dtype=bfloat16", "--fp8=true", "--fp8_mlp=true", "--fp8_qkv=true")
    assert config.system.fp8_mlp and trial.find_faults(config, ops, CPU) == {}
    monkeypatch.setattr(tk, "x8_scale", lambda D: 2.0**-10)  # most codes are the largest one
    assert set(trial.find_faults(config, ops, CPU)) == {"fp8_mlp", "fp8_qkv"}
    monkeypatch.setattr(trial, "is_tested", lambda device: False)
    settled, lines = trial.replace_faulty_kernels(config, ops, Runtime(0, 1, CPU))
    assert settled.system.fp8 and not settled.system.fp8_mlp and not settled.system.fp8_qkv
    assert settled.system.kernels == config.system.kernels and "kernel of fp8_qkv differs by" in lines[1]
    monkeypatch.undo()
    monkeypatch.setattr(tk, "W_SCALE", 2.0**-20)  # every weight of the head saturates
    assert set(trial.find_faults(config, ops, CPU)) == {"fp8"}


@pytest.mark.parametrize("how, fault", [("scaled", r"differs by [\d.]+"), ("NaN", "differs by nan"),
                                        ("fails", r"fails \(.*no kernel image.*\)")])
@pytest.mark.parametrize("op", tk.IMPLEMENTATIONS)
def test_each_fault_is_found(op, how, fault):
    config, ops = setting()
    setattr(ops, op, broken(op, how))
    found = trial.find_faults(config, ops, CPU)
    assert list(found) == [op] and re.fullmatch(fault, found[op])  # in one line


@pytest.mark.parametrize("part", ["unbind", "columns", "first_channels", "add_later", "token_gate", "scaled_weights"])
def test_all_parts_of_the_sums_are_tried(part):
    config, ops = setting()
    ops.mix = lambda *args: tk.mix_ref(*args)
    vars(ops.mix).update(vars(tk.mix_ref) | {part: Mock(side_effect=RuntimeError)})
    assert list(trial.find_faults(config, ops, CPU)) == ["mix"]


@pytest.mark.parametrize("op, kept", [("update_rows", (2, 3, 4)), ("update_few_rows", (2, 3, 4, 6))])
def test_what_an_update_leaves_is_compared(op, kept):
    """Last update, list of rows, gradients; kept: the arguments that stay as they are."""
    config, ops = setting()

    def forgetful(changed):
        def run(*args):
            before = args[changed].clone()
            tk.IMPLEMENTATIONS[op]["torch"](*args)
            args[changed].copy_(before)
        return run
    for changed in kept:
        setattr(ops, op, forgetful(changed))
        assert list(trial.find_faults(config, ops, CPU)) == [op], changed


def test_faults_of_all_ranks(monkeypatch):
    """What fails on one rank only is replaced on all. A rank with a tested GPU hears of it, too."""
    config, ops = setting()
    ops.XXT = broken("XXT", "fails")

    def gather(found, own):
        found[:] = own, {"mlp": "differs by 0.3"}
    monkeypatch.setattr(trial.dist, "all_gather_object", gather)
    assert trial.replace_faulty_kernels(config, ops, Runtime(0, 2, CPU))[0].system.kernels == "mlp:torch"
    monkeypatch.setattr(trial, "is_tested", lambda device: False)
    config, lines = trial.replace_faulty_kernels(setting("--kernels=XTX:torch")[0], ops, Runtime(0, 2, CPU))
    assert config.system.kernels == "XTX:torch,XXT:torch,mlp:torch" and len(lines) == 2
    assert re.fullmatch(r"warning: on .+, with PyTorch 2\..+ and Triton .+, the kernel of mlp differs by 0\.3; PyTorch"
                        r" replaces it, which is slower and takes more memory\. Please report this line\.", lines[1])


def test_which_gpus_are_tested(monkeypatch):
    assert trial.is_tested(CPU)
    for capability, expected in (((9, 0), True), ((8, 9), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        assert trial.is_tested(torch.device("cuda")) == expected


@pytest.mark.parametrize("error, message", [
    (RuntimeError("an illegal access"), "the kernel of mlp stops this GPU .an illegal access.; .*--kernels=mlp:torch"),
    (torch.OutOfMemoryError("none left"), "none left")])
def test_errors_that_end_the_run(monkeypatch, error, message):
    """A GPU that no longer works, and too little memory, are no reason to replace a kernel."""
    config, ops = setting()
    ops.mlp = Mock(side_effect=error)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", Mock(side_effect=error))
    with pytest.raises((UserError, torch.OutOfMemoryError), match=message):
        trial.find_faults(config, ops, CPU)
    with pytest.raises((UserError, torch.OutOfMemoryError), match=message.replace("mlp", "fp8_qkv").replace(
            "--kernels=fp8_qkv:torch", "--fp8_qkv=false$")):
        trial.fault_of(ops.mlp, "fp8_qkv", None, None, 1.0)


@pytest.mark.skipif(ON_GPU, reason="a run on the CPU, in the interpreter")
def test_a_run_does_without_a_faulty_kernel(tmp_path, monkeypatch, capsys):
    for name in "train", "val":
        oracles.write_shard(tmp_path / f"{name}.bin", [256, *range(60)] * 80)
    monkeypatch.setitem(tk.IMPLEMENTATIONS, "mlp", {"triton": broken("mlp", "fails"), "torch": tk.mlp_ref})
    monkeypatch.setattr(trial, "is_tested", lambda device: False)
    stages = [f"--stage{i}.batch_tokens=64" for i in (1, 2, 3)]
    assert T.main(["--preset=cpu", *TINY, *stages, "--scheduled_steps=4", "--extension_steps=0", "--kernels=mlp:triton",
                   f"--train_files={tmp_path}/train.bin", f"--val_files={tmp_path}/val.bin", f"--log_dir={tmp_path}",
                   "--val_tokens=128", "--val_batch_tokens=128", "--val_every=0", "--sample_tokens=0"]) == 0
    log = next(tmp_path.glob("*.txt")).read_text()
    assert "the kernel of mlp fails (" in log and " mlp:torch " in log and "final_val_loss" in log
    out = capsys.readouterr().out
    assert "the kernel of mlp fails (" in out and "trying each kernel on a GPU" in out
