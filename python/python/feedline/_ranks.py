"""Which samples this process reads, when a loader was given no ranks.

A rank is taken from torch's process group if all its ranks read different samples. Where that is
not certain, `of_process` refuses and names what it found. Frameworks are looked up in
``sys.modules``: one that was not imported has started no processes.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Variables in which launchers give the number of processes: torchrun, Open MPI, MPICH, srun.
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Names of a mesh's dimension along which samples differ.
DATA_DIMENSIONS = {
    *("batch", "data", "data_parallel", "ddp", "dp", "dp_replicate", "dp_shard", "fsdp"),
    *("replicate", "shard"),
}
# Classes of FSDP2 and DDP that hold the mesh along which they divide samples.
DATA_MESHES = {"DataParallelMeshInfo", "DDPMeshInfo", "FSDPMeshInfo", "HSDPMeshInfo"}
# Callers between a loader and a trainer's loop. Lightning has 21 of them.
CALLERS_MAX = 64


def of_process() -> tuple[int, int]:
    """The data-parallel rank and size of this process; 0 and 1 if it is alone.

    Raises:
        ValueError: There are several processes, and ranks of them may share samples.
    """
    rank, size = of_group()
    for name in WORLD_SIZES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > size:
            group = f"a process group of {size}" if _has_group() else "no process group"
            raise _unclear(
                f"{name}={value} and {group}",
                "initialize torch.distributed before the first batch, or pass both; ranks that "
                "share samples pass the same data_parallel_rank",
            )
    if (count := _jax_processes()) > size:
        raise _unclear(
            f"{count} processes of JAX",
            "jax.process_index() and jax.process_count(), if each process reads other samples",
        )
    if size > 1 and (found := _sharing(size)) is not None:
        raise _unclear(*found)
    return rank, size


def of_group() -> tuple[int, int]:
    """The rank and size of torch's default process group; 0 and 1 if there is none."""
    if not _has_group():
        return 0, 1
    group = sys.modules["torch.distributed"]
    return group.get_rank(), group.get_world_size()


def _has_group() -> bool:
    group = sys.modules.get("torch.distributed")
    return group is not None and bool(group.is_available() and group.is_initialized())


def _unclear(found: str, hint: str) -> ValueError:
    return ValueError(
        "cannot divide the samples among ranks: expected data_parallel_rank and "
        f"data_parallel_size, found {found} (hint: {hint})"
    )


def _jax_processes() -> int:
    jax = sys.modules.get("jax")
    # Otherwise process_count() would start JAX's backends, which occupy its devices.
    if jax is None or not jax.distributed.is_initialized():
        return 1
    return int(jax.process_count())


def _sharing(size: int) -> tuple[str, str] | None:
    """What shows that ranks of the default group may share samples, and a hint."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None and megatron.model_parallel_is_initialized():
        count = megatron.get_data_parallel_world_size()
        if count == size:
            return None
        of_megatron = "parallel_state.get_data_parallel_rank() and get_data_parallel_world_size()"
        return f"{size} ranks, {count} data-parallel in Megatron's parallel_state", of_megatron
    hint = "ranks that share samples, as those of a tensor-parallel group, pass the same rank"
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    if smaller := [group.size() for group in world.pg_map if group.size() < size]:
        return f"a process group of {size} with a subgroup of {min(smaller)}", hint
    if (name := _mesh(size)) is not None:
        return f"a DeviceMesh of {size} ranks {name}", hint
    return None


def _mesh(size: int) -> str | None:
    """The dimension of a mesh of all ranks along which samples may be the same.

    Such a mesh has no group of its own, and torch keeps no list of meshes.
    """
    mesh_type = sys.modules["torch.distributed.device_mesh"].DeviceMesh
    meshes: list[Any] = []
    of_data: list[Any] = []
    for each in gc.get_objects():
        kind = type(each)
        if kind is mesh_type:
            meshes.append(each)
        elif kind.__name__ in DATA_MESHES:
            of_data.append(each.mesh)
    for mesh in meshes:
        if mesh.ndim != 1 or mesh.size() != size or any(mesh is data for data in of_data):
            continue
        if not mesh.mesh_dim_names:
            return "without names, which FSDP does not hold"
        if mesh.mesh_dim_names[0] not in DATA_DIMENSIONS:
            return f"with the dimension {mesh.mesh_dim_names[0]!r}"
    return None


def is_called_by(package: str) -> bool:
    """Whether a function of a package is among the callers. Only imported packages can be."""
    if package not in sys.modules:
        return False
    names = (str(frame.f_globals.get("__name__")) for frame in callers())
    return any(name == package or name.startswith(f"{package}.") for name in names)


def accelerate_processes() -> int | None:
    """Among how many processes accelerate divides what it reads now; None if it reads nothing."""
    if not is_called_by("accelerate.data_loader"):
        return None
    return int(sys.modules["accelerate.state"].PartialState().num_processes)


def callers() -> Iterator[FrameType]:
    """The frames of the calling functions, up to `CALLERS_MAX`, nearest first."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(CALLERS_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
