//! Steps that several ranks share: layouts, slices, and runs that change their ranks.

mod deterministic;
mod elastic;
mod layouts;
mod mesh;
mod slices;
