"""Names of the keys that other systems publish, from their own source code.

    python make.py deepspeed PACKAGE_FOLDER VERSION > deepspeed.txt
    python make.py transformers PACKAGE_FOLDER VERSION > transformers.txt
    python make.py megatron MEGATRON_LM_FOLDER VERSION > megatron.txt

Nothing is imported or run: the files are parsed.
"""

import ast
import sys
from pathlib import Path

OFFLOAD = "runtime/zero/offload_config.py"


def tree(folder, path):
    return ast.parse((Path(folder) / path).read_text())


def fields(module, name):
    """Annotated fields of a class; of a field with an alias that."""
    classes = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    cls = next(node for node in classes if node.name == name)
    for node in cls.body:
        if isinstance(node, ast.AnnAssign):
            call = node.value.keywords if isinstance(node.value, ast.Call) else []
            alias = [word.value.value for word in call if word.arg == "alias"]
            yield alias[0] if alias else node.target.id


def constants(module, prefix=""):
    """Names that a module assigns as texts."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name, value = node.targets[0].id, node.value.value
            if name.startswith(prefix) and isinstance(value, str):
                yield name, value


def deepspeed(folder):
    names = dict(constants(tree(folder, "runtime/constants.py")))
    names.update(constants(tree(folder, "runtime/config.py")))
    config = tree(folder, "runtime/config.py")
    # Scalars at the top: get_scalar_param(param_dict, NAME, ...).
    for node in ast.walk(config):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_scalar_param":
            first, key = node.args[0], node.args[1]
            if getattr(first, "id", "") == "param_dict" and getattr(key, "id", "") in names:
                yield names[key.id]
    yield from ["communication_data_type", "seq_parallel_communication_data_type"]
    models = [
        ("fp16", "runtime/precision_config.py", "DeepSpeedFP16Config"),
        ("bf16", "runtime/precision_config.py", "DeepSpeedBF16Config"),
        ("zero_optimization", "runtime/zero/config.py", "DeepSpeedZeroConfig"),
        ("zero_optimization.offload_param", OFFLOAD, "DeepSpeedZeroOffloadParamConfig"),
        ("zero_optimization.offload_optimizer", OFFLOAD, "DeepSpeedZeroOffloadOptimizerConfig"),
        ("tensorboard", "monitor/config.py", "TensorBoardConfig"),
        ("wandb", "monitor/config.py", "WandbConfig"),
        ("csv_monitor", "monitor/config.py", "CSVConfig"),
        ("comet", "monitor/config.py", "CometConfig"),
        ("comms_logger", "comm/config.py", "CommsLoggerConfig"),
        ("hybrid_engine", "runtime/config.py", "HybridEngineConfig"),
        ("compile", "compile/config.py", "CompileConfig"),
    ]
    for section, path, name in models:
        yield from (f"{section}.{field}" for field in fields(tree(folder, path), name))
    for section, path, prefix in [
        ("aio", "runtime/swap_tensor/constants.py", "AIO_"),
        ("activation_checkpointing", "runtime/activation_checkpointing/config.py", "ACT_CHKPT_"),
        ("flops_profiler", "profiling/constants.py", "FLOPS_PROFILER_"),
    ]:
        for name, value in constants(tree(folder, path), prefix):
            if not name.endswith(("_DEFAULT", "_FORMAT")) and value.replace("_", "").isalnum():
                yield f"{section}.{value}"
    yield from ["optimizer.type", "scheduler.type"]
    schedules = tree(folder, "runtime/lr_schedules.py")
    for cls in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        node = next(it for it in schedules.body if isinstance(it, ast.ClassDef) and it.name == cls)
        init = next(it for it in node.body if getattr(it, "name", "") == "__init__")
        for arg in init.args.args[2:]:
            yield f"scheduler.params.{arg.arg}"


def transformers(folder):
    yield from fields(tree(folder, "training_args.py"), "TrainingArguments")


def megatron(folder):
    for node in ast.walk(tree(folder, "megatron/training/arguments.py")):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (arg.value[2:] for arg in node.args if isinstance(arg, ast.Constant))


def main():
    system, folder, version = sys.argv[1:]
    print(f"# Keys of {system} {version}; see make.py.")
    names = sorted(set(globals()[system](folder)))
    sections = {name.rsplit(".", 1)[0] for name in names if "." in name}
    for name in names:
        if name not in sections:
            print(name)


main()
