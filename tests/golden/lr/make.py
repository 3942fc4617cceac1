"""Learning rates as the programs that our users come from give them.

    python make.py megatron|transformers|deepspeed FILE.json

Each needs its own package: megatron-core, transformers, or deepspeed. A case has the settings in
our words, lengths counted in steps of one sample, and pairs of a step and its rate.
"""

import json
import sys

STEPS = [0, 1, 2, 7, 19, 20, 21, 35, 60, 79, 80, 81, 90, 99, 100]
PEAK, FLOOR, WARMUP, DECAY, ANNEAL = 3e-4, 2e-5, 20, 100, 30


def megatron():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    class Optimizer:
        param_groups = [{"lr": 0.0}]

    styles = [("constant", None), ("linear", None), ("cosine", None), ("inverse-square-root", None)]
    styles += [("WSD", way) for way in ("linear", "cosine", "exponential", "minus_sqrt")]
    ours = {"inverse-square-root": "inverse-sqrt", "WSD": "wsd"}
    for style, way in styles:
        for start in (0.0, 1e-5):
            scheduler = OptimizerParamScheduler(
                Optimizer(), start, PEAK, FLOOR, WARMUP, DECAY, style, 0.0, 0.0, 1, "constant",
                wsd_decay_steps=ANNEAL, lr_wsd_decay_style=way,
            )
            points = []
            for step in STEPS:
                scheduler.num_steps = step
                points.append([step, scheduler.get_lr({})])
            keys = {"style": ours.get(style, style), "start": start, "floor": FLOOR}
            if way:
                keys["anneal_style"] = way.replace("_", "-")
            yield keys, points


def transformers():
    import torch
    from transformers import optimization as hf

    def points(make, *args, **options):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
        rate = make(optimizer, *args, **options).lr_lambdas[0]
        return [[step, PEAK * rate(step)] for step in STEPS]

    yield {"style": "constant"}, points(hf.get_constant_schedule_with_warmup, WARMUP)
    yield {"style": "linear"}, points(hf.get_linear_schedule_with_warmup, WARMUP, DECAY)
    yield {"style": "cosine"}, points(hf.get_cosine_schedule_with_warmup, WARMUP, DECAY)
    # Without an end of its own.
    yield {"style": "inverse-sqrt", "decay": 1000}, points(hf.get_inverse_sqrt_schedule, WARMUP)
    for way in ("linear", "cosine"):
        made = points(
            hf.get_wsd_schedule, num_warmup_steps=WARMUP, num_decay_steps=ANNEAL,
            num_training_steps=DECAY, decay_type=way,
        )
        yield {"style": "wsd", "anneal_style": way}, made


def deepspeed():
    import torch
    from deepspeed.runtime import lr_schedules as ds

    def points(make, **options):
        """As the engine: the scheduler is made, and then steps after each step of the optimizer."""
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
        schedule = make(optimizer, **options)
        rates = []
        for _ in range(STEPS[-1] + 1):
            rates.append(optimizer.param_groups[0]["lr"])
            schedule.step()
        return [[step, rates[step]] for step in STEPS]

    for shape in ("linear", "log"):
        warm = {"warmup_min_lr": 1e-5, "warmup_max_lr": PEAK, "warmup_num_steps": WARMUP}
        keys = {"start": 1e-5, "warmup_shape": shape, "lag": "all"}
        yield {"style": "constant", **keys}, points(ds.WarmupLR, warmup_type=shape, **warm)
        made = points(ds.WarmupDecayLR, total_num_steps=DECAY, warmup_type=shape, **warm)
        yield {"style": "linear", "floor": 1e-5, **keys}, made
        made = points(
            ds.WarmupCosineLR, total_num_steps=DECAY, warmup_num_steps=WARMUP, warmup_type=shape,
            warmup_min_ratio=0.1, cos_min_ratio=0.01,
        )
        keys = {"start": 0.1 * PEAK, "floor": 0.01 * PEAK, "warmup_shape": shape}
        yield {"style": "cosine", **keys, "lag": "warmup"}, made
    test = {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 10}
    made = points(ds.LRRangeTest, lr_range_test_step_rate=2.9, **test)
    yield {"style": "range-test", "floor": 1e-5, "warmup": 0}, made


def main():
    cases = []
    for keys, points in globals()[sys.argv[1]]():
        fixed = {"peak": PEAK, "warmup": WARMUP, "decay": DECAY, "anneal": ANNEAL}
        cases.append({**fixed, **keys, "points": points})
    with open(sys.argv[2], "w") as out:
        out.write("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


main()
