//! Ports for servers of tests.

use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::net::TcpListener;

/// Above those of most services.
const FIRST: u64 = 10_000;

/// A port that is free and stays free: it is not in the system's range of ephemeral ports.
pub fn free_port() -> u16 {
    let given = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let given = given.split_whitespace().next().and_then(|first| first.parse::<u64>().ok());
    // If that range is nearly all ports, one of that range.
    let count = given.unwrap_or(32_768).saturating_sub(FIRST).clamp(1_000, 50_000);
    loop {
        let port = (FIRST + RandomState::new().hash_one(0) % count) as u16; // fits: below 60,000
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}
