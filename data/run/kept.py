"""A compiled function that is kept on disk between starts."""

import functools
import hashlib
import os
from contextlib import suppress
from pathlib import Path

import torch

from data.run.program import atomic_write, is_out_of_memory, one_line

FILES = 30  # the newest stay; each edit of the code leaves one
COMPILER = "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TRITON_"  # variables of the environment that change code
PLACES = "_DIR", "_HOME", "_PATH"  # variables with these endings change no code; the compiler itself sets some of them


def described(value):
    """What a trace may depend on in an argument: of a tensor its type, layout and sizes that are not dynamic, of a
    module this of its parameters and buffers, of a tuple or list this of its items, and any other value. What else a
    module holds must follow from the key."""
    if isinstance(value, torch.nn.Module):
        return {name: described(x) for name, x in (*value.named_parameters(), *value.named_buffers())}
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    dynamic = getattr(value, "_dynamo_dynamic_indices", ())
    sizes = ["dynamic" if i in dynamic else size for i, size in enumerate(value.shape)]
    strides = "contiguous" if value.is_contiguous() else value.stride()
    return value.dtype, value.device, sizes, strides, value.requires_grad


class KeptFunction:
    """torch.compile(function, fullgraph=True, dynamic=False, options=options), whose first call loads what an earlier
    process compiled, or compiles and writes the file.

    The caches of PyTorch hold the kernels. None holds the trace of the function, which takes about half of the warm-up
    with full caches (records/2026-11-27_start). The file holds both. PyTorch refuses a file of another version of
    itself or of Triton, or of another kind of GPU. No guard compares anything else that the trace depends on. So the
    name of the file stands for `key`, which holds the code and the settings, for the COMPILER variables, and for the
    arguments of the first call (`described`). Later calls may only change the sizes of dynamic dimensions and the
    contents of tensors. The launch parameters suit the sizes of the run that compiled.

    A file that cannot be read, called or written costs the time of the trace and nothing else. `origin` says what was
    done.
    """

    def __init__(self, function, key, options=None):
        self.function, self.key, self.options, self.compiled = function, key, options or {}, None

    def __call__(self, *args):
        if self.compiled is not None:
            return self.compiled(*args)
        environment = [(name, value) for name, value in sorted(os.environ.items())
                       if name.startswith(COMPILER) and not name.endswith(PLACES)]
        whole = repr((self.key, environment, *map(described, args)))
        self.name = hashlib.sha256(whole.encode()).hexdigest()[:32]
        if found := self.loaded():
            try:
                result, self.compiled, self.origin = found(*args), found, "loaded"
                return result
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                with suppress(OSError):
                    self.path.unlink()
        self.compiled = self.new(args)
        return self.compiled(*args)

    @property
    def path(self) -> Path:
        """The file, in the folder of the compiler's own caches."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # it imports the compiler, which takes a second
        return Path(cache_dir(), "kept", self.name)

    def loaded(self):
        """The function of the file, or None."""
        with suppress(Exception), open(self.path, "rb") as file:  # whatever a damaged file raises
            found = torch.compiler.load_compiled_function(file)
            found.disable_guard_check()
            return found

    def new(self, args):
        """The compiled function, also written to the file."""
        compile = functools.partial(torch.compile, self.function, fullgraph=True, dynamic=False)
        unguarded = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        compiled, self.origin = None, "compiled and kept"
        try:
            with torch._dynamo.config.patch(enable_aot_compile=True):
                compiled = compile(options=self.options | unguarded).aot_compile((args, {}))
            compiled.disable_guard_check()
            self.save(type(compiled).serialize(compiled).serialized_data)
        except Exception as error:  # PyTorch calls this experimental, or the disk is full; real errors come again
            self.origin = f"compiled, not kept: {one_line(error)}"
        return compile(options=self.options or None) if compiled is None else compiled

    def save(self, data: bytes):
        """Write the file, and delete the oldest ones."""
        with atomic_write(own := self.path.with_suffix(f".{os.getpid()}")) as file:  # all ranks write this file
            file.write(data)
        own.replace(self.path)
        with suppress(OSError):
            for old in sorted(self.path.parent.iterdir(), key=os.path.getmtime)[:-FILES]:
                old.unlink()
