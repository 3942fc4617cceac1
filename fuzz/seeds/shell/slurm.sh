#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node 4 # a rank for each GPU
#SBATCH -c6
set -euo pipefail
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
HOST=$(scontrol show hostnames | head -n 1)
srun --mpi=none bash -c "python train.py --rank \$SLURM_PROCID --host $HOST --seed `echo 7`"
