//! Ports for servers of tests.

use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::net::TcpListener;

/// Above those of most services.
const FIRST: u64 = 10_000;

/// A port that is free and stays so: it is none of those that the system gives out by itself.
pub fn free_port() -> u16 {
    let given = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let given = given.split_whitespace().next().and_then(|first| first.parse::<u64>().ok());
    // Where the system gives out nearly all of them, one of its own.
    let count = given.unwrap_or(32_768).saturating_sub(FIRST).clamp(1_000, 50_000);
    loop {
        let port = (FIRST + RandomState::new().hash_one(0) % count) as u16; // fits: below 60,000
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}
