#!/usr/bin/env bash
# Sets up Python, fetches the data and trains on the hardware that is there. `./run.sh --help` says more.
# Written for bash 3.2, which macOS still has: no arrays that may be empty, no mapfile.
set -euo pipefail
CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

say() { echo "run.sh: $*" >&2; }
die() { say "$@"; exit 1; }

usage() {
  cat <<'END'
./run.sh [--key=value ...]    train; the arguments go to train_gpt.py (python train_gpt.py --help lists them)
./run.sh test [argument ...]  run the tests; the arguments go to pytest
./run.sh --repeat N [--key=value ...] --label A [--key=value ...] [--label B [--key=value ...]]
                              train N times for each label, by turns (A B A B), then compare the runs that finished;
                              what stands before the first label is for all; seeds count from --seed=S (1), the same
                              for all labels; a run that fails, or Ctrl-C, is the last
./run.sh --help               this text

Python  an active virtualenv, or the python3 on PATH, is used if it has torch 2.11 or newer; an active virtualenv
        without torch gets requirements.txt installed; otherwise .venv is made here, once.
GPUs    8, 4 or 2 processes, the most that the GPUs allow, with --preset=record; one GPU: --preset=single, the same run within
        its memory; no GPU: --preset=cpu, 1 process.
Data    record, single: FineWeb, 2 GB, downloaded once to data/fineweb10B; cpu: Python's library sources, made in seconds.
        Nothing is fetched or made when you pass --train_files=..., or set DATA_PATH (the folder in which the
        trainer finds data/fineweb10B or data/stdlib).
        Paths in arguments are relative to the folder of this script.

Environment: NPROC=1|2|4|8 sets the number of processes, OMP_NUM_THREADS the threads of each,
             CUDA_VISIBLE_DEVICES the GPUs (empty: none).
END
}

mode=train
case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  test) mode=test; shift ;;
  --repeat | --repeat=*) mode=repeat ;;
esac
case "${NPROC:-1}" in
  1 | 2 | 4 | 8) ;;
  *) die "NPROC=$NPROC: the trainer runs with 1, 2, 4 or 8 processes" ;;
esac

# What --repeat wants, before anything is installed. Leaves the trainer's arguments, with --label=NAME before each label's own.
if [ $mode = repeat ]; then
  times="" labels="" seed="" key="" given=$#
  for argument in "$@"; do
    argument=$key$argument key=""
    value=${argument#*=}
    case "$argument" in
      --repeat | --label) key=$argument=; continue ;;
      --repeat=*) times=$value; continue ;;
      --seed=*)
        [ -z "$seed" ] || die "--seed=$value: there is one already, and all labels have the same seeds"
        case "$value" in "" | 0?* | *[!0-9]*) die "--seed=$value: a whole number" ;; esac
        seed=$value; continue ;;
      --run_label=*) die "$argument: with --repeat it is --label that names the runs" ;;
      --label=*)
        case "$value" in "" | -* | *[!A-Za-z0-9_.+-]*) die "--label '$value': a name of letters, digits and _ . + -" ;; esac
        case " $labels " in *" $value "*) die "--label $value: there is one already" ;; esac
        labels="$labels $value" ;;
    esac
    set -- "$@" "$argument"
  done
  shift $given
  case "$times" in "" | 0* | *[!0-9]*) die "--repeat '$times': how many runs of each label, 1 or more" ;; esac
  [ -n "$labels" ] && [ -z "$key" ] || die "--label and a name for the runs are missing"
fi

# --- Python -----------------------------------------------------------------------------------------------------------

# Prints one line: old (Python), none (no torch), torch-old, or ready followed by the packages of $2 that are missing.
# Looks for torch without importing it, which would take seconds.
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
    print("ready", *(name for name in sys.argv[1:] if util.find_spec(name) is None))' $2
}

packages="numpy tiktoken huggingface_hub"
[ "$(uname)" != Linux ] || packages="$packages triton"  # torch's CPU build does not bring it along
[ $mode != test ] || packages="$packages pytest"
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
      # One try: a machine without network can train on data that is there, without the other two.
      "$python" -m pip install --quiet --retries 1 -c requirements.txt $missing >&2 && break
      case "$missing" in
        *numpy* | *triton* | *pytest*) die "could not install$missing; install by hand, or activate a virtualenv and start again" ;;
      esac
      say "could not install$missing; going on without"
      break ;;
    torch-old) outdated=$(command -v "$candidate") ;;
    none)
      [ "$candidate" = "${VIRTUAL_ENV:-}/bin/python" ] || continue
      python=$candidate
      say "installing requirements.txt into $VIRTUAL_ENV"
      "$python" -m pip install -r requirements.txt >&2 ||
        die "could not install requirements.txt into $VIRTUAL_ENV; pip's lines above say why"
      break ;;
  esac
done

if [ -z "$python" ]; then
  [ -z "$outdated" ] || say "$outdated has a torch older than 2.11 and is left as it is; using .venv"
  python=.venv/bin/python
  stamp=$(cksum <requirements.txt)
  if [ "$(cat .venv/installed 2>/dev/null)" != "$stamp" ]; then
    [ -n "$base" ] || die "no Python 3.10 or newer on PATH; install one and start again"
    say "installing requirements.txt into .venv; this takes minutes, once"
    "$base" -m venv .venv >&2 ||
      die "could not make .venv with $(command -v "$base"); its venv module may be a package of its own (Debian: python3-venv)"
    "$python" -m pip install -r requirements.txt >&2 ||
      die "could not install requirements.txt into .venv; pip's lines above say why; start again when that is solved"
    echo "$stamp" >.venv/installed
  fi
fi

if [ $mode = test ]; then
  exec "$python" -m pytest tests -q "$@"
fi

# --- Repeated runs ----------------------------------------------------------------------------------------------------

# Every run is a ./run.sh of its own. Ctrl-C reaches it as well, and the trap waits until it has ended.
if [ $mode = repeat ]; then
  compare=("$python" records/compare.py) status=0 seed=${seed:-1}
  trap 'status=130' INT TERM
  for ((i = 0; i < times; i++)); do
    for name in $labels; do
      run=(./run.sh "--run_label=$name" "--seed=$((seed + i))") label=$name
      for argument in --log_dir=logs "$@"; do
        case "$argument" in --label=*) label=${argument#*=}; continue ;; esac
        [ "$label" = "$name" ] || continue
        case "$argument" in --log_dir=*) folder=${argument#*=} ;; esac
        run+=("$argument")
      done
      this="$name, run $((i + 1)) of $times, seed $((seed + i))" old="" log=""
      for file in "$folder/${name}"_*.txt; do old="$old|$file|"; done
      say "$this"
      "${run[@]}" && code=0 || code=$?
      for file in "$folder/${name}"_*.txt; do  # another call may have this label, too, with other seeds
        case "$old" in *"|$file|"*) continue ;; esac
        ! grep -qx "seed: $((seed + i))" "$file" || log=$file
      done
      case "$status,$code,$log" in
        *,0,?*) compare+=("$name=$log") ;;
        0,0,) say "$this: ended without a log in $folder"; status=1 ;;
        0,*) say "$this: failed with status $code"; status=$code ;;
      esac
      [ $status -eq 0 ] || break 2
    done
  done
  [ ${#compare[@]} -eq 2 ] || "${compare[@]}"
  exit $status
fi

# --- Hardware and data ------------------------------------------------------------------------------------------------

preset="" data=${DATA_PATH:+given}
for argument in "$@"; do
  case "$argument" in
    --preset=*) preset=${argument#--preset=} ;;
    --train_files=*) data=given ;;
  esac
done

# Asking torch takes seconds, so it is asked only where there is a sign of a GPU; what it says counts.
gpus=0
if [ "$preset" != cpu ] && { nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null || [ -e /dev/nvidia0 ]; }; then
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || die "torch cannot be imported; the lines above say why"
  [ "$gpus" -gt 0 ] ||
    say "this machine has GPUs, but torch sees none (CPU build, old driver, or CUDA_VISIBLE_DEVICES): training on the CPU"
fi
procs=1
for n in 2 4 8; do
  [ "$gpus" -lt $n ] || procs=$n
done
procs=${NPROC:-$procs}
if [ "$gpus" -eq 0 ] && [ -z "${OMP_NUM_THREADS:-}" ]; then  # torchrun would give one thread to each of several processes
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  export OMP_NUM_THREADS=$((cores > procs ? cores / procs : 1))
fi
if [ -z "$preset" ]; then
  preset=record
  [ "$procs" -gt 1 ] || preset=single
  [ "$gpus" -gt 0 ] || preset=cpu
  set -- "--preset=$preset" "$@"
fi

# While these are there prepare.py need not be started: of the library's shards it makes this one last.
case "$data$preset" in
  given*) ;;
  cpu) [ -e data/stdlib/stdlib_val_000000.bin ] || "$python" data/prepare.py stdlib ;;
  *)
    for shard in val_000000 train_00000{1..9}; do
      [ -e data/fineweb10B/fineweb_$shard.bin ] || { "$python" data/prepare.py fineweb; break; }
    done ;;
esac

# When the trainer has said in one line why it stops, torchrun adds forty of its own. They are left out, as are its warnings.
# What was killed has said nothing: a line is made of torchrun's. The filter ignores Ctrl-C, to pass on what the others say.
errors='/^[EW][0-9]+ .*Received [A-Za-z0-9.]+ death signal/ {
  sub(/.*Received (Signals\.)?/, ""); sub(/ death signal.*/, ""); over = 1
  print "run.sh: ended by signal " $0 ($0 == 2 || $0 == "SIGINT" ? ": Ctrl-C" : ", from outside"); next
}
/^[EW][0-9]+ .*failed \(exitcode: -/ {
  sub(/.*failed \(exitcode: -/, ""); split($0, number, /[^0-9]+/); over = 1
  print "run.sh: process " number[2] " was ended by signal " number[1] (number[1] == 9 ? ": by hand, or no memory left" : "")
}
/^[EW][0-9]+ .*torch\/distributed\//{over = over || /failed \(exitcode/; next} !over || /^error: /{print; fflush()}'

# torchrun by its other name: the one that belongs to this Python, wherever the first on PATH comes from.
exec "$python" -m torch.distributed.run --standalone "--nproc_per_node=$procs" train_gpt.py "$@" \
  2> >(trap '' INT TERM; exec awk "$errors" >&2)
