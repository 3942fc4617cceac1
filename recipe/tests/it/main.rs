//! Configurations, plans and imports of the configurations of other systems.
//!
//! One binary, because each binary is linked with all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod coming_from;
mod config;
mod config_layouts;
mod import;
mod import_conditions;
mod import_defaults;
mod import_keys;
mod import_schedules;
mod import_scripts;
mod import_values;
mod lr;
mod plan;
mod schedule;
mod shell_oracle;
mod world;
