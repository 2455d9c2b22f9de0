"""Which values of the knobs a run accepts: first each value alone, then values that must fit together."""

import re

from data.loader import NGRAM_FACTORS
from data.run.program import UserError
from data.run.knobs import demand, fields_of, render
from data.run.length import momentum_steps, stage_starts


def require(ok, message):
    """Raises UserError with the message unless `ok`."""
    if not ok:
        raise UserError(message)


def check_values(config):
    """Raises UserError when the value of a knob is never accepted."""
    for section in vars(config).values():
        for key, value, kind in fields_of(section):
            if wanted := demand(kind, value):
                raise UserError(f"--{key}={render(value)}: must be {wanted}")
    system, schedule = config.system, config.schedule
    require(re.fullmatch(r"([0-9]+:[1-9][0-9]*)?", system.profile),
            f"--profile={system.profile}: must be START:COUNT, for example 20:4")
    require(not {*"/\\"} & {*system.run_label},
            f"--run_label={system.run_label}: must be the name of a file, not of a folder")
    for key in "muon_warmup", "muon_cooldown":
        steps = getattr(schedule, key)
        require(steps < 1 or type(steps) is int,
                f"--{key}={steps}: must be a whole number of steps, or from 0 to below 1, a part of the run")
    for i, stage in enumerate(schedule.stages, 1):
        require(len(stage.mtp_start) == len(stage.mtp_end), f"--stage{i}.mtp_start and mtp_end need the same length")
        require(stage.mtp_start[0] and stage.mtp_end[0],
                f"--stage{i}.mtp_start and mtp_end: the first weight, of the next token, must be above 0")
    shares = [stage.share for stage in schedule.stages]
    require(min(shares[:-1]) > 0 == shares[-1],
            f"shares of the stages: {', '.join(map(render, shares))}; the share of the last stage, which is the"
            " extension, must be 0, all others above 0")


def check_config(config, world=1):
    """Raises UserError when a value is not accepted, or when values do not fit together, or not `world` ranks."""
    check_values(config)
    check_model(config.model)
    check_schedule(config.schedule)
    check_profile(config)
    check_kernels(config)
    data = config.data
    require(data.val_batch_tokens % 16 == 0 and data.val_tokens % data.val_batch_tokens == 0,
            f"--val_tokens={data.val_tokens} must be a multiple of --val_batch_tokens={data.val_batch_tokens},"
            " and --val_batch_tokens a multiple of 16; set both, for example to the same number")
    if config.system.micro_batches:  # else `choose_micro_batches` chooses and checks the number
        check_micro_batches(config, world)


def check_model(model):
    layers, paired = model.layers, tuple(model.layers_with("paired"))
    require(model.model_dim % (8 * model.num_heads) == 0,
            f"--model_dim={model.model_dim} --num_heads={model.num_heads}: the width of a head must be a multiple of 8")
    require(model.num_heads % 2 == 0 or not paired,
            f"--num_heads={model.num_heads}: the paired layers {render(paired)} need an even number of heads;"
            " --layer0.paired=false makes another layer of the first")
    orders = len(NGRAM_FACTORS) - 1
    require(len(model.ngram_rows) <= orders and not any(0 < rows < 2 or rows % 1 for rows in model.ngram_rows),
            f"--ngram_rows={render(model.ngram_rows)}: up to {orders} whole numbers, each 0 or at least 2")
    require(all(rows >= 2 for _, rows in model.ngrams),
            f"--bigram_tables={model.bigram_tables}: the table of bigrams needs two rows or more")
    require(sum(rows for _, rows in model.ngrams) < 2**31,
            f"--ngram_rows={render(model.ngram_rows)}: at most 2147483647 rows in all")
    require(model.vocab_size == 50257 or not model.bigram_normal,
            f"--vocab_size={model.vocab_size}: --bigram_normal needs the tokens of GPT-2, a vocabulary of 50257; add"
            " --bigram_normal=false")
    require(model.mlp_dim >= 16, f"--mlp_ratio={model.mlp_ratio}: an MLP of {model.mlp_dim} channels")
    require(model.backout_layer is None or model.backout_layer < len(layers),
            f"--backout_layer={model.backout_layer}: must be 0 to {len(layers) - 1}, or none")
    require(any(layer.attention for layer in layers), "all layers are without attention: at least one needs it")
    for i, layer in enumerate(layers):
        require(layer.attention or not (layer.paired or layer.long or layer.value_embed),
                f"--layer{i}={render(layer)!r}: paired, long and value_embed need attention, which this layer lacks")
        require(layer.skip_from is None or 0 <= layer.skip_from < i,
                f"--layer{i}.skip_from={layer.skip_from}: must be an earlier layer, 0 to {i - 1}, or none")
        require(layer.input_from is None or layer.attention and 0 <= layer.input_from < i,
                f"--layer{i}.input_from={layer.input_from}: must be an earlier layer, 0 to {i - 1}, or none, in a layer"
                " with attention")
        require(not layer.narrow or layer.attention and not layer.long,
                f"--layer{i}.narrow=True: only for a layer with attention that is not long")
        require(not layer.xsa or layer.attention and not layer.paired,
                f"--layer{i}.xsa=True: only for a layer with attention that is not paired")
        require(not layer.mix or layer.value_embed and model.backout_layer is not None and model.backout_layer < i
                and model.layers_with("mix") == [i],
                f"--layer{i}.mix=True: only for one layer, with value_embed, behind the backout_layer")
        require(not layer.dynamic or model.dynamic_sizes[i],
                f"--layer{i}.dynamic=True: neither this layer nor those up to the next dynamic one have factors")
        require(i == 0 or layer.two_lanes or not layers[i - 1].two_lanes,
                f"--layer{i}.two_lanes=False: layer {i - 1} has two lanes, so all later layers need two; add"
                f" --layer{i}.two_lanes=true")


def check_schedule(schedule):
    stages = schedule.stages
    *starts, total = stage_starts(schedule)
    require(total < 10**6,
            f"--scheduled_steps={schedule.scheduled_steps}: a run has at most 999999 steps, the extension included")
    require(all(a < b for a, b in zip(starts, starts[1:])),
            f"--scheduled_steps={schedule.scheduled_steps}: each stage needs at least one step")
    require(schedule.cooldown_frac * schedule.scheduled_steps >= 1,
            f"--cooldown_frac={schedule.cooldown_frac}: must cover a scheduled step")
    require(schedule.split_stage <= len(stages),
            f"--split_stage={schedule.split_stage}: there are {len(stages)} stages, so it must be 1 to {len(stages)}")
    warmup, cooldown = momentum_steps(schedule)  # a run may end within the warm-up, as short trials of record74 do
    require(not warmup < total < warmup + cooldown - 1,  # both are rounded, so one step may belong to both
            f"--muon_warmup={schedule.muon_warmup} --muon_cooldown={schedule.muon_cooldown}: {warmup} and {cooldown}"
            f" steps, but the run has only {total}")


def check_profile(config):
    system, total = config.system, stage_starts(config.schedule)[-1]
    require(system.profiled.stop <= total, f"--profile={system.profile}: the run has steps 0 to {total - 1}")
    pauses = system.val_every or total, system.save_every or total
    require(not any(step % every == 0 for step in system.profiled[1:] for every in pauses),
            f"--profile={system.profile}: a validation or a checkpoint comes in between; take other steps, or change"
            f" --val_every={system.val_every} or --save_every={system.save_every}")


def check_kernels(config):
    model, system = config.model, config.system
    plain = system.device == "cpu" or system.kernels == "torch"
    plain_attention = plain or "attention:torch" in system.kernels
    require(plain_attention or system.dtype == "bfloat16",
            f"--dtype={system.dtype}: the attention kernel of a GPU is made for bfloat16; add"
            " --kernels=attention:torch, or --device=cpu")
    for knob in "fp8_mlp", "fp8_qkv":
        require(not getattr(system, knob) or system.dtype != "bfloat16" or system.kernels == "torch"
                or model.model_dim % 16 == 0,
                f"--model_dim={model.model_dim}: --{knob} takes multiples of 16 channels; add --{knob}=false")
    least = 32 if model.layers_with("narrow") else 16
    require(plain_attention or least <= model.head_dim <= 128 and model.head_dim & (model.head_dim - 1) == 0,
            f"--model_dim={model.model_dim} --num_heads={model.num_heads}: the attention kernel takes heads of {least}"
            f" to 128 channels, a power of two{', in models with narrow layers' * (least == 32)}; or add"
            " --kernels=attention:torch")


def check_micro_batches(config, world):
    count = config.system.micro_batches
    require(count % world == 0,
            f"{world} processes do not divide --micro_batches={count}: use a divisor of it, with run.sh by NPROC"
            + ("" if config.system.resume else ", or a larger number"))
    for i, stage in enumerate(config.schedule.stages, 1):
        require(stage.batch_tokens % (16 * count) == 0,
                f"--stage{i}.batch_tokens={stage.batch_tokens} must be a multiple of 16 * --micro_batches={count}"
                + (f", one for each of {world} processes; or start 1, 2, 4 or 8" if world == count > 1 else ""))
