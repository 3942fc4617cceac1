"""Rates and loss scales of 2,000 steps, for configs that `trainer import-config` reads.

    python imports.py megatron|transformers|deepspeed FILE.json

Each needs its own package: megatron-core 0.16.1, transformers 5.24.0, or deepspeed 0.19.8. A case
has the files of a run, and what the programs themselves give: rates of some steps, sums of all rates
up to every 200th, and the loss scale where it changes. Every 211th step overflows, twice in a row from step 800 on.
"""

import json
import sys
import types

import torch

STEPS = 2000
SHOWN = [0, 1, 2, 3, 99, 100, 101, 199, 200, 201, 999, 1000, 1001, 1500, 1799, 1800, 1801, 1999]


def overflows(step):
    return step % 211 == 210 or (step > 800 and step % 211 == 0)


def run(rate, advance, scaler=None):
    """Steps of a program: the rate and the scale that a step uses, and then their updates."""
    rates, sums, scales, total = [], [], [], 0.0
    for step in range(STEPS):
        rates.append(rate())
        total += rates[-1]
        if step % 200 == 199:
            sums.append(total)
        bad = scaler is not None and overflows(step)
        if scaler is not None:
            scale = scaler.read()
            if not scales or scales[-1][1] != scale:
                scales.append([step, scale])
            scaler.update(bad)
        if not bad:
            advance()
    return {"rates": [[step, rates[step]] for step in SHOWN], "sums": sums, "scales": scales}


def optimizer(rate):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


class OfDeepspeed:
    def __init__(self, config):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        self.scaler = DynamicLossScaler(
            2 ** config.get("initial_scale_power", 16), config.get("loss_scale_window", 1000),
            config.get("min_loss_scale", 1), config.get("hysteresis", 2), False,
        )

    def read(self):
        return float(self.scaler.cur_scale)

    def update(self, bad):
        self.scaler.update_scale(bad)


class OfTorch:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def read(self):
        return self.scaler.get_scale()

    def update(self, bad):
        it = self.scaler
        torch._amp_update_scale_(
            it._scale, it._growth_tracker, torch.tensor([float(bad)]), it.get_growth_factor(),
            it.get_backoff_factor(), it.get_growth_interval(),
        )


class OfMegatron:
    def __init__(self):
        from megatron.core.optimizer import grad_scaler

        make = torch.tensor
        torch.tensor = lambda data, device=None, **options: make(data, **options)
        self.scaler = grad_scaler.DynamicGradScaler(2.0**32, 1.0, 2.0, 0.5, 1000, 2)
        torch.tensor = make

    def read(self):
        return self.scaler.scale.item()

    def update(self, bad):
        self.scaler.update(bad)


def deepspeed():
    from deepspeed.runtime import lr_schedules as ds

    def case(name, params, scheduler=None, fp16=None, lr=1e-3):
        config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": lr}}
        if name:
            config["scheduler"] = {"type": name, "params": params}
        if fp16 is not None:
            config["fp16"] = {"enabled": True, **fp16}
        made = optimizer(lr)
        schedule = getattr(ds, name)(made, **params) if name else None
        scaler = OfDeepspeed(fp16) if fp16 is not None else None
        advance = schedule.step if schedule else lambda: None
        seen = run(lambda: made.param_groups[0]["lr"], advance, scaler)
        return {"from": "deepspeed", "file": "ds.json", "text": json.dumps(config), **seen}

    yield case("WarmupLR", {"warmup_max_lr": 1e-4, "warmup_num_steps": 100})
    yield case("WarmupLR", {"warmup_max_lr": 1e-4}, fp16={})
    yield case("WarmupLR", {"warmup_max_lr": 3e-4, "warmup_num_steps": 1})
    yield case("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 200,
                            "warmup_type": "linear"})
    yield case("WarmupDecayLR", {"total_num_steps": 1800, "warmup_num_steps": 100}, lr=1e-4)
    yield case("WarmupDecayLR", {"total_num_steps": 2000, "warmup_min_lr": 1e-5,
                                 "warmup_max_lr": 2e-4, "warmup_num_steps": 200,
                                 "warmup_type": "linear"},
               fp16={"initial_scale_power": 12, "loss_scale_window": 50, "hysteresis": 1})
    yield case("WarmupCosineLR", {"total_num_steps": 1800, "warmup_num_steps": 100}, lr=2e-4)
    yield case("WarmupCosineLR", {"total_num_steps": 2000, "warmup_num_steps": 200,
                                  "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05,
                                  "warmup_type": "linear"},
               lr=2e-4, fp16={"loss_scale_window": 100})
    yield case(None, {}, lr=2e-4)


def transformers():
    from transformers import TrainingArguments, optimization

    def case(peak=1e-3, **arguments):
        arguments = {"output_dir": "o", "max_steps": STEPS, "per_device_train_batch_size": 2,
                     "learning_rate": peak, **arguments}
        made = optimizer(peak)
        given = types.SimpleNamespace(warmup_steps=arguments.get("warmup_steps", 0))
        schedule = optimization.get_scheduler(
            arguments.get("lr_scheduler_type", "linear"), made,
            TrainingArguments.get_warmup_steps(given, STEPS), STEPS,
            arguments.get("lr_scheduler_kwargs"),
        )
        scaler = OfTorch() if arguments.get("fp16") else None
        seen = run(lambda: made.param_groups[0]["lr"], schedule.step, scaler)
        return {"from": "hf", "file": "args.json", "text": json.dumps(arguments), **seen}

    yield case()
    yield case(peak=5e-5, fp16=True, warmup_steps=100)
    yield case(lr_scheduler_type="cosine", warmup_steps=0.1)
    yield case(lr_scheduler_type="cosine", warmup_steps=0.05025)
    yield case(lr_scheduler_type="constant", warmup_steps=100)
    yield case(lr_scheduler_type="constant_with_warmup", warmup_steps=100, fp16=True)
    yield case(lr_scheduler_type="inverse_sqrt", warmup_steps=200)
    yield case(lr_scheduler_type="cosine_with_min_lr", warmup_steps=100,
               lr_scheduler_kwargs={"min_lr": 1e-5})
    yield case(lr_scheduler_type="cosine_with_min_lr", warmup_steps=100,
               lr_scheduler_kwargs={"min_lr_rate": 0.1})
    yield case(lr_scheduler_type="warmup_stable_decay", warmup_steps=100,
               lr_scheduler_kwargs={"num_decay_steps": 400})


def megatron():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def case(style="linear", flags="", warmup=0, decay=STEPS, anneal=None, start=0.0, floor=0.0,
             way="exponential", fp16=False):
        base = f"--train-iters {STEPS} --lr 6e-4 --micro-batch-size 2 --global-batch-size 8"
        text = f"{base} --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 " \
               f"--max-position-embeddings 32 --vocab-size 1000 --data-path d {flags}\n"
        made = types.SimpleNamespace(param_groups=[{"lr": 0.0}])
        schedule = OptimizerParamScheduler(
            made, start, 6e-4, floor, 8 * warmup, 8 * decay, style, 0.0, 0.0, STEPS, "constant",
            wsd_decay_steps=anneal and 8 * anneal, lr_wsd_decay_style=way,
        )
        scaler = OfMegatron() if fp16 else None
        seen = run(lambda: made.param_groups[0]["lr"], lambda: schedule.step(8), scaler)
        return {"from": "megatron", "file": "flags.txt", "text": text, **seen}

    yield case()
    yield case(flags="--lr-warmup-iters 100 --min-lr 6e-5 --lr-decay-iters 1800 --fp16", warmup=100,
               decay=1800, floor=6e-5, fp16=True)
    yield case("cosine", "--lr-decay-style cosine --lr-warmup-fraction 0.05 --min-lr 6e-5",
               warmup=100, floor=6e-5)
    yield case("constant", "--lr-decay-style constant --lr-warmup-iters 200 --lr-warmup-init 1e-5",
               warmup=200, start=1e-5)
    yield case("inverse-square-root", "--lr-decay-style inverse-square-root --lr-warmup-iters 100",
               warmup=100)
    yield case("WSD", "--lr-decay-style WSD --lr-warmup-iters 100 --lr-wsd-decay-iters 400",
               warmup=100, anneal=400)
    yield case("WSD", "--lr-decay-style WSD --lr-warmup-iters 100 --lr-wsd-decay-iters 400 "
               "--lr-wsd-decay-style minus_sqrt", warmup=100, anneal=400, way="minus_sqrt")


def main():
    cases = list(globals()[sys.argv[1]]())
    with open(sys.argv[2], "w") as out:
        out.write("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


main()
