//! Optimizer state and activations that are kept in host memory or on disks.

mod activations;
mod state;
mod threads;
