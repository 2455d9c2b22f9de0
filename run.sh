#!/usr/bin/env bash
# Sets up Python, gets the data and trains on the hardware of this machine. `./run.sh --help` says more.
# For bash 3.2, the version of macOS: no arrays that may be empty, no mapfile.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # from `sh run.sh`
set +o posix -euo pipefail  # the sh of macOS is bash in its POSIX mode
case "${DATA_PATH:-}" in
  "" | [/~]*) ;;
  *) export DATA_PATH="$PWD/$DATA_PATH" ;;
esac
CDPATH="" cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
unset PYTHONSAFEPATH  # the programs import modules of this folder

say() { echo "run.sh: $*" >&2; }
trap 'say "ended by Ctrl-C"; exit 130' INT
die() { say "$@"; exit 1; }

usage() {
  cat <<'END'
./run.sh [--key=value ...]    train; the arguments go to train_gpt.py (python train_gpt.py --help lists them)
./run.sh data [argument ...]  only get the data for a run with these arguments
./run.sh test [argument ...]  run the tests on all cores, or those of the files among the arguments; the arguments go to
                              pytest (-n 0: in one process)
./run.sh test --gpu           only the files with tests of a GPU, a process for each; a table of them comes last
./run.sh --repeat N [--key=value ...] --label A [--key=value ...] [--label B [--key=value ...]]
                              train N times for each label, in turn (A B A B), then compare the finished runs;
                              arguments before the first label are for all labels; seeds count from --seed=S (1),
                              the same for all labels; a run that fails ends alone, Ctrl-C ends the series
./run.sh --repeat N --key=value,value,... [--key=value ...]
                              the same for each value of the key, or for all combinations of the values of several
    --parallel                one run per GPU at a time; the labels take turns on every GPU
    --exchange=SHORT,LONG     two labels of different length; the comparison says what a change is worth in tokens
./run.sh --race [--minutes=1] [--key=value ...]
                              record 74's settings and ours, trained for the same minutes on the GPUs of this machine:
                              how long each takes to the same loss
./run.sh --rerun LOG [--key=value ...]
                              train again with the source and the settings of a log, on the data of this machine,
                              and compare the losses; this executes the code in the log
./run.sh --preset=NAME --help every setting of a preset
./run.sh --help               this text
--key value is always the same as --key=value.

Python  run.sh uses an active virtualenv, or the python3 on PATH, if it has torch 2.11 or newer. It installs
        requirements.txt into an active virtualenv without torch. Otherwise it makes .venv here, once. With an NVIDIA
        driver older than 580 it installs the build of torch with CUDA 12.6, which runs with 525 and newer.
GPUs    8, 4 or 2 processes, the most that the GPUs allow, with --preset=record; one GPU: --preset=single, a run of any
        length (--minutes=5) within its memory; no GPU: --preset=cpu, 1 process.
Data    cpu: Python's library sources, made in a second; all other presets: as much of FineWeb as the run reads (440 MB
        for 100 million tokens of training, at most 2 GB for a preset at its own length), downloaded once to
        data/fineweb10B. run.sh gets no data if you pass --train_files=... or a checkpoint (--resume=...,
        --init_from=...), which has the settings of its run, or set DATA_PATH (the folder that holds data/fineweb10B or
        data/stdlib).
        Paths in arguments are relative to the folder of this script.

Environment: NPROC=1|2|4|8 sets the number of processes, OMP_NUM_THREADS the threads of each,
             CUDA_VISIBLE_DEVICES the GPUs (empty: none).
END
}

mode=train
case "${1:-}" in
  test | data) mode=$1; shift ;;
  plan) mode=plan; shift; exec 3>&1 >&2 ;;  # as data; records/repeat.py reads how the run would start
  --rerun) mode=rerun; shift ;;
  --rerun=*) mode=rerun log=${1#*=}; shift; set -- "$log" "$@" ;;
  [!-]*) die "'$1' is no command: write test, data or --key=value (see ./run.sh --help)" ;;
esac
help="" preset="" checkpoint="" data=${DATA_PATH:+given} key=""
for argument in "$@"; do
  [ "$argument" != --help ] || help=yes
  argument=$key$argument key=""
  case "$argument" in
    --preset | --train_files | --resume | --init_from | --sample | --label) key=$argument= ;;  # --label -h: a factor
    --preset=*) preset=${argument#*=} ;;
    --train_files=* | --check) data=given ;;  # a check downloads nothing
    --resume=?* | --init_from=?*) checkpoint=yes data=given ;;  # an empty value, as in a log, means none
    --sample=?*) checkpoint=yes data=given NPROC=1 ;;
    --repeat | --repeat=* | --race) [ $mode != train ] || mode=repeat ;;
    -h) help=yes ;;
  esac
done
if [ -n "$help" ] && { [ $mode != train ] || [ $# = 1 ]; }; then usage; exit 0; fi

# --- Python -----------------------------------------------------------------------------------------------------------

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || driver=""
major=${driver%%.*}
case "$major" in "" | *[!0-9]*) major=580 ;; esac  # no driver, or none that tells its version

# Installs requirements.txt with the Python $1 into the virtualenv $2. (No run has used the build with CUDA 12.6.)
install() {
  say "installing requirements.txt into $2; this takes minutes, once"
  if [ "$major" -lt 580 ]; then
    say "the NVIDIA driver $driver is older than 580: installing torch with CUDA 12.6, which needs 525"
    set -- "$1" "$2" "$(grep '^torch==' requirements.txt)" --index-url https://download.pytorch.org/whl/cu126
  fi
  { [ $# = 2 ] || "$1" -m pip install "${@:3}" >&2; } && "$1" -m pip install -r requirements.txt >&2 ||
    die "could not install requirements.txt into $2; pip's lines above say why"
}

# Prints one line: old (Python), none (no torch), torch-old, or ready followed by the packages of $2 that are missing.
# Does not import torch, since that takes seconds.
probe() {
  "$1" -c 'if 1:
    import sys
    if sys.version_info < (3, 10):
        sys.exit(print("old"))
    from importlib import metadata, util
    if util.find_spec("torch") is None:
        sys.exit(print("none"))
    version = tuple(int(n) for n in metadata.version("torch").split("+")[0].split(".")[:2] if n.isdigit())
    if version < (2, 11):
        sys.exit(print("torch-old"))
    print("ready", *(name for name in sys.argv[1:] if util.find_spec(name.replace("pytest-", "")) is None))' $2
}

packages="numpy tiktoken huggingface_hub"
[ "$(uname)" != Linux ] || packages="$packages triton"  # torch's CPU build does not install it
[ $mode != test ] || packages="$packages pytest pytest-xdist"
[ -z "$help" ] || packages=""  # the first run installs them
python="" base="" outdated=""
for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python3 python; do
  command -v "$candidate" >/dev/null || continue
  found=$(probe "$candidate" "$packages" 2>/dev/null) || continue
  [ "$found" = old ] || base=${base:-$candidate}
  case "$found" in
    ready*)
      python=$candidate
      missing=${found#ready}
      [ -n "$missing" ] || break
      say "installing$missing for $(command -v "$python")"
      # Only one try: a machine without a network can train on existing data without tiktoken and huggingface_hub.
      "$python" -m pip install --quiet --retries 1 -c requirements.txt $missing >&2 ||
        say "could not install$missing; going on without"
      break ;;
    torch-old) outdated=$(command -v "$candidate") ;;
    none)
      [ -z "$help" ] && [ "$candidate" = "${VIRTUAL_ENV:-}/bin/python" ] || continue
      python=$candidate
      install "$python" "$VIRTUAL_ENV"
      break ;;
  esac
done

if [ -z "$python" ]; then
  [ -z "$outdated" ] || say "$outdated has a torch older than 2.11 and is left as it is; using .venv"
  python=.venv/bin/python
  stamp=$(cksum <requirements.txt)
  if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
    [ -z "$help" ] || { usage; say "the settings need a Python with torch 2.11; the first run installs it"; exit 0; }
    [ -n "$base" ] || die "no Python 3.10 or newer on PATH; install one and start again"
    "$base" -m venv .venv >&2 ||
      die "could not make .venv with $(command -v "$base");" \
        "its venv module may be a package of its own (Debian: python3-venv)"
    install "$python" .venv
    echo "$stamp" >.venv/installed
  fi
fi

[ -z "$help" ] || exec "$python" train_gpt.py "$@"
case $mode in
  test)
    tests=tests
    for argument in "$@"; do
      case $argument in
        --gpu) exec "$python" .ci/gpu.py "$@" ;;
        *.py | *.py::*) [ -e "${argument%%::*}" ] || die "no such file: ${argument%%::*}"; tests="" ;;
      esac
    done
    exec "$python" -m pytest $tests -q -n auto --dist loadfile "$@" ;;  # each core takes whole files
  repeat | rerun) exec "$python" records/$mode.py "$@" ;;
esac

# --- Hardware and data ------------------------------------------------------------------------------------------------

# Prints what some lines of Python print. Ctrl-C ends Python without a traceback.
ask() { "$python" -c "from data.run.launch import allowed_cores, die_at_ctrl_c, gpu_count; die_at_ctrl_c()
$1" "${@:2}"; }

gpus=0
if [ "$preset" != cpu ] && { nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null || [ -e /dev/nvidia0 ]; }; then
  gpus=$(ask 'print(gpu_count())')
  [ "$gpus" -gt 0 ] ||
    say "this machine has GPUs, but torch sees none (CPU build, driver ${driver:-not found}," \
      "or CUDA_VISIBLE_DEVICES): training on the CPU"
fi
procs=1
for n in 2 4 8; do
  [ "$gpus" -lt $n ] || procs=$n
done
procs=${NPROC:-$procs}
case $procs in [1-9] | [1-9][0-9]) ;; *) die "NPROC=$procs: write 1, 2, 4 or 8" ;; esac
if [ "$gpus" -eq 0 ] && [ -z "${OMP_NUM_THREADS:-}" ]; then  # otherwise torchrun gives each process one thread
  cores=$(ask 'print(int(max(1, allowed_cores())))')
  export OMP_NUM_THREADS=$((cores > procs ? cores / procs : 1))
fi
if [ -z "$preset$checkpoint" ]; then  # a checkpoint contains all settings of its run
  preset=record
  [ "$procs" -gt 1 ] || preset=single
  [ "$gpus" -gt 0 ] || preset=cpu
  set -- "--preset=$preset" "$@"
fi

# The number of FineWeb's shards that the run reads. A wrong argument must not cost a download. Nor must a run that
# needs a GPU where there is none: it reads 0 shards, and the trainer ends it with one line.
shards_of_run() {
  ask 'if 1:
    import math, sys, train_gpt
    from data.run.program import UserError
    from data.run.length import needed_tokens
    world, start = int(sys.argv[1]), sys.argv[2]
    try:
        config = train_gpt.parse_config(sys.argv[3:], world)
        tokens = needed_tokens(config, world)
    except UserError as error:
        sys.exit(f"error: {error}")
    ends = start in ("train with 0 GPUs", "plan with 0 GPUs") and config.system.device == "cuda"
    print(0 if ends else min(103, max(1, math.ceil(tokens / 1e8))))' "$procs" "$mode with $gpus GPUs" "$@"
}

has_shards() {
  for shard in val_000000 $(seq -f 'train_%06.0f' 1 "$1"); do
    [ -e "data/fineweb10B/fineweb_$shard.bin" ] || return
  done
}

case $mode in plan | data) "$python" train_gpt.py --help "$@" >/dev/null || exit ;; esac  # it reads the arguments

# prepare.py decides in 0.2 s whether Python's library is complete. It need not start if all files of FineWeb exist.
case "$data$preset" in
  given*) ;;
  cpu) "$python" data/prepare.py stdlib ;;
  *)
    shards=9  # of the whole presets
    case "$*" in *minutes* | *tokens* | *steps*) shards="" ;; esac
    if [ -z "$shards" ] || ! has_shards $shards; then
      shards=$(shards_of_run "$@")
      [ "$shards" = 0 ] || has_shards "$shards" || "$python" data/prepare.py fineweb --shards "$shards"
    fi ;;
esac
case $mode in
  plan) printf '%s\0' "$procs" "${OMP_NUM_THREADS:-}" "$@" >&3; exit ;;
  data) exit ;;
esac
[ "$procs" != 1 ] || exec "$python" train_gpt.py "$@"

# This starts the torchrun of this Python; the torchrun on PATH may belong to another Python. Without --local_addr it
# would ask the network for the name of this machine.
exec "$python" -m data.run.launch --standalone --local_addr=localhost "--nproc_per_node=$procs" train_gpt.py "$@"
